"""Casts of operands to nvfp4, each in one kernel: blocks of 16 numbers, those of gradients rounded at random.

Rows of inputs and gradients are rotated before they are cast across (`kernels/low_precision_casts.py`).
"""

# What Triton compiles has no annotations: its arguments are pointers, and constants by their `tl.constexpr`.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from meshwright.kernels import low_precision_casts as declared
from meshwright.kernels.triton.low_precision_casts import (
    BOTH,
    as_bytes,
    case_of,
    four,
    fp8_code,
    from_bf16,
    magnitude,
    note,
    swizzled,
    to_bf16,
)


@triton.jit
def _mixed(bits):
    """splitmix64's finaliser (`kernels/splitmix64.py`)."""
    bits = (bits ^ ((bits >> 30) & 0x3FFFFFFFF)) * -4658895280553007687
    bits = (bits ^ ((bits >> 27) & 0x1FFFFFFFFF)) * -7723592293110705685
    return bits ^ ((bits >> 31) & 0x1FFFFFFFF)


@triton.jit
def _uniform(blocks):
    """Numbers in [0, 1) for (., ., 16): hashes of the numbers of a block in bf16."""
    place = tl.arange(0, 16).to(tl.int64)
    odd = _mixed(place * -7046029254386353131 + 1) | 1
    bits = (to_bf16(blocks + 0.0).to(tl.int32, bitcast=True) >> 16).to(tl.int64)
    key = tl.sum(bits * odd[None, None, :], 2)
    mixed = _mixed(key[:, :, None] + ((place + 1) * -7046029254386353131)[None, None, :])
    return ((mixed >> 40) & 0xFFFFFF).to(tl.float32) * 5.9604644775390625e-08


@triton.jit
def _e2m1(x, STOCHASTIC: tl.constexpr):
    """The 4 bits of fp32 numbers (., ., 16) up to 6: to the nearest, ties to even, or at random."""
    size = tl.abs(x)
    power = tl.where(size < 2, 0, tl.where(size < 4, 1, 2))
    steps = size * tl.where(size < 2, 2.0, tl.where(size < 4, 1.0, 0.5))
    if STOCHASTIC:
        whole = tl.floor(steps)
        steps = whole + tl.where(steps - whole > _uniform(x), 1.0, 0.0)
    else:
        steps = (steps + 12582912.0) - 12582912.0
    code = (tl.where(x == x, steps, 0.0).to(tl.int32) + 2 * power) | (
        (x.to(tl.int32, bitcast=True) >> 28) & 8
    )
    if STOCHASTIC:
        code = tl.where(x == 0.0, 0, code)
    return tl.where(x == x, code, 0)


