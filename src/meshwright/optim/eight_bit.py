"""Numbers in 8 bits with one scale for each block (Dettmers et al. 2022, arXiv 2110.02861, section 2).

A block is divided by its largest number, and each quotient becomes the nearest of 256 values, which are dense
near 0 ("dynamic" quantisation, Dettmers 2016, arXiv 1511.04561). Codes and scales are those of torchao's
AdamW8bit, to the bit.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from meshwright.spec.eight_bit import MAP_SIZE, PREFIXES

_LEAST_SCALE = 1e-12
"""Scale of a block of zeros. Source: torchao."""
_EXPONENTS = 7
"""Powers of ten of the map, 1e-6 to 1."""


def _values(signed: bool) -> tuple[float, ...]:
    """The 256 values of codes 0 to 255, rising, from -1 or from 0 to 1.

    For the i-th power of ten the interval from 0.1 to 1 of it is cut into 2^i equal parts, or for numbers
    without a sign into 2^(i + 1), whose centres are values.
    """
    values = [0.0, 1.0]
    for exponent in range(_EXPONENTS):
        edges = torch.linspace(0.1, 1, 2 ** (exponent if signed else exponent + 1) + 1)
        centres = (10 ** (exponent + 1 - _EXPONENTS)) * ((edges[:-1] + edges[1:]) / 2.0)
        values += centres.tolist() + ((-centres).tolist() if signed else [])
    return tuple(sorted(values))


SIGNED, UNSIGNED = _values(True), _values(False)


@lru_cache
def _tables(values: tuple[float, ...], exact: torch.dtype) -> tuple[list[float], list[int]]:
    """Thresholds and first codes of a map (see `DynamicMap`)."""
    kind: Any = np.float32 if exact is torch.float32 else np.float64
    held = np.asarray(values, kind)
    low, high = held[:-1], held[1:]
    tried = [(low + high) / 2]
    for _ in range(4):  # numbers near the middle, of which the first that torchao rounds up is taken
        tried = [np.nextafter(tried[0], -np.inf), *tried, np.nextafter(tried[-1], np.inf)]
    up = np.stack([number - low >= (high - low) * kind(0.5) for number in tried])
    thresholds = np.append(np.take_along_axis(np.stack(tried), up.argmax(0)[None], 0)[0], kind(np.inf))
    prefixes = np.arange(PREFIXES, dtype=np.uint32) << 16
    ends: NDArray[np.float32] = np.stack([prefixes, prefixes | 0xFFFF]).view(np.float32)
    # One less than the least number of the prefix, since quotients in float64 are rounded to find theirs.
    least = np.nextafter(np.clip(np.nan_to_num(ends), -1, 1).min(0), np.float32(-np.inf))
    first = np.searchsorted(thresholds[:-1], least, side="right")
    return thresholds.tolist(), first.tolist()


class DynamicMap(NamedTuple):
    """The values of codes, and what finds the nearest of a number without a search.

    Numbers in fp32 whose upper 16 bits are equal have one of two neighbouring codes.
    """

    values: Tensor
    """(256,) values of the codes, rising."""
    thresholds: Tensor
    """(256,) least number of the next code."""
    first: Tensor
    """(65536,) codes of the least numbers by their upper 16 bits in fp32, in uint8."""

    @classmethod
    def make(cls, values: tuple[float, ...], exact: torch.dtype, device: torch.device) -> DynamicMap:
        """The map of `values` for numbers of the format `exact`."""
        thresholds, first = _tables(values, exact)
        assert len(values) == len(thresholds) == MAP_SIZE
        tables = (values, exact), (thresholds, exact), (first, torch.uint8)
        return cls(
            *(
                torch.empty(len(table), dtype=dtype, device=device).copy_(torch.tensor(table, dtype=dtype))
                for table, dtype in tables
            )
        )

    def quantised(self, numbers: Tensor) -> tuple[Tensor, Tensor]:
        """Codes (n, block) in uint8 and scales (n,) of blocks (n, block)."""
        scale = numbers.abs().amax(-1).clip(_LEAST_SCALE)
        quotients = (numbers / scale.unsqueeze(-1)).view(-1)
        prefixes = (quotients.float().view(torch.int32) >> 16).bitwise_and_(PREFIXES - 1)
        codes = self.first.index_select(0, prefixes)
        codes += quotients >= self.thresholds.index_select(0, codes.int())
        return codes.view_as(numbers), scale


def dequantised(codes: Tensor, scale: Tensor, values: Tensor) -> Tensor:
    """Blocks (n, block) of numbers from their codes, scales (n,) and the (256,) values of codes."""
    return values.index_select(0, codes.view(-1).int()).view(codes.shape).mul_(scale.unsqueeze(-1))
