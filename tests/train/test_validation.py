"""Validation under layouts: the numbers of one device, bounded, and without a wait for each microbatch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import small
from meshwright.comm.collectives import sum_scalars
from meshwright.comm.mesh import Mesh
from meshwright.data.corpus import open_corpus
from meshwright.data.loader import Loader
from meshwright.infer import sample
from meshwright.infer.sample import held_out_sample
from meshwright.spec import RunSpec
from meshwright.train.callbacks import Observers
from meshwright.train.open_run import open_run
from meshwright.train.step import Trainer
from ranks import Ranks

PIPELINE = {"layout__pp": 2, "layout__virtual": 2, "model__layers": 4}


def spec_of(corpus: Path, **flags: object) -> RunSpec:
    base = {
        "model.vocab_size": 300,
        "data.corpus": corpus,
        "data.tokenizer": "byte",
        "data.seq_len": 16,
        "data.val_fraction": 0.1,
        "data.cache": corpus.parent / "tokens",
        "train.batch_tokens": 8 * 16,
        "train.steps": 1,
        "precision.compute": "fp64",
    }
    return small.spec_of(base, **flags)


def evaluate(mesh: Mesh, spec: RunSpec) -> tuple[list[float], list[int], list[int]]:
    """(nll and targets over all ranks, microbatches of each pass, microbatches that there were)."""
    trainer = Trainer(spec, mesh)
    trainer.initialise()
    forward, passes = trainer.pipeline.forward, []

    def count(micros: list[Any]) -> list[torch.Tensor]:
        passes.append(len(micros))
        return forward(micros)

    trainer.pipeline.forward = count  # type: ignore[method-assign,assignment]
    loader = Loader(open_corpus(spec), spec, mesh.data_rank, spec.layout.data_ranks)
    total = torch.zeros(2, dtype=torch.float64)
    expected = []
    for batch in loader.validation.batches(spec.train.eval_tokens):
        found = trainer.nll(batch)
        assert found.dtype == torch.float64 and found.device == mesh.device
        total += found
        expected.append(-(-len(batch.ids) // spec.micro_batch))
    loader.close()
    return sum_scalars(total.tolist(), mesh.world), passes, expected


@pytest.mark.parametrize(
    "flags",
    [
        {"layout__dp": 2, "layout__zero": 3},
        {"layout__tp": 2, "layout__cp": 2},
        {**PIPELINE, "layout__schedule": "interleaved", "layout__dp": 2},
        {**PIPELINE, "layout__schedule": "zb-v"},
    ],
    ids=lambda flags: "-".join(str(value) for value in flags.values()),
)
def test_a_layout_validates_as_one_device(ranks: Ranks, corpus: Path, flags: dict[str, object]) -> None:
    flags = {**flags, "layout__micro_batch": 2, "train__eval_tokens": 700}
    layers = {key: value for key, value in flags.items() if not key.startswith("layout")}
    layout = spec_of(corpus, **flags)
    (whole, _, _), *_ = ranks.run(spec_of(corpus).layout, evaluate, spec_of(corpus, **layers))
    for found, passes, expected in ranks.run(layout.layout, evaluate, layout):
        assert passes == expected and len(passes) > 1 and max(passes) > 1
        if found[1]:  # the ranks with the pipeline's end
            assert found[1] == whole[1] and abs(found[0] / whole[0] - 1) < 1e-12


def last_validation(mesh: Mesh, spec: RunSpec, out: Path) -> dict[str, Any]:
    run = open_run(spec, mesh, out, Observers([]))
    return run.execute(None) | run.corpus.compressed(spec.train.eval_tokens)


def test_the_last_validation_and_xz_are_limited_too(ranks: Ranks, corpus: Path, tmp_path: Path) -> None:
    results = {}
    for tokens in ("none", 10**7, 300):
        spec = spec_of(corpus, train__eval_tokens=tokens, layout__dp=2)
        results[tokens] = ranks.run(spec.layout, last_validation, spec, tmp_path / str(tokens))[0]
    every, default, few = (results[key]["val_loss"] for key in ("none", 10**7, 300))
    assert every == default != few
    assert results["none"]["xz_bytes"] > 300 >= results[300]["xz_bytes"] > 0
    assert results["none"]["xz_bytes"] == open_corpus(spec_of(corpus)).validation.bytes_for()


def write_sample(mesh: Mesh, spec: RunSpec, most_bytes: int) -> tuple[dict[str, str] | None, list[int]]:
    """The sample, and how often the whole model was put together by gathers of a forward."""
    trainer = Trainer(spec, mesh)
    trainer.initialise()
    calls: list[int] = []
    trainer.decoder.register_forward_pre_hook(lambda *_: calls.append(1))
    kept, sample.MOST_BYTES = sample.MOST_BYTES, most_bytes
    try:
        return held_out_sample(trainer, open_corpus(spec)), calls
    finally:
        sample.MOST_BYTES = kept


def test_a_sharded_model_is_gathered_once_for_the_sample_or_not_at_all(ranks: Ranks, corpus: Path) -> None:
    spec = spec_of(corpus, layout__dp=2, layout__zero=3)
    (first, calls), (second, others) = ranks.run(spec.layout, write_sample, spec, 2**32)
    assert first is not None and second is None and not calls and not others
    assert [found for found, _ in ranks.run(spec.layout, write_sample, spec, 1)] == [None, None]
    whole = spec_of(corpus)
    assert ranks.run(whole.layout, write_sample, whole, 1)[0][0] is not None
