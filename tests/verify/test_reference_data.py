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
from numpy.typing import NDArray

from meshwright.comm.mesh import Mesh
from meshwright.data import corpus, permutation, synthetic
from meshwright.data.corpus import open_corpus
from meshwright.data.loader import TENSORS, Loader
from meshwright.data.packing import Samples, Windows
from meshwright.data.permutation import I64
from meshwright.data.split import HeldOut
from meshwright.data.synthetic import SyntheticChats, SyntheticTokens
from meshwright.data.whole_documents import WholeDocuments
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
    {"data__format": "chat"},
    {"data__format": "chat", "data__pack": "false"},
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
    monkeypatch.setattr(corpus, "synthetic_chats", SyntheticChats)
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


def gathered_as(
    change: Callable[[Samples], Samples], kind: type[Windows | WholeDocuments] = Windows
) -> AbstractContextManager[object]:
    gather = kind.gather
    return patch.object(kind, "gather", lambda windows, ids: change(gather(windows, ids)))


def targets_in_place() -> AbstractContextManager[object]:
    return gathered_as(lambda samples: samples._replace(targets=samples.tokens))


def positions_that_wrap() -> AbstractContextManager[object]:
    return gathered_as(lambda samples: samples._replace(positions=samples.positions % 8))


def one_document() -> AbstractContextManager[object]:
    return gathered_as(lambda samples: samples._replace(documents=0 * samples.documents))


def mask_one_token_late() -> AbstractContextManager[object]:
    """A token is trained on where the one before it is marked."""

    def late(chats: SyntheticChats, place: I64) -> NDArray[np.bool_]:
        return marked(chats, np.maximum(place - 1, 0))

    marked = SyntheticChats.trained
    return patch.object(SyntheticChats, "trained", late)


def every_turn_trained_on() -> AbstractContextManager[object]:
    return patch.object(SyntheticChats, "trained", lambda chats, place: np.ones(place.shape, np.bool_))


def chats_that_see_each_other() -> AbstractContextManager[object]:
    return gathered_as(lambda samples: samples._replace(documents=0 * samples.documents), WholeDocuments)


def chats_that_lose_their_beginnings() -> AbstractContextManager[object]:
    """Joined and cut, as other documents are."""
    return patch.object(SyntheticChats, "marked", False)


HARMS_OF_CHATS = [
    mask_one_token_late,
    every_turn_trained_on,
    chats_that_see_each_other,
    chats_that_lose_their_beginnings,
]
HARMS = [fewer_rounds, no_split, targets_in_place, positions_that_wrap, one_document]


def verify_harmed(
    mesh: Mesh, spec: RunSpec, harm: Callable[[], AbstractContextManager[object]]
) -> dict[str, object] | None:
    with harm():
        return verify(spec, mesh, 1)


@pytest.mark.parametrize("harm", [*HARMS, *HARMS_OF_CHATS])
def test_verify_finds_a_wrong_loader(
    ranks: Ranks, harm: Callable[[], AbstractContextManager[object]]
) -> None:
    rows = {"data.format": "chat"} if harm in HARMS_OF_CHATS else {}
    base = {"model.vocab_size": 61, "data.seq_len": 64, "train.batch_tokens": 256, "layout.dp": 2}
    spec = spec_of(base | rows)
    found = ranks.run(spec.layout, verify_harmed, spec, harm)[0]
    assert not found["equal"]
    assert found["first"]["kind"] == "samples"
