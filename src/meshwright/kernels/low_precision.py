"""Rounding to fp8, mxfp8 and nvfp4.

    recipe          scale of                               source
    fp8             a tensor, from steps before            Micikevicius et al. 2022; Transformer Engine
    fp8-rowwise     a row along the summed dim             torchao; gradients of weights stay in 16 bits
    fp8-blockwise   128 numbers, 128 x 128 of a weight     DeepSeek-AI 2024, DeepSeek-V3, §3.3
    mxfp8           32 numbers                             OCP 2023; Mishra et al. 2025
    nvfp4           16 numbers, 16 x 16 of a weight, and   NVIDIA 2025, arXiv 2509.25149
                    of a tensor, from steps before

Scales are powers of two, those of nvfp4's blocks in e4m3, so that each rounded number is one of bf16, too.
Matrices are (..., R, C). Numbers of fp64 are rounded to fp32 first: layouts that differ by rounding in fp64
then hardly ever differ in a number of few bits, as those half-way between two would.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from meshwright.kernels.splitmix64 import mix64_, shift, signed, stream


class Form(NamedTuple):
    """A number format: the tensors that hold it, if any do, and its largest number."""

    dtype: torch.dtype | None
    largest: float


E4M3, E5M2, E2M1 = Form(torch.float8_e4m3fn, 448.0), Form(torch.float8_e5m2, 57344.0), Form(None, 6.0)
LEAST_SCALE = -126
"""Exponent of the smallest scale, whose inverse is a normal number of fp32."""
LEAST_BLOCK = 2.0**-6
"""Least scale of a block of nvfp4: the smallest normal number of e4m3."""
PART = 2**22
"""Numbers that are rounded at a time: with all that is made in fp32, some 80 MB."""
ROOM = 8.0
"""How many times the largest number of the steps before nvfp4's tensor scale leaves room for. Blocks have
scales of their own, so that this costs no digit; the rotation makes numbers up to 4 times larger."""


def power_of_two(exponent: Tensor) -> Tensor:
    """2 to an integer from -126 to 127, in fp32, from its bits: exact on every device."""
    return ((exponent.int() + 127) << 23).view(torch.float32)


def scale_of(largest: Tensor, most: float) -> Tensor:
    """The least power of two by which numbers up to `largest` (fp32) are divided to be at most `most`; NaN
    for those that are not finite."""
    mantissa, exponent = torch.frexp(largest)
    most_mantissa, most_exponent = math.frexp(most)
    power = exponent - most_exponent + (mantissa > most_mantissa)
    return power_of_two(power.clamp_(min=LEAST_SCALE)) + (largest - largest)


def round_e2m1(x: Tensor, up: Tensor | None = None) -> Tensor:
    """Round numbers of fp32 up to 6 to 0, 0.5, 1, 1.5, 2, 3, 4 or 6: to the nearest, ties to even; or away
    from zero where `up`, uniform in [0, 1), is below the part of the step that is cut off."""
    _, exponent = torch.frexp(x)
    step = power_of_two((exponent - 1).clamp_(min=0) - 1)
    steps = x / step
    if up is None:
        return steps.round_() * step
    whole = steps.trunc()
    return (whole + ((steps - whole).abs() > up) * steps.sign()) * step


def _tiles(x: Tensor, rows: int, columns: int) -> Tensor:
    """(..., R, C) in fp32 as (..., R / rows, rows, C / columns, columns), with zeros in parts of tiles; 0
    stands for all of them."""
    rows, columns = rows or x.shape[-2], columns or x.shape[-1]
    x = x.float()
    if x.shape[-2] % rows or x.shape[-1] % columns:
        x = F.pad(x, (0, -x.shape[-1] % columns, 0, -x.shape[-2] % rows))
    return x.unflatten(-1, (-1, columns)).unflatten(-3, (-1, rows))


def _untiled(tiles: Tensor, like: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """The inverse of `_tiles`, in the shape of `like` and in its format, or another."""
    whole = tiles.flatten(-2).flatten(-3, -2)
    return whole[..., : like.shape[-2], : like.shape[-1]].to(dtype or like.dtype)


def in_parts(rounded: Callable[[Tensor], Tensor], x: Tensor, rows: int = 1, columns: int = 1) -> Tensor:
    """`rounded` of parts of (..., R, C) that are whole tiles and small, so that what it makes in fp32 is."""
    if x.numel() <= PART:
        return rounded(x)
    dim, unit = (-1, columns) if rows == 0 else (-2, rows)
    size = max(1, PART // (x.numel() // x.shape[dim]) // unit) * unit
    found = [rounded(part) for part in x.split(size, dim)]
    return torch.cat(found, dim)


def scales_of_blocks(x: Tensor, form: Form, rows: int, columns: int) -> Tensor:
    """The scale of each tile of `rows` x `columns`: (..., R / rows, C / columns)."""
    return scale_of(_tiles(x, rows, columns).abs().amax((-3, -1)), form.largest)


def to_numbers(x: Tensor, form: Form, scales: Tensor) -> Tensor:
    """x divided by `scales` in 8 bits; what is beyond becomes the largest number, infinities NaN."""
    assert form.dtype is not None
    scaled = x.float() / scales
    within = scaled.clamp(-form.largest, form.largest)
    return torch.where(x.isinf(), math.nan, within).to(form.dtype)


def round_tensor(x: Tensor, form: Form, scale: Tensor) -> Tensor:
    """Round with a given scale."""
    return in_parts(lambda part: (to_numbers(part, form, scale).float() * scale).to(x.dtype), x)


def round_tiles(x: Tensor, form: Form, rows: int, columns: int) -> Tensor:
    """Round (..., R, C) with a scale for each tile of `rows` x `columns`; 0 stands for all of them."""
    assert form.dtype is not None

    def rounded(part: Tensor) -> Tensor:
        tiles = _tiles(part, rows, columns)
        scales = scale_of(tiles.abs().amax((-3, -1), keepdim=True), form.largest)
        return _untiled((tiles / scales).to(form.dtype).float() * scales, part)

    return in_parts(rounded, x, rows, columns)


def round_nvfp4(x: Tensor, scale: Tensor, rows: int, columns: int, stochastic: bool = False) -> Tensor:
    """Round (..., R, C) to nvfp4 with tiles of `rows` x `columns`, given the tensor's scale."""

    def rounded(part: Tensor) -> Tensor:
        numbers, blocks = _nvfp4(_tiles(part, rows, columns), scale, stochastic)
        return _untiled(numbers * (blocks * scale), part)

    return in_parts(rounded, x, rows, columns)


