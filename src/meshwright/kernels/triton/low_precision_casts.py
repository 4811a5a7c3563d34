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
def from_bf16(bits):
    """fp32 numbers of the bits of bf16 ones; the interpreter's own conversion loses the smallest."""
    return (bits.to(tl.int32) << 16).to(tl.float32, bitcast=True)


@triton.jit
def magnitude(x):
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
def fp8_code(x, E5M2: tl.constexpr):
    """The 8 bits of fp32 numbers, to the nearest, ties to even; what is beyond becomes the largest."""
    CUT: tl.constexpr = 21 if E5M2 else 20
    BIAS: tl.constexpr = 448 if E5M2 else 960  # (127 - 15) << 2, (127 - 7) << 3
    LARGEST: tl.constexpr = 0x47600000 if E5M2 else 0x43E00000
    NORMAL: tl.constexpr = 0x38800000 if E5M2 else 0x3C800000
    STEP: tl.constexpr = 128.0 if E5M2 else 16384.0  # whose last bit is the least number
    size = magnitude(x)
    within = tl.minimum(size, LARGEST)
    normal = ((within + ((1 << (CUT - 1)) - 1) + ((within >> CUT) & 1)) >> CUT) - BIAS
    step = tl.full(within.shape, STEP, tl.float32)
    small = (within.to(tl.float32, bitcast=True) + step).to(tl.int32, bitcast=True)
    code = tl.where(within < NORMAL, small - step.to(tl.int32, bitcast=True), normal)
    code = tl.where(size > 0x7F800000, 0x7F, code)
    return (code | ((x.to(tl.int32, bitcast=True) >> 24) & 0x80)).to(tl.uint8)


@triton.jit
def to_bf16(x):
    """fp32 numbers rounded to those of bf16, to the nearest, ties to even."""
    bits = x.to(tl.int32, bitcast=True)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) & -65536
    return tl.where(magnitude(x) > 0x7F800000, bits, rounded).to(tl.float32, bitcast=True)


@triton.jit
def note(largest, seen_0, seen_1, seen_2, seen_3, SEEN: tl.constexpr):
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
def swizzled(row, column):
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
    number = from_bf16(tl.load(x + at, mask=inside, other=0))
    size = magnitude(number)
    if SEEN > 0:
        note(tl.max(tl.max(size, 1), 0), seen_0, seen_1, seen_2, seen_3, SEEN)
    scaled = number * tl.div_rn(1.0, tl.load(scale))
    code = fp8_code(tl.where(size == 0x7F800000, float("nan"), scaled), E5M2)
    if ROWS:
        tl.store(numbers + at, code, mask=inside)
    if COLUMNS:
        at_turned = first + c.to(tl.int64)[:, None] * R + r[None, :]
        tl.store(turned + at_turned, tl.trans(code), mask=tl.trans(inside))


