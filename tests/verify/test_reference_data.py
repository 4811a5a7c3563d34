"""The second implementation of batches gives the ones of `Loader`, token by token."""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import AbstractContextManager, closing
from dataclasses import fields
from unittest.mock import patch

import numpy as np
import pytest
import torch

from meshwright.data import permutation, synthetic
from meshwright.data.corpus import open_corpus
from meshwright.data.loader import Batch, Loader
from meshwright.data.packing import Samples, Windows
from meshwright.data.split import HeldOut
from meshwright.data.synthetic import SyntheticTokens
from meshwright.parallel.mesh import Mesh
from meshwright.spec import RunSpec
from meshwright.verify import reference_data
from meshwright.verify.reference_data import batches
from meshwright.verify.verify import verify
from ranks import Ranks
from small import spec_of

PACKINGS = [
    {},
    {"data__document_mask": "false"},
    {"data__pack": "false"},
]


def of_the_loader(spec: RunSpec, steps: int) -> list[Batch]:
    with closing(Loader(open_corpus(spec), spec, 0, 1)) as loader:
        return [loader.step(step) for step in range(steps)]


def differing(one: Batch, other: Batch) -> list[str]:
    """Names of the fields in which two batches differ, in a value, the dtype or the shape."""
    pairs = [(field.name, getattr(one, field.name), getattr(other, field.name)) for field in fields(Batch)]
    return [name for name, a, b in pairs if a.dtype != b.dtype or not torch.equal(a, b)]


def drawn(draw: random.Random, shortest: int, longest: int, **flags: object) -> RunSpec:
    """A run with a random length of samples, size of batches, vocabulary, seed and validation split."""
    seq_len, sequences = draw.randint(shortest, longest), draw.randint(1, 9)
    base = {
        "model.vocab_size": draw.choice([2, 61, 50257]),
        "model.max_seq_len": 4096,
        "data.corpus": "synthetic",
        "data.seq_len": seq_len,
        "data.val_fraction": draw.choice([0, 1e-9, 0.005, 0.5, 0.999999]),
        "train.batch_tokens": seq_len * sequences,
        "train.seed": draw.choice([0, 1, draw.getrandbits(31)]),
        "layout.dp": 1,
    }
    return spec_of(base, **flags)


@pytest.mark.parametrize("number", range(2))
@pytest.mark.parametrize("flags", PACKINGS, ids=str)
def test_batches_of_the_whole_corpus_are_equal(flags: dict[str, object], number: int) -> None:
    spec = drawn(random.Random(f"{flags} {number}"), 16, 300, **flags)
    for plain, loaded in zip(batches(spec), of_the_loader(spec, 3), strict=False):
        assert not differing(plain, loaded)


@pytest.mark.parametrize("flags", PACKINGS, ids=str)
def test_batches_of_small_corpora_are_equal_over_several_epochs(
    monkeypatch: pytest.MonkeyPatch, flags: dict[str, object]
) -> None:
    """Down to one sample, with a validation split that would hold out all documents, or none."""
    monkeypatch.setattr(SyntheticTokens, "_count_bytes", lambda tokens: np.ones(tokens.documents, np.int64))
    for number in range(6):
        draw = random.Random(f"{flags} {number}")
        documents = draw.randint(2, 9)
        monkeypatch.setattr(synthetic, "DOCUMENTS", documents)
        monkeypatch.setattr(reference_data, "_DOCUMENTS", documents)
        longest = 17 if "data__pack" not in flags else 130  # the shortest document has 17 targets
        spec = drawn(draw, 4, longest, **flags)
        samples = open_corpus(spec).train.samples
        steps = -(-5 * samples // (2 * spec.batch_sequences))
        for plain, loaded in zip(batches(spec), of_the_loader(spec, steps), strict=False):
            assert not differing(plain, loaded)


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
    assert found["rows"][0]["kind"] == "step 1 loss"
    assert found["rows"][0]["worst"] > 1e-7
