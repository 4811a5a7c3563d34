from __future__ import annotations

import numpy as np
import pytest

from meshwright.data.mixture import Mixture, quotas
from meshwright.spec import UserError


@pytest.mark.parametrize("weights", [[1.0], [1, 1], [0.7, 0.3], [5, 3, 2], [1, 0.01], [1 / 3, 1 / 3, 1 / 3]])
def test_proportions_are_exact_over_each_block(weights: list[float]) -> None:
    mixture = Mixture([50] * len(weights), weights, seed=1)
    share = np.array(weights) / sum(weights)
    for block in (0, 1, 1000):
        source, _ = mixture.at(block * mixture.size + np.arange(mixture.size))
        counts = np.bincount(source, minlength=len(weights))
        assert counts.tolist() == mixture.quota.tolist()
        assert np.allclose(counts / mixture.size, share, rtol=0.01)


def test_each_source_is_walked_once_per_its_epoch() -> None:
    sizes = [7, 100, 1]
    mixture = Mixture(sizes, [2, 5, 1], seed=4)
    source, sample = mixture.at(np.arange(20_000))
    for number, size in enumerate(sizes):
        drawn = sample[source == number]
        whole = drawn[: len(drawn) // size * size].reshape(-1, size)
        assert len(whole) > 10
        assert (np.sort(whole, axis=1) == np.arange(size)).all()


def test_it_is_a_function_of_the_index() -> None:
    mixture = Mixture([1000, 333], [0.25, 0.75], seed=9)
    g = np.random.default_rng(0).integers(0, 50_000, 500)
    source, sample = mixture.at(g)
    again = Mixture([1000, 333], [0.25, 0.75], seed=9)
    one_by_one = [again.at(np.array([i])) for i in g[:50]]
    assert [int(s[0]) for s, _ in one_by_one] == source[:50].tolist()
    assert [int(s[0]) for _, s in one_by_one] == sample[:50].tolist()
    other, _ = Mixture([1000, 333], [0.25, 0.75], seed=10).at(g)
    assert (other != source).any()


def test_sources_are_mixed_within_a_block() -> None:
    source, _ = Mixture([10_000, 10_000], [1, 1], seed=0).at(np.arange(1024))
    changes = (np.diff(source) != 0).sum()
    assert 400 < changes < 624  # 512 expected, standard deviation 16


def test_small_weights_get_a_larger_block() -> None:
    small = quotas([1, 2e-3])
    assert small[1] / small.sum() == pytest.approx(2e-3 / 1.002, rel=0.01)


def test_a_weight_too_small_is_refused_by_value() -> None:
    with pytest.raises(UserError, match=r"data\.mixture: the weight 1e-09 .*too small"):
        quotas([1, 1e-9])
