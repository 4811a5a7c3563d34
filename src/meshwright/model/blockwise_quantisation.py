"""Codes of 8 and 4 bits for frozen weights: the nearest of a few levels times the largest number of a block.

A block is 64 adjacent inputs of a row. Of its numbers x the largest magnitude m is kept in the format that
computes, which holds it as it is, and each x / m becomes the code of the nearest level:

    int8    -127 / 127, -126 / 127, ..., 127 / 127
    int4    -7 / 7, -6 / 7, ..., 7 / 7
    nf4     16 levels, which a normal distribution fills evenly (Dettmers et al. 2023, QLoRA, appendix E)

The value of a code is its level times m, multiplied in at least fp32 and rounded to the format that computes.
The levels -1 and 1 are in all three, so a block's largest number stays what it is, and values that codes
stand for get the same codes again. Two codes of 4 bits share a byte, the first in its upper half, as in
bitsandbytes.
"""

from __future__ import annotations

from functools import cache
from itertools import product

import torch
from torch import Tensor

from meshwright.spec.lora import BLOCK
from meshwright.spec.parameters import BaseFormat
from meshwright.spec.tiling import tiling

NF4_LEVELS = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453,
    -0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0,
    0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip


@cache
def levels(form: BaseFormat) -> tuple[float, ...]:
    """The numbers that the codes 0, 1, ... stand for, in order."""
    if form == "nf4":
        return NF4_LEVELS
    most = {"int8": 127, "int4": 7}[form]
    return tuple(code / most for code in range(-most, most + 1))


def codes_a_byte(form: BaseFormat) -> int:
    """Codes that share a byte."""
    return 1 if form == "int8" else 2


def values_of_bytes(form: BaseFormat, dtype: torch.dtype, device: torch.device) -> Tensor:
    """(256, codes in a byte): the levels of the codes in each byte, as values in `dtype` are computed of
    them."""
    known = [*levels(form), *[0.0] * (256 - len(levels(form)))]
    rows = [[each] for each in known] if form == "int8" else [*product(known[:16], repeat=2)]
    table = torch.tensor(rows, dtype=torch.promote_types(dtype, torch.float32))
    return table.to(device, non_blocking=True)


def quantise_blocks(values: Tensor, form: BaseFormat, codes: Tensor, largest: Tensor) -> None:
    """Write the codes of flat values (n,) to `codes` (n / codes in a byte,), of bytes, and the largest
    magnitude of each block to `largest` (n / 64,), in the format of the values."""
    wide, packed = torch.promote_types(values.dtype, torch.float32), codes_a_byte(form)
    for start, end in _chunks(len(values)):
        blocks = values[start:end].to(wide).view(-1, BLOCK)
        most = blocks.abs().amax(-1, keepdim=True)
        pairs = _nearest(blocks, torch.where(most > 0, most, 1), form).view(-1, packed)
        joined = pairs[:, 0] if packed == 1 else pairs[:, 0] * 16 + pairs[:, 1]
        codes[start // packed : end // packed].copy_(joined)
        largest[start // BLOCK : end // BLOCK].copy_(most.view(-1))


def _nearest(blocks: Tensor, most: Tensor, form: BaseFormat) -> Tensor:
    """The code of the level that is nearest to each of `blocks` (n, 64) / `most` (n, 1)."""
    if form != "nf4":
        half = len(levels(form)) // 2
        return (blocks * half / most).round().int() + half
    numbers = torch.tensor(NF4_LEVELS, dtype=torch.float64)
    bounds = ((numbers[1:] + numbers[:-1]) / 2).to(blocks.dtype).to(blocks.device)
    return torch.bucketize(blocks / most, bounds, out_int32=True)


def dequantise_blocks(codes: Tensor, largest: Tensor, table: Tensor, out: Tensor) -> None:
    """Write the values (n,) of codes and largest magnitudes, as `quantise_blocks` makes them, to `out`; the
    `table` is that of `values_of_bytes`."""
    packed = table.shape[1]
    for start, end in _chunks(len(out)):
        found = table.index_select(0, codes[start // packed : end // packed].int()).view(-1, BLOCK)
        scales = largest[start // BLOCK : end // BLOCK].to(table.dtype)
        torch.mul(found, scales.unsqueeze(-1), out=found)
        out[start:end].copy_(found.view(-1))


def rounded_to_blocks(weight: Tensor, form: BaseFormat) -> Tensor:
    """A weight (O, I) rounded to the values that its codes stand for, in its own format."""
    flat = weight.reshape(-1)
    codes = torch.empty(len(flat) // codes_a_byte(form), dtype=torch.uint8, device=weight.device)
    largest, found = flat.new_empty(len(flat) // BLOCK), torch.empty_like(flat)
    quantise_blocks(flat, form, codes, largest)
    dequantise_blocks(codes, largest, values_of_bytes(form, weight.dtype, weight.device), found)
    return found.view(weight.shape)


def _chunks(size: int) -> list[tuple[int, int]]:
    """(start, end) of pieces of `size` numbers that are converted at a time, each of whole blocks."""
    most = max(1, tiling().base_elements // BLOCK) * BLOCK
    return [(start, min(start + most, size)) for start in range(0, size, most)]
