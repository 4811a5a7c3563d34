"""Casts of operands to 8 and 4 bits, each in one kernel: numbers, scales, and the transpose of both.

A kernel reads a tile of bf16 once and writes numbers along either dim, with scales where a product's kernel
looks for them (`kernels/low_precision_casts.py`, whose functions without Triton are equal to these, bit for
bit). All that decides a bit is arithmetic of integers, or fp32's on exact numbers, so that the interpreter
and GPUs of every capability agree; only a rotation sums in fp32, in an order of its own.
"""

# What Triton compiles has no annotations: its arguments are pointers, and constants by their `tl.constexpr`.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from meshwright.kernels import low_precision_casts as declared
from meshwright.kernels.triton.specialisation import Specialisation

# Numbers and scales ---------------------------------------------------------------------------------------


@triton.jit
def _fp32(bits):
    """fp32 numbers of the bits of bf16 ones; the interpreter's own conversion loses the smallest."""
    return (bits.to(tl.int32) << 16).to(tl.float32, bitcast=True)


@triton.jit
def _magnitude(x):
    """The bits of |x| (fp32), which order numbers as their values do, and NaN above infinity."""
    return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def _exponent(largest, E5M2: tl.constexpr):
    """The exponent, plus 127, of the scale of numbers whose largest magnitude has these bits; 255 for NaN.

    The least power of two by which they are divided to be at most 448 or 57344 = 0.875 x 2^`MOST`.
    """
    MOST: tl.constexpr = 16 if E5M2 else 9
    power = (largest >> 23) - 126 - MOST + tl.where((largest & 0x7FFFFF) > 0x600000, 1, 0)
    power = tl.where(largest == 0, -MOST, tl.maximum(power, -126))
    return tl.where(largest >= 0x7F800000, 255, power + 127)


@triton.jit
def _scale(exponent):
    return tl.where(exponent == 255, 0x7FC00000, exponent << 23).to(tl.float32, bitcast=True)


@triton.jit
def _inverse(exponent):
    return tl.where(exponent == 255, 0x7FC00000, (254 - exponent) << 23).to(tl.float32, bitcast=True)


@triton.jit
def _code(x, E5M2: tl.constexpr):
    """The 8 bits of fp32 numbers, to the nearest, ties to even; what is beyond becomes the largest."""
    CUT: tl.constexpr = 21 if E5M2 else 20
    BIAS: tl.constexpr = 448 if E5M2 else 960  # (127 - 15) << 2, (127 - 7) << 3
    LARGEST: tl.constexpr = 0x47600000 if E5M2 else 0x43E00000
    NORMAL: tl.constexpr = 0x38800000 if E5M2 else 0x3C800000
    STEP: tl.constexpr = 128.0 if E5M2 else 16384.0  # whose last bit is the least number
    magnitude = _magnitude(x)
    within = tl.minimum(magnitude, LARGEST)
    normal = ((within + ((1 << (CUT - 1)) - 1) + ((within >> CUT) & 1)) >> CUT) - BIAS
    step = tl.full(within.shape, STEP, tl.float32)
    small = (within.to(tl.float32, bitcast=True) + step).to(tl.int32, bitcast=True)
    code = tl.where(within < NORMAL, small - step.to(tl.int32, bitcast=True), normal)
    code = tl.where(magnitude > 0x7F800000, 0x7F, code)
    return (code | ((x.to(tl.int32, bitcast=True) >> 24) & 0x80)).to(tl.uint8)


@triton.jit
def _bf16(x):
    """fp32 numbers rounded to those of bf16, to the nearest, ties to even."""
    bits = x.to(tl.int32, bitcast=True)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) & -65536
    return tl.where(_magnitude(x) > 0x7F800000, bits, rounded).to(tl.float32, bitcast=True)


@triton.jit
def _note(largest, seen_0, seen_1, seen_2, seen_3, SEEN: tl.constexpr):
    """Raise noted numbers to one with these bits."""
    if SEEN > 0:
        tl.atomic_max(seen_0, largest, sem="relaxed")
    if SEEN > 1:
        tl.atomic_max(seen_1, largest, sem="relaxed")
    if SEEN > 2:
        tl.atomic_max(seen_2, largest, sem="relaxed")
    if SEEN > 3:
        tl.atomic_max(seen_3, largest, sem="relaxed")


