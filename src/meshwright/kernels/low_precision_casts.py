"""Operands in 8 and 4 bits as the kernels of `torch._scaled_mm` take them: numbers, and scales laid out.

Products sum along the last dim of both operands. An operand x (R, C) is cast along its columns, for products
that sum over these, or across, along its rows: then what a product takes is its transpose (C, R). Functions
return both casts, or the one that is asked for. On CUDA each is one Triton kernel; without Triton, and on
other devices, it is made of those of `kernels/low_precision.py`, which say what its bits are. x is in bf16.

Layouts of scales for numbers (M, K), with m = ceil(M / 128) and k = ceil(K / 128):

    of a tensor         fp32, one
    of a row            fp32 (M,)
    of 128 numbers      fp32 (k, M); of 128 x 128 (m, k rounded up to a multiple of 4)
    of 32 numbers       e8m0, blocks of 128 rows x 4 scales, of 512 bytes each: m x ceil(K / 128) of them
    of 16 numbers       e4m3, the same blocks: m x ceil(K / 64)

A scale of 128 numbers is four of 32 where a GPU has these alone: all are powers of two.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from meshwright.kernels.low_precision import (
    E4M3,
    E5M2,
    Form,
    nvfp4_numbers,
    rotate,
    scale_of,
    scales_of_blocks,
    to_numbers,
)
from meshwright.kernels.triton_operator import takes_triton, triton_operator


class Cast(NamedTuple):
    """An operand (M, K) of a product that sums over K."""

    numbers: Tensor
    scales: Tensor
    whole: Tensor | None = None
    """The tensor's scale beside those of blocks."""


class Casts(NamedTuple):
    """An operand (R, C) along its columns, and its transpose (C, R) along its rows; None if not asked for."""

    along: Cast | None
    across: Cast | None