@triton.jit
def _fp4(number, scale, SQUARE: tl.constexpr, STOCHASTIC: tl.constexpr, TILE: tl.constexpr):
    """The numbers of a tile along its columns, two in a byte, and the scales of blocks, in e4m3."""
    SIDE: tl.constexpr = TILE // 16
    blocks = tl.reshape(number, (TILE, SIDE, 16))
    largest = tl.max(magnitude(blocks), 2)
    if SQUARE:
        of_tiles = tl.max(tl.reshape(largest, (SIDE, 16, SIDE)), 1)
        largest = tl.reshape(tl.broadcast_to(of_tiles[:, None, :], (SIDE, 16, SIDE)), (TILE, SIDE))
    given = tl.zeros((TILE, SIDE), tl.float32) + scale
    six = tl.full((TILE, SIDE), 6.0, tl.float32)
    one = tl.full((TILE, SIDE), 1.0, tl.float32)
    own = tl.div_rn(tl.div_rn(largest.to(tl.float32, bitcast=True), six), given)
    own = tl.where(own < 0.015625, 0.015625, tl.where(own > 448.0, 448.0, own))
    code = fp8_code(tl.where(largest >= 0x7F800000, float("nan"), own), False)
    value = ((code.to(tl.int32) + 960) << 20).to(tl.float32, bitcast=True)
    value = tl.where(code == 0x7F, float("nan"), value)
    scaled = (blocks * tl.div_rn(one, given)[:, :, None]) * tl.div_rn(one, value)[:, :, None]
    scaled = tl.where(scaled > 6.0, 6.0, tl.where(scaled < -6.0, -6.0, scaled))
    low, high = tl.split(tl.reshape(_e2m1(scaled, STOCHASTIC), (TILE, TILE // 2, 2)))
    return (low | (high << 4)).to(tl.uint8), code


@triton.jit
def _rotated(turned, TILE: tl.constexpr):
    """Each 16 numbers of rows rotated by a Hadamard matrix with signs, in bf16 (`rotate`)."""
    place = tl.arange(0, 16)[None, None, :]
    x = tl.reshape(turned, (TILE, TILE // 16, 16))
    x = tl.where(((45364 >> place) & 1) == 1, -x, x) + 0.0  # no sum of zeros is -0
    for _ in tl.static_range(4):
        even, odd = tl.split(tl.reshape(x, (TILE, TILE // 16, 8, 2)))
        x = tl.reshape(tl.permute(tl.join(even + odd, even - odd), (0, 1, 3, 2)), (TILE, TILE // 16, 16))
    return to_bf16(tl.reshape(x, (TILE, TILE)) * 0.25)


@triton.jit
def _cast_nvfp4(
    x, scale, seen_0, seen_1, seen_2, seen_3, numbers, scales, turned, turned_scales, R, C,
    SEEN: tl.constexpr, SQUARE: tl.constexpr, STOCHASTIC: tl.constexpr, ROTATED: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    row_tile, column_tile = tl.program_id(0), tl.program_id(1)
    r = row_tile * TILE + tl.arange(0, TILE)
    c = column_tile * TILE + tl.arange(0, TILE)
    half = tl.arange(0, TILE // 2)
    k = tl.arange(0, 4)[None, :]
    at = r.to(tl.int64)[:, None] * C + c[None, :]
    number = from_bf16(tl.load(x + at, mask=(r < R)[:, None] & (c < C)[None, :], other=0))
    whole = tl.load(scale)
    if ROWS:
        if SEEN > 0:
            note(tl.max(tl.max(magnitude(number), 1), 0), seen_0, seen_1, seen_2, seen_3, SEEN)
        packed, code = _fp4(number, whole, SQUARE, STOCHASTIC, TILE)
        at = r.to(tl.int64)[:, None] * (C // 2) + (column_tile * (TILE // 2) + half)[None, :]
        inside = (r < R)[:, None] & (column_tile * (TILE // 2) + half < C // 2)[None, :]
        tl.store(numbers + at, packed, mask=inside)
        tiles = (C + TILE - 1) // TILE
        place = ((r // 128) * tiles + column_tile).to(tl.int64)[:, None] * 512
        place += swizzled((r % 128)[:, None], k)
        tl.store(scales + place, code, mask=(column_tile < tiles) & (k < 4))
    if COLUMNS:
        number = tl.trans(number)
        if ROTATED:
            number = _rotated(number, TILE)
            if SEEN > 0:
                note(tl.max(tl.max(magnitude(number), 1), 0), seen_0, seen_1, seen_2, seen_3, SEEN)
        packed, code = _fp4(number, whole, SQUARE, STOCHASTIC, TILE)
        at = c.to(tl.int64)[:, None] * (R // 2) + (row_tile * (TILE // 2) + half)[None, :]
        inside = (c < C)[:, None] & (row_tile * (TILE // 2) + half < R // 2)[None, :]
        tl.store(turned + at, packed, mask=inside)
        tiles = (R + TILE - 1) // TILE
        place = ((c // 128) * tiles + row_tile).to(tl.int64)[:, None] * 512
        place += swizzled((c % 128)[:, None], k)
        tl.store(turned_scales + place, code, mask=(row_tile < tiles) & (k < 4))


def cast_nvfp4(
    x: Tensor, scale: Tensor, seen: list[Tensor], square: bool, stochastic: bool, rotated: bool, rows: bool,
    columns: bool,
) -> list[Tensor]:  # fmt: skip
    """The results of the operator `cast_nvfp4`."""
    found = declared.empty_nvfp4(x, scale, seen, square, stochastic, rotated, rows, columns)
    own = as_bytes(found)
    numbers, scales = own[:2] if rows else (None, None)
    turned, turned_scales = own[-2:] if columns else (None, None)
    height, width = x.shape
    _cast_nvfp4[(2 * -(-height // 128), 2 * -(-width // 128))](
        x.view(torch.int16), scale, *four(seen, scale), numbers, scales, turned, turned_scales, height,
        width,
        SEEN=len(seen), SQUARE=square, STOCHASTIC=stochastic, ROTATED=rotated, ROWS=rows, COLUMNS=columns,
        TILE=64, num_warps=8,
    )  # fmt: skip
    return found


SPECIALISATIONS = [
    *(
        case_of(
            _cast_nvfp4,
            "*u8",
            8,
            SEEN=3,
            SQUARE=square,
            STOCHASTIC=stochastic,
            ROTATED=not square,
            **BOTH,
            TILE=64,
        )
        for square, stochastic in ((True, False), (False, True))
    ),
]
