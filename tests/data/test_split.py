from __future__ import annotations

import numpy as np
import pytest

from meshwright.data.permutation import hash64
from meshwright.data.split import SplitSurvey


def held_out(hashes: np.ndarray, fraction: float, piece: int = 7) -> np.ndarray:
    survey = SplitSurvey(fraction)
    for start in range(0, len(hashes), piece):
        survey.add(hashes[start : start + piece])
    rule = survey.rule()
    parts = [rule.mask(hashes[start : start + 3], start) for start in range(0, len(hashes), 3)]
    return np.concatenate([np.empty(0, np.bool_), *parts])


@pytest.mark.parametrize("fraction", [0.01, 0.1, 0.5, 0.9])
def test_the_share_of_documents(fraction: float) -> None:
    n = 20_000
    share = held_out(hash64(1, np.arange(n)), fraction).mean()
    assert abs(share - fraction) < 4 * np.sqrt(fraction * (1 - fraction) / n)


@pytest.mark.parametrize("fraction", [1e-12, 0.02, 0.5, 1 - 1e-12])
@pytest.mark.parametrize("n", [2, 3, 10])
def test_both_sides_have_a_document(n: int, fraction: float) -> None:
    for seed in range(20):
        assert 1 <= held_out(hash64(seed, np.arange(n)), fraction).sum() <= n - 1


def test_equal_hashes_still_leave_both_sides_one() -> None:
    for value in (0, 2**64 - 1):
        assert held_out(np.full(2, value, dtype=np.uint64), 0.5).sum() == 1


def test_no_fraction_and_no_second_document_hold_nothing_out() -> None:
    assert not held_out(hash64(1, np.arange(50)), 0).any()
    assert not held_out(hash64(1, np.arange(1)), 0.9).any()
    assert held_out(np.empty(0, dtype=np.uint64), 0.5).size == 0


def test_documents_keep_their_side_when_others_come() -> None:
    hashes = hash64(7, np.arange(1000))
    assert np.array_equal(held_out(hashes, 0.1)[:500], held_out(hashes[:500], 0.1))