def _ceil(size: int, block: int) -> int:
    return -(-size // block)


def blocked(scales: Tensor) -> Tensor:
    """Scales (..., M, S) of 8 bits in blocks of 128 x 4, as cuBLAS takes them: (..., bytes); M and S are
    multiples of these."""
    blocks = scales.unflatten(-1, (-1, 4)).unflatten(-3, (-1, 4, 32))  # (..., m, 4, 32, s, 4)
    return blocks.movedim(-2, -4).transpose(-3, -2).flatten(-5)


def unblocked(scales: Tensor, rows: int, columns: int) -> Tensor:
    """The inverse of `blocked`, cut to (..., rows, columns)."""
    blocks = scales.unflatten(-1, (_ceil(rows, 128), _ceil(columns, 4), 32, 4, 4))
    whole = blocks.transpose(-3, -2).movedim(-4, -2).flatten(-2).flatten(-4, -2)
    return whole[..., :rows, :columns]


# Results of operators -------------------------------------------------------------------------------------


def _form(e5m2: bool) -> Form:
    return E5M2 if e5m2 else E4M3


def _dtype(e5m2: bool) -> torch.dtype:
    return torch.float8_e5m2 if e5m2 else torch.float8_e4m3fn


def _shapes(x: Tensor, rows: bool, columns: bool) -> list[list[int]]:
    """The shape of x, and that of its transpose, of those that are asked for."""
    return [[*x.shape]] * rows + [[*x.shape[:-2], x.shape[-1], x.shape[-2]]] * columns


def empty_tensor(
    x: Tensor, scale: Tensor, seen: list[Tensor], e5m2: bool, rows: bool, columns: bool
) -> list[Tensor]:
    """Empty numbers along the columns and across, if asked for."""
    return [x.new_empty(shape, dtype=_dtype(e5m2)) for shape in _shapes(x, rows, columns)]


def empty_rows(x: Tensor, e5m2: bool, columns: bool) -> list[Tensor]:
    """Empty numbers, of the transpose with `columns`, and a scale for each of their rows."""
    (shape,) = _shapes(x, not columns, columns)
    return [x.new_empty(shape, dtype=_dtype(e5m2)), x.new_empty(shape[:-1], dtype=torch.float32)]


def empty_tiles(
    x: Tensor, e5m2: bool, block: int, square: bool, mx: bool, rows: bool, columns: bool
) -> list[Tensor]:
    """Empty numbers and scales along the columns and across, if asked for."""
    found: list[Tensor] = []
    for shape in _shapes(x, rows, columns):
        *batch, height, width = shape
        down, along = _ceil(height, 128), _ceil(width, 128)
        found.append(x.new_empty(shape, dtype=_dtype(e5m2)))
        if mx:
            found.append(x.new_empty([*batch, down * along * 512], dtype=torch.float8_e8m0fnu))
        else:
            sizes = [down, _ceil(along, 4) * 4] if square else [along, height]
            found.append(x.new_empty([*batch, *sizes], dtype=torch.float32))
    return found


def empty_nvfp4(
    x: Tensor, scale: Tensor, seen: list[Tensor], square: bool, stochastic: bool, rotated: bool, rows: bool,
    columns: bool,
) -> list[Tensor]:  # fmt: skip
    """Empty numbers, two in a byte, and scales of blocks along the columns and across, if asked for."""
    found: list[Tensor] = []
    for height, width in _shapes(x, rows, columns):
        packed = x.new_empty([height, width // 2], dtype=torch.uint8)
        found.append(packed.view(torch.float4_e2m1fn_x2))
        size = _ceil(height, 128) * _ceil(width, 64) * 512
        found.append(x.new_empty([size], dtype=torch.float8_e4m3fn))
    return found


cast_tensor = triton_operator("low_precision_casts", ["seen"], "cast_tensor")(empty_tensor)
"""Casts of x in 8 bits with a given scale, along its columns and across, as one kernel."""
cast_rows = triton_operator("low_precision_casts", name="cast_rows")(empty_rows)
"""Casts of x in 8 bits with a scale for each row, or for each column across, as one kernel."""
cast_tiles = triton_operator("low_precision_casts", name="cast_tiles")(empty_tiles)
"""Casts of x in 8 bits with a scale for each block, along its columns and across, as one kernel."""
cast_nvfp4 = triton_operator("nvfp4_casts", ["seen"], "cast_nvfp4")(empty_nvfp4)
"""Casts of x in nvfp4, along its columns and across, as one kernel."""


# The same by torch's operators ----------------------------------------------------------------------------


def note(x: Tensor, seen: Sequence[Tensor]) -> None:
    """Raise noted numbers to the largest magnitude of x."""
    if not seen or not x.numel():
        return
    least, most = x.detach().aminmax()
    largest = torch.maximum(most, -least)
    for each in seen:
        each.copy_(torch.maximum(each, largest))


def plain_tensor(
    x: Tensor, scale: Tensor, seen: Sequence[Tensor], e5m2: bool, rows: bool, columns: bool
) -> list[Tensor]:
    """`cast_tensor` by torch's operators."""
    note(x, seen)
    numbers = to_numbers(x, _form(e5m2), scale)
    return [numbers] * rows + [numbers.mT.contiguous()] * columns


def plain_rows(x: Tensor, e5m2: bool, columns: bool) -> list[Tensor]:
    """`cast_rows` by torch's operators."""
    x = x.mT if columns else x
    scales = scale_of(x.float().abs().amax(-1, keepdim=True), _form(e5m2).largest)
    return [to_numbers(x, _form(e5m2), scales).contiguous(), scales.squeeze(-1)]


def plain_tiles(
    x: Tensor, e5m2: bool, block: int, square: bool, mx: bool, rows: bool, columns: bool
) -> list[Tensor]:
    """`cast_tiles` by torch's operators."""
    found: list[Tensor] = []
    for each in [x] * rows + [x.mT] * columns:
        height, width = each.shape[-2:]
        padded = F.pad(each, (0, -width % 128, 0, -height % 128))
        scales = scales_of_blocks(padded, _form(e5m2), block if square else 1, block)
        every = scales.repeat_interleave(block if square else 1, -2).repeat_interleave(block, -1)
        found.append(to_numbers(each, _form(e5m2), every[..., :height, :width]).contiguous())
        if mx:
            codes = scales.repeat_interleave(block if square else 1, -2).repeat_interleave(block // 32, -1)
            found.append(blocked(codes.to(torch.float8_e8m0fnu)))
        elif square:
            found.append(F.pad(scales, (0, -scales.shape[-1] % 4)))
        else:
            found.append(scales[..., :height, :].mT.contiguous())
    return found


def plain_nvfp4(
    x: Tensor, scale: Tensor, seen: Sequence[Tensor], square: bool, stochastic: bool, rotated: bool,
    rows: bool, columns: bool,
) -> list[Tensor]:  # fmt: skip
    """`cast_nvfp4` by torch's operators."""
    found: list[Tensor] = []
    for turns in [False] * rows + [True] * columns:
        each = rotate(x) if rotated and turns else x
        if rows or rotated:
            note(each, seen)
        each = each.mT if turns else each
        height, width = each.shape
        padded = F.pad(each, (0, -width % 64, 0, -height % 128))
        numbers, blocks = nvfp4_numbers(padded, scale, 16 if square else 1, 16, stochastic)
        codes = _codes(numbers[:height, :width])
        packed = (codes[:, ::2] | codes[:, 1::2] << 4).contiguous()
        found.append(packed.view(torch.float4_e2m1fn_x2))
        every = blocks.to(torch.float8_e4m3fn).repeat_interleave(16 if square else 1, -2)
        found.append(blocked(every))
    return found


def _codes(numbers: Tensor) -> Tensor:
    """The 4 bits of numbers of e2m1; 0 for NaN, which the block's scale is, too."""
    numbers = numbers.nan_to_num(0)
    size = numbers.abs()
    code = torch.where(size < 2, size * 2, torch.where(size < 4, size + 2, size / 2 + 4))
    return code.to(torch.uint8) | (numbers.signbit().to(torch.uint8) << 3)


# What products call ---------------------------------------------------------------------------------------


def by_tensor(
    x: Tensor, form: Form, scale: Tensor, seen: Sequence[Tensor] = (), rows: bool = True, columns: bool = True
) -> Casts:
    """x (..., R, C) with a given scale, a power of two; its largest magnitude is noted in `seen`."""
    cast = cast_tensor if takes_triton(x.device) else plain_tensor
    found = [Cast(each, scale) for each in cast(x, scale, [*seen], form is E5M2, rows, columns)]
    return Casts(found[0] if rows else None, found[-1] if columns else None)


def by_row(x: Tensor, form: Form, columns: bool = False) -> Cast:
    """x (..., R, C) with a scale for each row; or its transpose (..., C, R), with one for each column."""
    cast = cast_rows if takes_triton(x.device) else plain_rows
    return Cast(*cast(x, form is E5M2, columns))


def by_tile(
    x: Tensor, form: Form, block: int, square: bool, mx: bool, rows: bool = True, columns: bool = True
) -> Casts:
    """x (..., R, C) with a scale for each `block` numbers, or `block` x `block`; with `mx` in the layout of
    blocks of 32."""
    cast = cast_tiles if takes_triton(x.device) else plain_tiles
    return _pairs(cast(x, form is E5M2, block, square, mx, rows, columns), rows, columns)


def by_nvfp4(
    x: Tensor, scale: Tensor, seen: Sequence[Tensor] = (), square: bool = False, stochastic: bool = False,
    rotated: bool = False, rows: bool = True, columns: bool = True,
) -> Casts:  # fmt: skip
    """x (R, C) in nvfp4 with the tensor's scale, a power of two. With `rotated` rows are before they are cast
    across; what is cast is noted in `seen`."""
    cast = cast_nvfp4 if takes_triton(x.device) else plain_nvfp4
    return _pairs(cast(x, scale, [*seen], square, stochastic, rotated, rows, columns), rows, columns, scale)


def _pairs(found: Sequence[Tensor], rows: bool, columns: bool, whole: Tensor | None = None) -> Casts:
    along = Cast(found[0], found[1], whole) if rows else None
    return Casts(along, Cast(found[-2], found[-1], whole) if columns else None)