@triton.jit
def _swizzled(row, column):
    """The place of a scale in a block of 128 rows x 4 columns of them (cuBLAS's layout of block scales)."""
    return (row % 32) * 16 + (row // 32) * 4 + column


# A scale for a tensor -------------------------------------------------------------------------------------


@triton.jit
def _cast_tensor(
    x, scale, seen_0, seen_1, seen_2, seen_3, numbers, turned, R, C,
    E5M2: tl.constexpr, SEEN: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    first = tl.program_id(2).to(tl.int64) * R * C
    r = tl.program_id(0) * TILE + tl.arange(0, TILE)
    c = tl.program_id(1) * TILE + tl.arange(0, TILE)
    inside = (r < R)[:, None] & (c < C)[None, :]
    at = first + r.to(tl.int64)[:, None] * C + c[None, :]
    number = _fp32(tl.load(x + at, mask=inside, other=0))
    magnitude = _magnitude(number)
    if SEEN > 0:
        _note(tl.max(tl.max(magnitude, 1), 0), seen_0, seen_1, seen_2, seen_3, SEEN)
    scaled = number * tl.div_rn(1.0, tl.load(scale))
    code = _code(tl.where(magnitude == 0x7F800000, float("nan"), scaled), E5M2)
    if ROWS:
        tl.store(numbers + at, code, mask=inside)
    if COLUMNS:
        at_turned = first + c.to(tl.int64)[:, None] * R + r[None, :]
        tl.store(turned + at_turned, tl.trans(code), mask=tl.trans(inside))


def cast_tensor(
    x: Tensor, scale: Tensor, seen: list[Tensor], e5m2: bool, rows: bool, columns: bool
) -> list[Tensor]:
    found = declared.empty_tensor(x, scale, seen, e5m2, rows, columns)
    out = _bytes(found)
    batch, height, width = _sizes(x)
    tile = 64
    _cast_tensor[(-(-height // tile), -(-width // tile), batch)](
        x.view(torch.int16), scale, *_four(seen, scale), out[0] if rows else None,
        out[-1] if columns else None, height, width,
        E5M2=e5m2, SEEN=len(seen), ROWS=rows, COLUMNS=columns, TILE=tile,
    )  # fmt: skip
    return found


# A scale for a row, or a column ---------------------------------------------------------------------------


@triton.jit
def _cast_rows(
    x, numbers, scales, R, C, E5M2: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    r = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    first = tl.program_id(1).to(tl.int64) * R * C
    largest = tl.zeros((ROWS,), tl.int32)
    for start in range(0, C, BLOCK):
        c = start + tl.arange(0, BLOCK)
        inside = (r < R)[:, None] & (c < C)[None, :]
        at = first + r.to(tl.int64)[:, None] * C + c[None, :]
        number = _fp32(tl.load(x + at, mask=inside, other=0))
        largest = tl.maximum(largest, tl.max(_magnitude(number), 1))
    exponent = _exponent(largest, E5M2)
    inverse = _inverse(exponent)
    tl.store(scales + tl.program_id(1) * R + r, _scale(exponent), mask=r < R)
    for start in range(0, C, BLOCK):
        c = start + tl.arange(0, BLOCK)
        inside = (r < R)[:, None] & (c < C)[None, :]
        at = first + r.to(tl.int64)[:, None] * C + c[None, :]
        number = _fp32(tl.load(x + at, mask=inside, other=0))
        tl.store(numbers + at, _code(number * inverse[:, None], E5M2), mask=inside)


@triton.jit
def _cast_columns(
    x, turned, scales, R, C, E5M2: tl.constexpr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    c = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    first = tl.program_id(1).to(tl.int64) * R * C
    largest = tl.zeros((COLUMNS,), tl.int32)
    for start in range(0, R, BLOCK):
        r = start + tl.arange(0, BLOCK)
        inside = (r < R)[:, None] & (c < C)[None, :]
        at = first + r.to(tl.int64)[:, None] * C + c[None, :]
        number = _fp32(tl.load(x + at, mask=inside, other=0))
        largest = tl.maximum(largest, tl.max(_magnitude(number), 0))
    exponent = _exponent(largest, E5M2)
    inverse = _inverse(exponent)
    tl.store(scales + tl.program_id(1) * C + c, _scale(exponent), mask=c < C)
    for start in range(0, R, BLOCK):
        r = start + tl.arange(0, BLOCK)
        inside = (r < R)[:, None] & (c < C)[None, :]
        at = first + r.to(tl.int64)[:, None] * C + c[None, :]
        number = _fp32(tl.load(x + at, mask=inside, other=0))
        code = tl.trans(_code(number * inverse[None, :], E5M2))
        tl.store(turned + first + c.to(tl.int64)[:, None] * R + r[None, :], code, mask=tl.trans(inside))


def cast_rows(x: Tensor, e5m2: bool, columns: bool) -> list[Tensor]:
    found = declared.empty_rows(x, e5m2, columns)
    batch, height, width = _sizes(x)
    numbers = found[0].view(torch.uint8)
    if columns:
        _cast_columns[(-(-width // 32), batch)](
            x.view(torch.int16), numbers, found[1], height, width, E5M2=e5m2, COLUMNS=32, BLOCK=128
        )
    else:
        _cast_rows[(-(-height // 16), batch)](
            x.view(torch.int16), numbers, found[1], height, width, E5M2=e5m2, ROWS=16, BLOCK=256
        )
    return found


# A scale for a block --------------------------------------------------------------------------------------


@triton.jit
def _store_scales(
    scales, exponent, row_tile, column_tile, tiles, R, BLOCK: tl.constexpr, MX: tl.constexpr,
    TILE: tl.constexpr,
):  # fmt: skip
    """Store the exponents (`TILE`, `TILE` / `BLOCK`) of a tile, one of `tiles` in a row of tiles."""
    r = tl.arange(0, TILE)
    if MX:
        k = tl.arange(0, 4)
        each = exponent
        if BLOCK == TILE:
            each = tl.broadcast_to(exponent, (TILE, 4))
        place = (row_tile * tiles + column_tile).to(tl.int64) * 512 + _swizzled(r[:, None], k[None, :])
        tl.store(scales + place, each.to(tl.uint8))
    else:
        row = row_tile * TILE + r
        place = column_tile.to(tl.int64) * R + row
        tl.store(scales + place[:, None], _scale(exponent), mask=(row < R)[:, None])


@triton.jit
def _store_square(scales, exponent, row_tile, column_tile, tiles, MX: tl.constexpr, TILE: tl.constexpr):
    """Store the exponent of all of a tile."""
    if MX:
        place = (row_tile * tiles + column_tile).to(tl.int64) * 512 + tl.arange(0, 512)
        tl.store(scales + place, tl.full((512,), 0, tl.uint8) + exponent.to(tl.uint8))
    else:
        padded = (tiles + 3) // 4 * 4
        tl.store(scales + row_tile * padded + column_tile, _scale(exponent))
        if column_tile == tiles - 1:
            rest = tiles + tl.arange(0, 4)
            tl.store(scales + row_tile * padded + rest, tl.zeros((4,), tl.float32), mask=rest < padded)


@triton.jit
def _cast_tiles(
    x, numbers, scales, turned, turned_scales, R, C, SCALES, TURNED_SCALES,
    E5M2: tl.constexpr, BLOCK: tl.constexpr, SQUARE: tl.constexpr, MX: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    row_tile, column_tile, batch = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    down, across = tl.num_programs(0), tl.num_programs(1)
    first = batch * R * C
    scales += batch * SCALES
    turned_scales += batch * TURNED_SCALES
    r = row_tile * TILE + tl.arange(0, TILE)
    c = column_tile * TILE + tl.arange(0, TILE)
    inside = (r < R)[:, None] & (c < C)[None, :]
    at = first + r.to(tl.int64)[:, None] * C + c[None, :]
    at_turned = first + c.to(tl.int64)[:, None] * R + r[None, :]
    number = _fp32(tl.load(x + at, mask=inside, other=0))
    if SQUARE:
        exponent = _exponent(tl.max(tl.max(_magnitude(number), 1), 0), E5M2)
        code = _code(number * _inverse(exponent), E5M2)
        if ROWS:
            tl.store(numbers + at, code, mask=inside)
            _store_square(scales, exponent, row_tile, column_tile, across, MX, TILE)
        if COLUMNS:
            tl.store(turned + at_turned, tl.trans(code), mask=tl.trans(inside))
            _store_square(turned_scales, exponent, column_tile, row_tile, down, MX, TILE)
    else:
        if ROWS:
            blocks = tl.reshape(number, (TILE, TILE // BLOCK, BLOCK))
            exponent = _exponent(tl.max(_magnitude(blocks), 2), E5M2)
            code = tl.reshape(_code(blocks * _inverse(exponent)[:, :, None], E5M2), (TILE, TILE))
            tl.store(numbers + at, code, mask=inside)
            _store_scales(scales, exponent, row_tile, column_tile, across, R, BLOCK, MX, TILE)
        if COLUMNS:
            if ROWS:  # read again, from the cache, which takes fewer registers than to keep the tile
                number = _fp32(tl.load(x + at, mask=inside, other=0))
            blocks = tl.reshape(number, (TILE // BLOCK, BLOCK, TILE))
            exponent = _exponent(tl.max(_magnitude(blocks), 1), E5M2)
            code = tl.reshape(_code(blocks * _inverse(exponent)[:, None, :], E5M2), (TILE, TILE))
            tl.store(turned + at_turned, tl.trans(code), mask=tl.trans(inside))
            _store_scales(turned_scales, tl.trans(exponent), column_tile, row_tile, down, C, BLOCK, MX, TILE)


def cast_tiles(
    x: Tensor, e5m2: bool, block: int, square: bool, mx: bool, rows: bool, columns: bool
) -> list[Tensor]:
    found = declared.empty_tiles(x, e5m2, block, square, mx, rows, columns)
    own = _bytes(found)
    numbers, scales = own[:2] if rows else (None, None)
    turned, turned_scales = own[-2:] if columns else (None, None)
    batch, height, width = _sizes(x)
    tile = 128
    _cast_tiles[(-(-height // tile), -(-width // tile), batch)](
        x.view(torch.int16), numbers, scales, turned, turned_scales, height, width,
        0 if scales is None else scales.numel() // batch,
        0 if turned_scales is None else turned_scales.numel() // batch,
        E5M2=e5m2, BLOCK=block, SQUARE=square, MX=mx, ROWS=rows, COLUMNS=columns, TILE=tile, num_warps=16,
    )  # fmt: skip
    return found


# A scale for a block of 16, and for the tensor ------------------------------------------------------------


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
    bits = (_bf16(blocks + 0.0).to(tl.int32, bitcast=True) >> 16).to(tl.int64)
    key = tl.sum(bits * odd[None, None, :], 2)
    mixed = _mixed(key[:, :, None] + ((place + 1) * -7046029254386353131)[None, None, :])
    return ((mixed >> 40) & 0xFFFFFF).to(tl.float32) * 5.9604644775390625e-08


@triton.jit
def _e2m1(x, STOCHASTIC: tl.constexpr):
    """The 4 bits of fp32 numbers (., ., 16) up to 6: to the nearest, ties to even, or at random."""
    magnitude = tl.abs(x)
    power = tl.where(magnitude < 2, 0, tl.where(magnitude < 4, 1, 2))
    steps = magnitude * tl.where(magnitude < 2, 2.0, tl.where(magnitude < 4, 1.0, 0.5))
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
    largest = tl.max(_magnitude(blocks), 2)
    if SQUARE:
        of_tiles = tl.max(tl.reshape(largest, (SIDE, 16, SIDE)), 1)
        largest = tl.reshape(tl.broadcast_to(of_tiles[:, None, :], (SIDE, 16, SIDE)), (TILE, SIDE))
    given = tl.zeros((TILE, SIDE), tl.float32) + scale
    six = tl.full((TILE, SIDE), 6.0, tl.float32)
    one = tl.full((TILE, SIDE), 1.0, tl.float32)
    own = tl.div_rn(tl.div_rn(largest.to(tl.float32, bitcast=True), six), given)
    own = tl.where(own < 0.015625, 0.015625, tl.where(own > 448.0, 448.0, own))
    code = _code(tl.where(largest >= 0x7F800000, float("nan"), own), False)
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
    return _bf16(tl.reshape(x, (TILE, TILE)) * 0.25)


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
    number = _fp32(tl.load(x + at, mask=(r < R)[:, None] & (c < C)[None, :], other=0))
    whole = tl.load(scale)
    if ROWS:
        if SEEN > 0:
            _note(tl.max(tl.max(_magnitude(number), 1), 0), seen_0, seen_1, seen_2, seen_3, SEEN)
        packed, code = _fp4(number, whole, SQUARE, STOCHASTIC, TILE)
        at = r.to(tl.int64)[:, None] * (C // 2) + (column_tile * (TILE // 2) + half)[None, :]
        inside = (r < R)[:, None] & (column_tile * (TILE // 2) + half < C // 2)[None, :]
        tl.store(numbers + at, packed, mask=inside)
        tiles = (C + TILE - 1) // TILE
        place = ((r // 128) * tiles + column_tile).to(tl.int64)[:, None] * 512
        place += _swizzled((r % 128)[:, None], k)
        tl.store(scales + place, code, mask=(column_tile < tiles) & (k < 4))
    if COLUMNS:
        number = tl.trans(number)
        if ROTATED:
            number = _rotated(number, TILE)
            if SEEN > 0:
                _note(tl.max(tl.max(_magnitude(number), 1), 0), seen_0, seen_1, seen_2, seen_3, SEEN)
        packed, code = _fp4(number, whole, SQUARE, STOCHASTIC, TILE)
        at = c.to(tl.int64)[:, None] * (R // 2) + (row_tile * (TILE // 2) + half)[None, :]
        inside = (c < C)[:, None] & (row_tile * (TILE // 2) + half < R // 2)[None, :]
        tl.store(turned + at, packed, mask=inside)
        tiles = (R + TILE - 1) // TILE
        place = ((c // 128) * tiles + row_tile).to(tl.int64)[:, None] * 512
        place += _swizzled((c % 128)[:, None], k)
        tl.store(turned_scales + place, code, mask=(row_tile < tiles) & (k < 4))


def cast_nvfp4(
    x: Tensor, scale: Tensor, seen: list[Tensor], square: bool, stochastic: bool, rotated: bool, rows: bool,
    columns: bool,
) -> list[Tensor]:  # fmt: skip
    found = declared.empty_nvfp4(x, rows, columns)
    own = _bytes(found)
    numbers, scales = own[:2] if rows else (None, None)
    turned, turned_scales = own[-2:] if columns else (None, None)
    height, width = x.shape
    _cast_nvfp4[(2 * -(-height // 128), 2 * -(-width // 128))](
        x.view(torch.int16), scale, *_four(seen, scale), numbers, scales, turned, turned_scales, height,
        width,
        SEEN=len(seen), SQUARE=square, STOCHASTIC=stochastic, ROTATED=rotated, ROWS=rows, COLUMNS=columns,
        TILE=64, num_warps=8,
    )  # fmt: skip
    return found


# Launches -------------------------------------------------------------------------------------------------


def _sizes(x: Tensor) -> tuple[int, int, int]:
    """Matrices, rows and columns of x (..., R, C)."""
    return x.shape[:-2].numel(), x.shape[-2], x.shape[-1]


def _bytes(tensors: list[Tensor]) -> list[Tensor]:
    """The tensors, those of 8 bits as bytes, which is what kernels store."""
    return [each.view(torch.uint8) if each.itemsize == 1 else each for each in tensors]


def _four(seen: list[Tensor], unused: Tensor) -> list[Tensor]:
    """The noted numbers as integers, and a tensor in the places behind them."""
    return [*(each.view(torch.int32) for each in seen), *[unused] * (4 - len(seen))]


_TYPES = {
    **dict.fromkeys(("x",), "*i16"),
    **dict.fromkeys(("numbers", "turned"), "*u8"),
    **dict.fromkeys(("R", "C", "SCALES", "TURNED_SCALES"), "i32"),
    **dict.fromkeys(("seen_0", "seen_1", "seen_2", "seen_3"), "*i32"),
    "scale": "*fp32",
}


def _case(kernel: Any, scales: str, num_warps: int = 4, **constants: Any) -> Specialisation:
    types = _TYPES | dict.fromkeys(("scales", "turned_scales"), scales)
    aligned = "x", "numbers", "turned", "scales", "turned_scales", "R", "C"
    names = kernel.arg_names
    return Specialisation(
        kernel, {name: types[name] for name in names if name in types}, constants, num_warps=num_warps,
        aligned=tuple(name for name in aligned if name in names),
    )  # fmt: skip


_BOTH = {"ROWS": True, "COLUMNS": True}
SPECIALISATIONS = [
    _case(_cast_tensor, "*fp32", E5M2=True, SEEN=3, **_BOTH, TILE=64),
    _case(_cast_rows, "*fp32", E5M2=False, ROWS=16, BLOCK=256),
    _case(_cast_columns, "*fp32", E5M2=False, COLUMNS=32, BLOCK=128),
    *(
        _case(
            _cast_tiles, "*u8" if mx else "*fp32", 16, E5M2=False, BLOCK=block, SQUARE=square, MX=mx, **_BOTH,
            TILE=128,
        )
        for block, square, mx in (
            (128, False, False), (128, True, False), (128, True, True), (32, False, True),
        )
    ),
    *(
        _case(
            _cast_nvfp4, "*u8", 8, SEEN=3, SQUARE=square, STOCHASTIC=stochastic, ROTATED=not square, **_BOTH,
            TILE=64,
        )
        for square, stochastic in ((True, False), (False, True))
    ),
]  # fmt: skip
