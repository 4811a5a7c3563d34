"""Pairs of answers in samples: a chosen and a rejected one, documents 2k and 2k + 1, stay together.

A pair lies in one sample, chosen answer first, each behind the prompt and none seeing the other. Where both
are longer than a sample, the longer one loses its end until they fit, and then both are of equal length: so
whatever is no longer than half a sample is never cut.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from meshwright.data.best_fit import best_fit
from meshwright.data.permutation import I64

Bools = NDArray[np.bool_]


def both_or_none(held: Bools) -> Bools:
    """Return for each document (2 pairs,) what is said of the first of its pair."""
    return np.repeat(held[::2], 2)


def cut_pairs(length_D: I64, size: int) -> I64:
    """Return the tokens of each document (2 pairs,) that are read, at most `size` of a pair."""
    pair = length_D.reshape(-1, 2)
    most = np.maximum(size - pair.min(1), size // 2)
    return np.minimum(pair, most[:, None]).reshape(-1)


def whole_pairs(trained_D: Bools) -> Bools:
    """Return True for both documents (2 pairs,) of each pair of which both have a token to train on."""
    return np.repeat(trained_D.reshape(-1, 2).all(1), 2)


def fit_pairs(length_D: I64, size: int, pack: bool) -> tuple[I64, I64]:
    """Return documents in the order of samples, and where each sample begins in it, as `best_fit`."""
    lengths = length_D.reshape(-1, 2).sum(1)
    order, first = np.arange(len(lengths)), np.arange(len(lengths) + 1)
    if pack:
        order, first = best_fit(lengths, size)
    return (2 * order[:, None] + np.arange(2)).reshape(-1), 2 * first