def _nvfp4(tiles: Tensor, scale: Tensor, stochastic: bool) -> tuple[Tensor, Tensor]:
    """Numbers of e2m1 for tiles of fp32, and the scale of each tile, given that of the tensor."""
    largest = tiles.abs().amax((-3, -1), keepdim=True)
    blocks = (largest / E2M1.largest / scale).clamp(LEAST_BLOCK, E4M3.largest)
    blocks = blocks.to(torch.float8_e4m3fn).float() + (largest - largest)
    # One by one: the inverse of the least scale times that of the least block is infinite.
    scaled = (tiles * (1 / scale)).mul_(1 / blocks).clamp_(-E2M1.largest, E2M1.largest)
    return round_e2m1(scaled, _uniform(scaled) if stochastic else None), blocks


def nvfp4_numbers(
    x: Tensor, scale: Tensor, rows: int, columns: int, stochastic: bool = False
) -> tuple[Tensor, Tensor]:
    """The numbers of e2m1 (..., R, C) and the scales of tiles (..., R / rows, C / columns), in fp32, that
    `round_nvfp4` multiplies by the tensor's scale."""
    numbers, blocks = _nvfp4(_tiles(x, rows, columns), scale, stochastic)
    return _untiled(numbers, x, torch.float32), blocks[..., 0, :, 0]


def _uniform(tiles: Tensor) -> Tensor:
    """Numbers in [0, 1) for (..., R, rows, C, columns), each a hash of all numbers of its tile, in bf16.

    So they need no generator, whose state would depend on the layout; a tile hardly ever occurs twice.
    """
    rows, _, columns = tiles.shape[-3:]
    place = torch.arange(rows * columns, device=tiles.device).view(rows, 1, columns)
    bits = (tiles + 0.0).bfloat16().view(torch.int16).long()  # of -0, too, those of 0
    odd = mix64_(stream(place, 1)).bitwise_or_(1)
    key = (bits * odd).sum((-3, -1), keepdim=True)
    mixed = mix64_(key + (place + 1) * signed(0x9E3779B97F4A7C15))
    return (shift(mixed, 40).float() / 2**24).to(tiles.dtype)


SIGNS = 1, 1, -1, 1, -1, -1, 1, 1, -1, 1, 1, 1, -1, -1, 1, -1
"""Signs of the rotation; any that look random serve (NVIDIA 2025, §4.2)."""


def rotate(x_RC: Tensor) -> Tensor:
    """Each 16 rows of (..., R, C) rotated by a Hadamard matrix with random signs, which spreads outliers.

    A product that sums over the rows of two operands is that of the rotated ones.
    """
    hadamard = x_RC.new_ones(1, 1)
    for _ in range(4):
        hadamard = torch.cat([torch.cat([hadamard, hadamard], 1), torch.cat([hadamard, -hadamard], 1)])
    columns = zip(hadamard.unbind(1), SIGNS, strict=True)
    turn = torch.stack([column * sign for column, sign in columns], 1) / 4
    rows = x_RC.unflatten(-2, (-1, 16))
    return (turn @ rows).view(x_RC.shape)
