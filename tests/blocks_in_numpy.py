"""Weights rounded to blocks of codes, number by number: `lora.quantise` once more, in numpy."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from meshwright.model.blockwise_quantisation import NF4_LEVELS
from meshwright.spec.lora import BASE_BITS
from meshwright.spec.parameters import BaseFormat


def levels_of(form: BaseFormat) -> NDArray[np.float64]:
    if form == "nf4":
        return np.array(NF4_LEVELS)
    most = 2 ** (BASE_BITS[form] - 1) - 1
    return np.arange(-most, most + 1) / most


def in_numpy(values: NDArray[Any], form: BaseFormat) -> NDArray[Any]:
    """Values (O, I), rounded number by number: of all levels the nearest to each, times the block's most."""
    wide = np.float64 if values.dtype == np.float64 else np.float32
    found, levels = np.empty(values.shape, wide), levels_of(form)
    for row in range(values.shape[0]):
        for start in range(0, values.shape[1], 64):
            block = values[row, start : start + 64].astype(np.float64)
            most = np.abs(block).max()
            near = np.abs(block[:, None] / (most or 1.0) - levels[None]).argmin(1)
            found[row, start : start + 64] = levels[near].astype(wide) * wide(most)
    return found
