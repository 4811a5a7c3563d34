from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.data.permutation import SampleOrder, hash64, permute

SIZES = [1, 2, 3, 4, 5, 7, 8, 9, 31, 32, 33, 127, 128, 129, 1023, 1024, 1025, 10007, 65535, 65536, 65537]


@pytest.mark.parametrize("n", SIZES)
def test_each_epoch_holds_every_sample_once(n: int) -> None:
    order = SampleOrder(n, seed=11)
    for epoch in (0, 1, 17, 2**33):
        seen = order.at(epoch * n + np.arange(n))
        assert np.array_equal(np.sort(seen), np.arange(n))


@settings(max_examples=60)
@given(n=st.integers(1, 5000), seed=st.integers(0, 2**63 - 1), epoch=st.integers(0, 2**40))
def test_any_size_seed_and_epoch_is_a_bijection(n: int, seed: int, epoch: int) -> None:
    seen = SampleOrder(n, seed).at(epoch * n + np.arange(n))
    assert np.array_equal(np.sort(seen), np.arange(n))


def test_a_huge_set_stays_within_and_distinct() -> None:
    n = 2**45 + 12345
    seen = SampleOrder(n, seed=3).at(np.arange(100_000))
    assert seen.min() >= 0 and seen.max() < n
    assert len(np.unique(seen)) == len(seen)
    # Uniform over [0, n): the mean of 1e5 draws has a standard error of n / sqrt(12 * 1e5).
    assert abs(seen.mean() / n - 0.5) < 5 / np.sqrt(12e5)


def test_each_sample_is_a_function_of_its_own_index() -> None:
    order = SampleOrder(1000, seed=1)
    g = np.array([0, 5, 999, 1000, 123456, 7])
    assert order.at(g).tolist() == [order.at(np.array([i]))[0] for i in g]
    assert order.at(np.empty(0, dtype=np.int64)).size == 0


def test_epochs_and_seeds_give_other_orders() -> None:
    n = 257
    orders = [
        SampleOrder(n, seed).at(epoch * n + np.arange(n)) for seed in (0, 1, 2**62) for epoch in (0, 1, 2)
    ]
    for i, one in enumerate(orders):
        for other in orders[:i]:
            assert (one == other).mean() < 0.05  # two random orders agree in one place on average


@pytest.mark.parametrize("n", [1000, 4096, 10007])
def test_no_correlation(n: int) -> None:
    """Between a sample's place and its number, successive samples, and the same place of two epochs."""
    order = SampleOrder(n, seed=2)
    places = np.arange(n)
    first, second = order.at(places), order.at(n + places)
    pairs = [(places, first), (first[:-1], first[1:]), (first, second)]
    for one, other in pairs:
        assert abs(np.corrcoef(one, other)[0, 1]) < 4.5 / np.sqrt(n)


def test_neighbours_are_spread_evenly() -> None:
    """The first tenth of an epoch takes its share of each tenth of the samples (chi-squared, 9 degrees)."""
    n = 50_000
    counts = np.bincount(SampleOrder(n, seed=8).at(np.arange(n // 10)) * 10 // n, minlength=10)
    assert ((counts - 500) ** 2 / 500).sum() < 33  # p = 1e-4


def test_small_permutations_all_occur() -> None:
    """Every order of 3 samples appears among the seeds."""
    found = {tuple(permute(np.arange(3), 3, hash64(seed)).tolist()) for seed in range(200)}
    assert len(found) == 6
