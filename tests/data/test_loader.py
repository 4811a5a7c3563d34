from __future__ import annotations

import gc
import os
import threading
from collections.abc import Callable
from itertools import product
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from covering import covered
from meshwright.data.corpus import Corpus, open_corpus
from meshwright.data.loader import ON_DEVICE, TENSORS, Batch, Loader
from meshwright.data.packing import IGNORE
from meshwright.parallel.microbatches import own_tokens
from meshwright.spec import RunSpec

MakeSpec = Callable[..., RunSpec]


def same(one: Batch, other: Batch) -> bool:
    return all(torch.equal(getattr(one, name), getattr(other, name)) for name in TENSORS)


def test_documents_stay_where_attention_is_planned(make_spec: MakeSpec) -> None:
    batch = steps(open_corpus(make_spec({})), make_spec({}), 0, 1, range(1))[0].to(torch.device("meta"))
    assert {name for name in TENSORS if getattr(batch, name).device.type == "cpu"} == {
        "documents",
        "ids",
        "slots",
    }


def test_what_a_gpu_reads_is_pinned_by_the_loader_and_again_for_context_ranks(
    make_spec: MakeSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tensor that is marked stands for one in pinned memory, which takes a GPU."""
    pinned: set[int] = set()
    alive: list[torch.Tensor] = []

    def pin(tensor: torch.Tensor) -> torch.Tensor:
        alive.append(tensor.clone())
        pinned.add(id(alive[-1]))
        return alive[-1]

    monkeypatch.setattr(torch.Tensor, "pin_memory", pin)
    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda tensor: id(tensor) in pinned)
    spec = make_spec()
    corpus = open_corpus(spec)
    (plain,) = steps(corpus, spec, 0, 1, range(1))
    loader = Loader(corpus, spec, 0, 1, pin=True)
    batch = loader.step(0)
    loader.close()
    assert same(batch, plain)
    for context in (1, 2):
        mesh: Any = SimpleNamespace(context=SimpleNamespace(size=context, rank=0))
        own, expected = own_tokens(batch, mesh), own_tokens(plain, mesh)
        assert same(own, expected)
        assert {name for name in TENSORS if getattr(own, name).is_pinned()} == set(ON_DEVICE)
        assert not any(getattr(expected, name).is_pinned() for name in TENSORS)


def joined(batches: list[Batch]) -> Batch:
    columns = {name: torch.cat([getattr(batch, name) for batch in batches]) for name in TENSORS}
    return Batch(**columns)


def steps(corpus: Corpus, spec: RunSpec, rank: int, ranks: int, numbers: range) -> list[Batch]:
    loader = Loader(corpus, spec, rank, ranks)
    found = [loader.step(number) for number in numbers]
    loader.close()
    return found


@pytest.mark.parametrize("pack", [True, False])
def test_the_order_is_the_same_on_any_number_of_ranks(make_spec: MakeSpec, pack: bool) -> None:
    spec = make_spec({"pack": pack})
    corpus = open_corpus(spec)
    one = steps(corpus, spec, 0, 1, range(6))
    for ranks in (2, 4, 8):
        split = [steps(corpus, spec, rank, ranks, range(6)) for rank in range(ranks)]
        for step, whole in enumerate(one):
            assert same(joined([rank[step] for rank in split]), whole)
            assert whole.slots.tolist() == list(range(spec.batch_sequences))


def test_shapes_types_and_shifted_targets(make_spec: MakeSpec) -> None:
    spec = make_spec()
    (batch,) = steps(open_corpus(spec), spec, 1, 2, range(3, 4))
    for name in ("tokens", "targets", "positions", "documents"):
        array = getattr(batch, name)
        assert array.shape == (4, 32) and array.dtype == torch.int64 and array.is_contiguous()
    assert batch.ids.shape == batch.slots.shape == (4,) and batch.ids.dtype == torch.int64
    real = batch.targets[:, :-1] != IGNORE
    assert torch.equal(batch.tokens[:, 1:][real], batch.targets[:, :-1][real])


def test_a_step_depends_on_seed_and_number_alone(make_spec: MakeSpec) -> None:
    spec = make_spec()
    corpus = open_corpus(spec)
    straight = steps(corpus, spec, 0, 1, range(12))
    loader = Loader(corpus, spec, 0, 1)
    for number in (11, 3, 4, 5, 0, 11, 11, 7):
        assert same(loader.step(number), straight[number])
    loader.close()
    other = make_spec(train={"seed": 6})
    assert not torch.equal(steps(corpus, other, 0, 1, range(1))[0].ids, straight[0].ids)


def test_opening_and_closing_leaves_nothing_behind(make_spec: MakeSpec) -> None:
    spec = make_spec()

    def held() -> tuple[int, int]:
        gc.collect()  # what earlier tests left
        return len(os.listdir("/proc/self/fd")), threading.active_count()

    open_corpus(spec)
    before = held()
    for number in range(500):
        if number % 20 == 0:
            corpus = open_corpus(spec)
        loader = Loader(corpus, spec, 0, 1)
        loader.step(number)
        loader.close()
    del corpus, loader
    assert held() == before


@pytest.mark.parametrize("pack", [True, False])
def test_an_epoch_predicts_every_token_once(make_spec: MakeSpec, pack: bool) -> None:
    spec = make_spec({"pack": pack}, train={"batch_tokens": 32})
    corpus = open_corpus(spec)
    epochs = joined(steps(corpus, spec, 0, 1, range(2 * corpus.train.samples)))
    halves = epochs.ids.reshape(2, -1)
    assert not torch.equal(halves[0], halves[1])
    expected = None
    for epoch, ids in enumerate(halves):
        assert torch.equal(ids.sort().values, torch.arange(corpus.train.samples))
        rows = epochs.targets.reshape(2, corpus.train.samples, -1)[epoch][ids.argsort()]
        predicted = rows[rows != IGNORE]
        assert len(predicted) == corpus.train.target_tokens
        expected = predicted if expected is None else expected
        assert torch.equal(predicted, expected)


def test_a_larger_batch_is_the_same_sequence(make_spec: MakeSpec) -> None:
    small, large = make_spec(train={"batch_tokens": 64}), make_spec(train={"batch_tokens": 512})
    corpus = open_corpus(small)
    one = joined(steps(corpus, small, 0, 1, range(16))).ids
    other = joined(steps(corpus, large, 0, 1, range(2))).ids
    assert torch.equal(one, other)


VALIDATIONS: list[dict[str, Any]] = [
    {"pack": pack, "max_tokens": max_tokens, "ranks": ranks}
    for ranks, max_tokens, pack in product((1, 2, 4), (None, 1, 100, 777), (True, False))
]


@pytest.mark.parametrize("case", covered(VALIDATIONS))
def test_validation_covers_each_held_out_token_once(make_spec: MakeSpec, case: dict[str, Any]) -> None:
    max_tokens, ranks = case["max_tokens"], case["ranks"]
    spec = make_spec({"pack": case["pack"], "val_fraction": 0.3})
    corpus = open_corpus(spec)
    loaders = [Loader(corpus, spec, rank, ranks) for rank in range(ranks)]
    batches = [list(loader.validation.batches(max_tokens)) for loader in loaders]
    assert len({len(found) for found in batches}) == 1
    merged = joined([batch for found in batches for batch in found])
    order = merged.slots.argsort()
    assert torch.equal(merged.slots[order], torch.arange(len(order)))
    targets = merged.targets[order]
    found = targets[targets != IGNORE]
    split = corpus.validation
    whole = torch.from_numpy(split.gather(np.arange(split.samples)).targets)
    wanted = whole[whole != IGNORE][:max_tokens]
    assert torch.equal(found, wanted)
    end = corpus.tokenizer.end_id
    assert corpus.tokenizer.decode_bytes(found[found != end].tolist()) == split.text_bytes(max_tokens)
    assert split.bytes_for(max_tokens) == len(split.text_bytes(max_tokens))
    padding = merged.ids == -1
    assert (merged.targets[padding] == IGNORE).all()
    assert not (merged.targets[~padding] == IGNORE).all(dim=1).any()


def test_no_validation_yields_no_batches(make_spec: MakeSpec) -> None:
    spec = make_spec({"val_fraction": 0})
    assert list(Loader(open_corpus(spec), spec, 0, 1).validation.batches()) == []


def test_mixtures_are_loaded_in_proportion(make_spec: MakeSpec, folder: Any, tmp_path: Any) -> None:
    other = tmp_path / "other.txt"
    other.write_text("Z" * 3000)
    spec = make_spec({"mixture": {str(folder): 3.0, str(other): 1.0}}, train={"batch_tokens": 32 * 1024})
    corpus = open_corpus(spec)
    for ranks in (1, 4):
        batch = joined([steps(corpus, spec, rank, ranks, range(1))[0] for rank in range(ranks)])
        from_other = (batch.tokens == ord("Z")).any(dim=1).sum().item()
        assert from_other == 256


def test_what_fails_in_the_background_is_raised_by_the_next_step(
    make_spec: MakeSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = make_spec()
    corpus = open_corpus(spec)
    loader = Loader(corpus, spec, 0, 1)
    gather = corpus.train.gather
    loader.step(0)
    loader.step(1)
    loader._pool.submit(int).result()  # step 2 is ready

    def fail(ids: np.ndarray) -> Any:
        raise OSError("the disk is gone")

    monkeypatch.setattr(corpus.train, "gather", fail)
    loader.step(2)
    with pytest.raises(OSError, match="the disk is gone"):
        loader.step(3)
    monkeypatch.setattr(corpus.train, "gather", gather)
    assert loader.step(3).ids.shape == (8,)
    loader.close()


def test_a_share_that_is_not_whole_is_a_bug(make_spec: MakeSpec) -> None:
    spec = make_spec()
    corpus = open_corpus(spec)
    for rank, ranks in ((0, 3), (2, 2), (-1, 2)):
        with pytest.raises(ValueError, match="for a batch of 8 sequences"):
            Loader(corpus, spec, rank, ranks)


@pytest.mark.parametrize("ranks", [1, 2])
def test_validation_batches_are_as_large_as_a_step(make_spec: MakeSpec, ranks: int) -> None:
    spec = make_spec({"val_fraction": 0.5}, train={"batch_tokens": 32 * 16}, layout={"micro_batch": 2})
    corpus = open_corpus(spec)
    sizes = [len(batch.ids) for batch in Loader(corpus, spec, ranks - 1, ranks).validation.batches()]
    assert set(sizes[:-1]) == {16 // ranks} and len(sizes) > 1
    left = corpus.validation.samples - ranks * sum(sizes[:-1])
    assert sizes[-1] % 2 == 0 and 0 <= ranks * sizes[-1] - left < 2 * ranks


def test_a_short_validation_of_a_mixture_takes_of_each_source(
    make_spec: MakeSpec, folder: Any, tmp_path: Any
) -> None:
    other = tmp_path / "other"
    other.mkdir()
    for number in range(40):
        (other / f"{number}.txt").write_text(f"Z{number} " + "Z" * 300)
    spec = make_spec({"mixture": {str(folder): 1.0, str(other): 1.0}, "val_fraction": 0.5})
    corpus = open_corpus(spec)
    whole = np.array(corpus.validation.tokens_by_source)
    for limit in (0, 1, 500, int(whole.sum()) - 1):
        shares = corpus.validation.shares(limit)
        assert sum(shares) == limit
        assert np.allclose(shares, limit * whole / whole.sum(), atol=1)
        batches = list(Loader(corpus, spec, 0, 1).validation.batches(limit))
        counted = [(batch.targets != IGNORE).sum().item() for batch in batches]
        assert sum(counted) == limit
        spelt = b"".join(
            part.text_bytes(share)
            for part, share in zip(corpus.validation.sides, shares, strict=True)
            if share
        )
        assert corpus.validation.text_bytes(limit) == spelt
        assert corpus.validation.bytes_for(limit) == len(spelt)
