"""Rounding of trained weights to 8 and 4 bits, as quantised models store and multiply them.

    recipe         numbers   a scale for                            inputs
    int8           int8      a row: an output channel               not rounded
    int4           int4      a group of 32, 64 or 128 of a row      not rounded
    int8-dynamic   int8      a row                                  int8, a scale for a token
    fp8            e4m3      a row                                  e4m3, a scale for a token

Scales are symmetric: the largest number of a row over half the range of its codes, as torchao's
(`quant_primitives.py`, `MappingType.SYMMETRIC`). They are kept in bf16, the format that they are stored in.
Matrices are (..., R, C), rounded from fp32.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from meshwright.spec.precision import Quantised

BITS: dict[Quantised, int] = {"int8": 8, "int4": 4, "int8-dynamic": 8, "fp8": 8}
DYNAMIC: tuple[Quantised, ...] = ("int8-dynamic", "fp8")
"""Recipes that round the inputs of products, too."""
E4M3_LARGEST = 448.0
TINY = 2.0**-126


class Codes(NamedTuple):
    """Codes (..., R, C), in int8 or e4m3, and the scales (..., R, C / group) that they are multiplied by."""

    codes: Tensor
    scales: Tensor

    def values(self) -> Tensor:
        """The numbers (..., R, C) that the codes stand for, in fp32."""
        groups = self.codes.float().unflatten(-1, (self.scales.shape[-1], -1))
        return (groups * self.scales.float().unsqueeze(-1)).flatten(-2)


def quantise(x: Tensor, recipe: Quantised, group: int = 0, scales: torch.dtype = torch.bfloat16) -> Codes:
    """The codes of (..., R, C) by a recipe with a scale for each `group` of columns, or for all (0)."""
    groups = x.float().unflatten(-1, (-1, group or x.shape[-1]))
    scale = scales_of(groups, recipe).to(scales)
    return Codes(codes_of(groups, scale, recipe).flatten(-2), scale.squeeze(-1))


def scales_of(groups: Tensor, recipe: Quantised) -> Tensor:
    """The scales (..., 1) of groups (..., C) of fp32, in fp32: not yet rounded to the format they have."""
    most = E4M3_LARGEST if recipe == "fp8" else (2 ** BITS[recipe] - 1) / 2
    return (groups.abs().amax(-1, keepdim=True) / most).clamp(min=TINY)


def codes_of(groups: Tensor, scale: Tensor, recipe: Quantised) -> Tensor:
    """The nearest codes (..., C) of a weight's numbers in fp32, given their scales (..., 1)."""
    if recipe == "fp8":
        return _nearest(groups / scale.float(), recipe)
    return _nearest(groups * (1 / scale.float()), recipe)  # as torchao does for integers


def _nearest(scaled: Tensor, recipe: Quantised) -> Tensor:
    if recipe == "fp8":
        return scaled.clamp(-E4M3_LARGEST, E4M3_LARGEST).to(torch.float8_e4m3fn)
    half = 2 ** (BITS[recipe] - 1)
    return scaled.round().clamp(-half, half - 1).to(torch.int8)


def fake_quantise(weight: Tensor, recipe: Quantised, group: int) -> Tensor:
    """A weight (..., R, C) rounded by a recipe, in its own format; `group` counts for int4."""
    return quantise(weight, recipe, group if recipe == "int4" else 0).values().to(weight.dtype)


def fake_quantise_tokens(x: Tensor, recipe: Quantised) -> Tensor:
    """Inputs (..., N, C) of products, rounded with a scale for each token by the recipes that do so.

    Scales are in fp32. The largest number of a token falls in the middle between two codes, so that the last
    bit decides: numbers are divided by the scale, as compressed-tensors does.
    """
    if recipe not in DYNAMIC:
        return x
    numbers = x.float()
    scale = scales_of(numbers, recipe)
    return (_nearest(numbers / scale, recipe).float() * scale).to(x.dtype)
