"""Several corpora by weight, without state: the source and the sample that a global sample index draws.

The indices are cut into blocks of `size`. Each block holds every source exactly `quota` times, in an order
that the seed and the block's number decide; the k-th draw from a source, counted over all blocks, is number k
of that source's own order. So the proportions are exact over each block, and a source repeats nothing within
its epoch.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np

from meshwright.data.permutation import I64, SampleOrder, hash64, permute
from meshwright.spec.errors import UserError

_SMALLEST_BLOCK = 2**10
_LARGEST_BLOCK = 2**18
_TOLERANCE = 0.01  # a quota may miss its weight by this share of it
_ORDER, _BLOCK = 1, 2  # streams of the seed


def quotas(weights: Sequence[float]) -> I64:
    """Return the draws of each source in one block: whole numbers within 1% of the proportion of `weights`.

    The block is the smallest power of two that allows it. Raises `UserError` for a weight too small for any.
    """
    share = np.asarray(weights, dtype=np.float64) / float(np.sum(weights))
    size = _SMALLEST_BLOCK
    while size <= _LARGEST_BLOCK:
        quota = _largest_remainder(share, size)
        if (quota > 0).all() and (np.abs(quota / size - share) <= _TOLERANCE * share).all():
            return quota
        size *= 2
    smallest = int(np.argmin(share))
    raise UserError(
        f"data.mixture: the weight {weights[smallest]} is {share[smallest]:.1e} of the sum of the weights, "
        f"too small to be drawn in proportion; give at least {100 / _LARGEST_BLOCK:.0e} of the sum, "
        "or remove it"
    )


def _largest_remainder(share: np.ndarray, size: int) -> I64:
    quota = np.floor(share * size).astype(np.int64)
    remainder = share * size - quota
    order = np.argsort(-remainder, kind="stable")
    quota[order[: size - int(quota.sum())]] += 1
    return quota


class Mixture:
    """The order of samples drawn from sources of `sizes` samples in the proportion of `weights`."""

    def __init__(self, sizes: Sequence[int], weights: Sequence[float], seed: int) -> None:
        self.quota = quotas(weights)
        self.size = int(self.quota.sum())
        self._seed = seed
        self._orders = [
            SampleOrder(n, int(hash64(seed, _ORDER, number)[0])) for number, n in enumerate(sizes)
        ]
        self._block = lru_cache(maxsize=4)(self._lay_block)

    def at(self, g: I64) -> tuple[I64, I64]:
        """Return (source, sample within the source) of each global index g >= 0."""
        block, place = g // self.size, g % self.size
        source, draw = np.empty_like(g), np.empty_like(g)
        for number in np.unique(block).tolist():
            here = block == number
            source_M, rank_M = self._block(number)
            source[here] = source_M[place[here]]
            draw[here] = number * self.quota[source[here]] + rank_M[place[here]]
        sample = np.empty_like(g)
        for number, order in enumerate(self._orders):
            here = source == number
            sample[here] = order.at(draw[here])
        return source, sample

    def _lay_block(self, number: int) -> tuple[I64, I64]:
        """Return for each place in a block its source, and how many earlier places have that source."""
        dealt_M = np.repeat(np.arange(len(self.quota)), self.quota)
        place_M = np.arange(self.size)
        source_M = dealt_M[permute(place_M, self.size, hash64(self._seed, _BLOCK, number))]
        rank_M = np.empty(self.size, dtype=np.int64)
        for source, quota in enumerate(self.quota.tolist()):
            rank_M[source_M == source] = np.arange(quota)
        return source_M, rank_M
