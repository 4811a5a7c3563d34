"""The second implementation of batches gives the ones of `Loader`, token by token."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from contextlib import AbstractContextManager, closing
from itertools import islice
from unittest.mock import patch

import numpy as np
import pytest
import torch

from meshwright.comm.mesh import Mesh
from meshwright.data import corpus, permutation, synthetic
from meshwright.data.corpus import open_corpus
from meshwright.data.loader import TENSORS, Loader
from meshwright.data.packing import Samples, Windows
from meshwright.data.split import HeldOut
from meshwright.data.synthetic import SyntheticTokens
from meshwright.spec import RunSpec
from meshwright.verify.reference import data as reference_data
from meshwright.verify.reference.data import batches
from meshwright.verify.verify import verify
from ranks import Ranks
from small import spec_of

PACKINGS = [
    {},
    {"data__document_mask": "false"},
    {"data__pack": "false"},
]


def check(spec: RunSpec, epochs: float = 0.0, steps: int = 1) -> None:
    """Compare the batches of so many epochs, and of so many steps, in values, dtypes and shapes."""
    corpus = open_corpus(spec)
    steps += math.ceil(epochs * corpus.train.samples / spec.batch_sequences)
    with closing(Loader(corpus, spec, 0, 1)) as loader:
        for step, plain in enumerate(islice(batches(spec), steps)):
            loaded = loader.step(step)
            for name in TENSORS:
                ours, theirs = getattr(plain, name), getattr(loaded, name)
                assert ours.dtype == theirs.dtype and torch.equal(ours, theirs), (step, name)


def drawn(draw: random.Random, shortest: int, longest: int, **flags: object) -> RunSpec:
    """A run with a random length of samples, size of batches, vocabulary, seed and validation split."""
    seq_len, sequences = draw.randint(shortest, longest), draw.randint(1, 9)
    base = {
        "model.vocab_size": draw.choice([2, 61, 50257]),
        "model.max_seq_len": 4096,
        "data.corpus": "synthetic",
        "data.seq_len": seq_len,
        "data.val_fraction": draw.choice([0, 0.005, 0.5]),
        "train.batch_tokens": seq_len * sequences,
        "train.seed": draw.choice([0, 1, draw.getrandbits(31)]),
        "layout.dp": 1,
    }
    return spec_of(base, **flags)


@pytest.mark.parametrize("number", range(2))
@pytest.mark.parametrize("flags", PACKINGS, ids=str)
def test_batches_of_the_whole_corpus_are_equal(flags: dict[str, object], number: int) -> None:
    check(drawn(random.Random(f"{flags} {number}"), 16, 300, **flags), steps=3)


@pytest.mark.parametrize("flags", PACKINGS, ids=str)
def test_batches_of_small_corpora_are_equal_over_several_epochs(
    monkeypatch: pytest.MonkeyPatch, flags: dict[str, object]
) -> None:
    """With validation splits that would hold out no document, or all."""
    monkeypatch.setattr(SyntheticTokens, "_count_bytes", lambda tokens: np.ones(tokens.documents, np.int64))
    monkeypatch.setattr(corpus, "synthetic_tokens", SyntheticTokens)  # a new one each time
    for number, fraction in enumerate([0, 1e-9, 0.3, 0.5, 1 - 1e-9]):
        draw = random.Random(f"{flags} {number}")
        documents = draw.randint(2, 9)
        monkeypatch.setattr(synthetic, "DOCUMENTS", documents)
        monkeypatch.setattr(reference_data, "_DOCUMENTS", documents)
        longest = 17 if "data__pack" not in flags else 130  # the shortest document has 17 targets
        check(drawn(draw, 4, longest, **flags, data__val_fraction=fraction), epochs=2.5)


def test_orders_of_any_number_of_samples_are_equal() -> None:
    for size in range(1, 70):
        key = permutation.hash64(size)
        order = permutation.permute(np.arange(size), size, key).tolist()
        assert order == [reference_data._permuted(place, size, int(key[0])) for place in range(size)]


def fewer_rounds() -> AbstractContextManager[object]:
    return patch.object(permutation, "_ROUNDS", 6)


def no_split() -> AbstractContextManager[object]:
    return patch.object(HeldOut, "mask", lambda rule, hashes, first=0: np.zeros(len(hashes), dtype=np.bool_))


def gathered_as(change: Callable[[Samples], Samples]) -> AbstractContextManager[object]:
    gather = Windows.gather
    return patch.object(Windows, "gather", lambda windows, ids: change(gather(windows, ids)))


def targets_in_place() -> AbstractContextManager[object]:
    return gathered_as(lambda samples: samples._replace(targets=samples.tokens))


def positions_that_wrap() -> AbstractContextManager[object]:
    return gathered_as(lambda samples: samples._replace(positions=samples.positions % 8))


def one_document() -> AbstractContextManager[object]:
    return gathered_as(lambda samples: samples._replace(documents=0 * samples.documents))


HARMS = [fewer_rounds, no_split, targets_in_place, positions_that_wrap, one_document]


def verify_harmed(
    mesh: Mesh, spec: RunSpec, harm: Callable[[], AbstractContextManager[object]]
) -> dict[str, object] | None:
    with harm():
        return verify(spec, mesh, 1)


@pytest.mark.parametrize("harm", HARMS)
def test_verify_finds_a_wrong_loader(
    ranks: Ranks, harm: Callable[[], AbstractContextManager[object]]
) -> None:
    spec = spec_of({"model.vocab_size": 61, "data.seq_len": 64, "train.batch_tokens": 256, "layout.dp": 2})
    found = ranks.run(spec.layout, verify_harmed, spec, harm)[0]
    assert not found["equal"]
    assert found["first"]["kind"] == "samples"