def cast_tensor(
    x: Tensor, scale: Tensor, seen: list[Tensor], e5m2: bool, rows: bool, columns: bool
) -> list[Tensor]:
    """The results of the operator `cast_tensor`."""
    found = declared.empty_tensor(x, scale, seen, e5m2, rows, columns)
    out = as_bytes(found)
    batch, height, width = sizes(x)
    tile = 64
    _cast_tensor[(-(-height // tile), -(-width // tile), batch)](
        x.view(torch.int16), scale, *four(seen, scale), out[0] if rows else None,
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
        number = from_bf16(tl.load(x + at, mask=inside, other=0))
        largest = tl.maximum(largest, tl.max(magnitude(number), 1))
    exponent = _exponent(largest, E5M2)
    inverse = _inverse(exponent)
    tl.store(scales + tl.program_id(1) * R + r, _scale(exponent), mask=r < R)
    for start in range(0, C, BLOCK):
        c = start + tl.arange(0, BLOCK)
        inside = (r < R)[:, None] & (c < C)[None, :]
        at = first + r.to(tl.int64)[:, None] * C + c[None, :]
        number = from_bf16(tl.load(x + at, mask=inside, other=0))
        tl.store(numbers + at, fp8_code(number * inverse[:, None], E5M2), mask=inside)


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
        number = from_bf16(tl.load(x + at, mask=inside, other=0))
        largest = tl.maximum(largest, tl.max(magnitude(number), 0))
    exponent = _exponent(largest, E5M2)
    inverse = _inverse(exponent)
    tl.store(scales + tl.program_id(1) * C + c, _scale(exponent), mask=c < C)
    for start in range(0, R, BLOCK):
        r = start + tl.arange(0, BLOCK)
        inside = (r < R)[:, None] & (c < C)[None, :]
        at = first + r.to(tl.int64)[:, None] * C + c[None, :]
        number = from_bf16(tl.load(x + at, mask=inside, other=0))
        code = tl.trans(fp8_code(number * inverse[None, :], E5M2))
        tl.store(turned + first + c.to(tl.int64)[:, None] * R + r[None, :], code, mask=tl.trans(inside))


def cast_rows(x: Tensor, e5m2: bool, columns: bool) -> list[Tensor]:
    """The results of the operator `cast_rows`."""
    found = declared.empty_rows(x, e5m2, columns)
    batch, height, width = sizes(x)
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
        place = (row_tile * tiles + column_tile).to(tl.int64) * 512 + swizzled(r[:, None], k[None, :])
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
    number = from_bf16(tl.load(x + at, mask=inside, other=0))
    if SQUARE:
        exponent = _exponent(tl.max(tl.max(magnitude(number), 1), 0), E5M2)
        code = fp8_code(number * _inverse(exponent), E5M2)
        if ROWS:
            tl.store(numbers + at, code, mask=inside)
            _store_square(scales, exponent, row_tile, column_tile, across, MX, TILE)
        if COLUMNS:
            tl.store(turned + at_turned, tl.trans(code), mask=tl.trans(inside))
            _store_square(turned_scales, exponent, column_tile, row_tile, down, MX, TILE)
    else:
        if ROWS:
            blocks = tl.reshape(number, (TILE, TILE // BLOCK, BLOCK))
            exponent = _exponent(tl.max(magnitude(blocks), 2), E5M2)
            code = tl.reshape(fp8_code(blocks * _inverse(exponent)[:, :, None], E5M2), (TILE, TILE))
            tl.store(numbers + at, code, mask=inside)
            _store_scales(scales, exponent, row_tile, column_tile, across, R, BLOCK, MX, TILE)
        if COLUMNS:
            if ROWS:  # read again, from the cache, which takes fewer registers than to keep the tile
                number = from_bf16(tl.load(x + at, mask=inside, other=0))
            blocks = tl.reshape(number, (TILE // BLOCK, BLOCK, TILE))
            exponent = _exponent(tl.max(magnitude(blocks), 1), E5M2)
            code = tl.reshape(fp8_code(blocks * _inverse(exponent)[:, None, :], E5M2), (TILE, TILE))
            tl.store(turned + at_turned, tl.trans(code), mask=tl.trans(inside))
            _store_scales(turned_scales, tl.trans(exponent), column_tile, row_tile, down, C, BLOCK, MX, TILE)


def _warps(square: bool) -> int:
    """Warps of `_cast_tiles`, by which no registers are spilled."""
    return 8 if square else 16


def cast_tiles(
    x: Tensor, e5m2: bool, block: int, square: bool, mx: bool, rows: bool, columns: bool
) -> list[Tensor]:
    """The results of the operator `cast_tiles`."""
    found = declared.empty_tiles(x, e5m2, block, square, mx, rows, columns)
    own = as_bytes(found)
    numbers, scales = own[:2] if rows else (None, None)
    turned, turned_scales = own[-2:] if columns else (None, None)
    batch, height, width = sizes(x)
    tile = 128
    _cast_tiles[(-(-height // tile), -(-width // tile), batch)](
        x.view(torch.int16), numbers, scales, turned, turned_scales, height, width,
        0 if scales is None else scales.numel() // batch,
        0 if turned_scales is None else turned_scales.numel() // batch,
        E5M2=e5m2, BLOCK=block, SQUARE=square, MX=mx, ROWS=rows, COLUMNS=columns, TILE=tile,
        num_warps=_warps(square),
    )  # fmt: skip
    return found


# Launches -------------------------------------------------------------------------------------------------


def sizes(x: Tensor) -> tuple[int, int, int]:
    """Matrices, rows and columns of x (..., R, C)."""
    return x.shape[:-2].numel(), x.shape[-2], x.shape[-1]


def as_bytes(tensors: list[Tensor]) -> list[Tensor]:
    """The tensors, those of 8 bits as bytes, which is what kernels store."""
    return [each.view(torch.uint8) if each.itemsize == 1 else each for each in tensors]


def four(seen: list[Tensor], unused: Tensor) -> list[Tensor]:
    """The noted numbers as integers, and a tensor in the places behind them."""
    return [*(each.view(torch.int32) for each in seen), *[unused] * (4 - len(seen))]


_TYPES = {
    **dict.fromkeys(("x",), "*i16"),
    **dict.fromkeys(("numbers", "turned"), "*u8"),
    **dict.fromkeys(("R", "C", "SCALES", "TURNED_SCALES"), "i32"),
    **dict.fromkeys(("seen_0", "seen_1", "seen_2", "seen_3"), "*i32"),
    "scale": "*fp32",
}


def case_of(kernel: Any, scales: str, num_warps: int = 4, **constants: Any) -> Specialisation:
    """A specialisation of a kernel whose scales have this type."""
    types = _TYPES | dict.fromkeys(("scales", "turned_scales"), scales)
    aligned = "x", "numbers", "turned", "scales", "turned_scales", "R", "C"
    names = kernel.arg_names
    return Specialisation(
        kernel, {name: types[name] for name in names if name in types}, constants, num_warps=num_warps,
        aligned=tuple(name for name in aligned if name in names),
    )  # fmt: skip


BOTH = {"ROWS": True, "COLUMNS": True}
SPECIALISATIONS = [
    case_of(_cast_tensor, "*fp32", E5M2=True, SEEN=3, **BOTH, TILE=64),
    case_of(_cast_rows, "*fp32", E5M2=False, ROWS=16, BLOCK=256),
    case_of(_cast_columns, "*fp32", E5M2=False, COLUMNS=32, BLOCK=128),
    *(
        case_of(
            _cast_tiles, "*u8" if mx else "*fp32", _warps(square), E5M2=False, BLOCK=block,
            SQUARE=square, MX=mx, **BOTH,
            TILE=128,
        )
        for block, square, mx in (
            (128, False, False), (128, True, False), (128, True, True), (32, False, True),
        )
    ),
]  # fmt: skip
