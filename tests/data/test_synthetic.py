from __future__ import annotations

import numpy as np
import pytest

from meshwright.data.synthetic import DOCUMENTS, LONGEST, SHORTEST, SyntheticTokens
from meshwright.data.tokenizer import number_tokenizer


@pytest.mark.parametrize("vocab_size", [2, 64, 50_000])
def test_tokens_are_within_the_vocabulary_and_documents_vary(vocab_size: int) -> None:
    source = SyntheticTokens(seed=1, vocab_size=vocab_size)
    starts = source.rows(0, DOCUMENTS).starts
    ids = source.take(np.arange(starts[-1]))
    lengths = np.diff(starts) - 1
    assert ids.min() >= 0 and ids.max() == vocab_size - 1
    assert np.array_equal(np.flatnonzero(ids == vocab_size - 1), starts[:-1])
    assert len(lengths) == DOCUMENTS and len(np.unique(lengths)) > 500
    assert lengths.min() >= SHORTEST and lengths.max() <= LONGEST


def test_any_place_is_read_alone() -> None:
    source = SyntheticTokens(seed=1, vocab_size=100)
    whole = source.take(np.arange(10_000))
    assert [int(source.take(np.array([p]))[0]) for p in (0, 1, 777, 9999)] == whole[
        [0, 1, 777, 9999]
    ].tolist()


def test_the_seed_decides() -> None:
    one, same, other = (SyntheticTokens(seed, 100) for seed in (1, 1, 2))
    places = np.arange(2000)
    assert np.array_equal(one.take(places), same.take(places)) and one.digest == same.digest
    assert (one.take(places) != other.take(places)).mean() > 0.5 and one.digest != other.digest


def test_bytes_are_those_of_the_numbers_spelt_out() -> None:
    source, tokenizer = SyntheticTokens(seed=3, vocab_size=2000), number_tokenizer(2000)
    rows = source.rows(0, 20)
    rows = source.rows(0, 20)
    for document in range(20):
        ids = source.take(np.arange(rows.starts[document] + 1, rows.starts[document + 1]))
        text = " ".join(map(str, ids.tolist()))
        assert tokenizer.decode(ids.tolist()) == text
        assert rows.bytes[document] == len(text)


def test_there_is_a_skew_to_learn() -> None:
    source = SyntheticTokens(seed=1, vocab_size=1001)
    ids = source.take(np.arange(100_000))
    share = (ids < 125).mean()  # u < 1/2
    assert abs(share - 0.5) < 0.02
