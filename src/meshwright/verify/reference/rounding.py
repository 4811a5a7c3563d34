"""Stochastic rounding of weights to bf16 on one device: a part of the reference of `meshwright verify`.

Written from the rule of docs/optimisers.md in exact arithmetic on float64. An element at fraction f of the
gap between its neighbours in bf16 is rounded away from zero if 2^16 f + draw >= 2^16. The draw is 16 of the
64 bits that splitmix64 (Steele et al. 2014) makes of the seed, the number of the update, the parameter's name
and the element's place.
"""

from __future__ import annotations

import hashlib
from math import ceil, prod

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


def nearest(values: Tensor) -> Tensor:
    """The nearest numbers of bf16 to those of fp32 that are nearest to `values`, in float64."""
    return values.float().bfloat16().double()


def stochastic(values: Tensor, seed: int, update: int, name: str) -> Tensor:
    """The whole parameter `name` after update number `update`, rounded to numbers of bf16, in float64."""
    mantissa, exponent = np.frexp(np.abs(values.detach().cpu().double().numpy()))
    mantissa = mantissa * 2.0**8  # from 2^7 to 2^8: neighbours in bf16 are 1 apart
    low = np.floor(mantissa)
    up = (mantissa - low) * 2.0**16 >= 2.0**16 - _draws(tuple(values.shape), seed, update, name)
    rounded = torch.from_numpy(np.ldexp(low + up, exponent - 8)).to(values.device)
    return rounded.copysign(values.double())


def _draws(shape: tuple[int, ...], seed: int, update: int, name: str) -> NDArray[np.float64]:
    """Whole numbers from 0 to 2^16 - 1."""
    rows, columns = prod(shape[:-1]), shape[-1]
    index, width = np.arange(rows * columns, dtype=np.uint64), np.uint64(columns)
    row, column = index // width, index % width
    place = row * np.uint64(ceil(columns / 4)) + column // np.uint64(4)
    start = hashlib.sha256(f"{seed}:{name}:{update}".encode()).digest()[:8]
    bits = np.uint64(int.from_bytes(start, "little")) + place * np.uint64(0x9E3779B97F4A7C15)
    bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    bits ^= bits >> np.uint64(31)
    drawn = (bits >> (np.uint64(16) * (column % np.uint64(4)))) & np.uint64(0xFFFF)
    return drawn.astype(np.float64).reshape(shape)
