"""Weights in bf16 without fp32 masters: updated in a wider format by chunks, and rounded stochastically.

A step of the optimiser is often smaller than half the gap between neighbours in bf16, and rounding to nearest
loses it. Rounded up with the probability of the fraction of the gap, it is right on average (Gupta et al.
2015; Zamirai et al. 2020, "Revisiting BFloat16 Training").

The 16 bits that decide are a function of (seed, update, parameter, element) alone: splitmix64 (Steele et al.
2014) of the place of four neighbours in the last dim gives 64 bits, 16 to each. So neither the layout nor a
resume changes a bit, and replicas draw the same.

    key      first 8 bytes, little endian, of SHA-256("seed:name:update")
    quad     row ceil(C / 4) + floor(column / 4) of an element of a parameter with C columns, its last dim
    draw     bits 16 (column mod 4) and on of splitmix64(key + quad golden)

An element whose fraction of the gap is f is rounded away from zero if 2^16 f + draw >= 2^16.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from meshwright.kernels.splitmix64 import GOLDEN, mix64_, signed
from meshwright.parallel.flat_param import ParamSlot

LANES = 4
"""Draws of 16 bits from one hash."""
_BITS = {torch.float32: (torch.int32, 16), torch.float64: (torch.int64, 45)}
"""Format -> integers of its width, and how many bits it has below those of bf16."""


class StoredRows(NamedTuple):
    """Rows of a parameter that a rank stores, padding included; a row is along the last dim."""

    slot: ParamSlot
    first: int
    height: int

    @property
    def columns(self) -> int:
        """Elements of a row on this rank."""
        return self.slot.part[-1]

    @property
    def elements(self) -> int:
        """Elements of all rows."""
        return self.height * self.columns


def chunks_of(slots: Sequence[ParamSlot], most: int) -> Iterator[list[StoredRows]]:
    """Adjacent parameters of a flat buffer, in lists of at most `most` elements, or of one row.

    They end at whole rows.
    """
    chunk: list[StoredRows] = []
    room = most
    for slot in slots:
        columns = slot.part[-1]
        rows, first = (slot.padded // columns if columns else 0), 0
        while first < rows:
            if chunk and room < columns:
                yield chunk
                chunk, room = [], most
            count = min(rows - first, max(1, room // columns))
            chunk.append(StoredRows(slot, first, count))
            first, room = first + count, room - count * columns
    if chunk:
        yield chunk


def key_of(seed: int, name: str, update: int) -> int:
    """The key of a parameter's draws in update number `update`, from 1, as an int64."""
    digest = hashlib.sha256(f"{seed}:{name}:{update}".encode()).digest()
    return signed(int.from_bytes(digest[:8], "little"))


def draws(chunk: Sequence[StoredRows], seed: int, update: int, device: torch.device) -> Tensor:
    """The draws of the elements of a chunk in its order: int32 from 0 to 2^16 - 1, flat."""
    places = [_quads(rows, device) for rows in chunk]
    states = torch.empty(sum(len(r) * len(q) for r, q in places), dtype=torch.int64, device=device)
    shapes, start = [(len(r), len(q)) for r, q in places], 0
    for rows, (row_states, quad_states) in zip(chunk, places, strict=True):
        row_states += key_of(seed, rows.slot.key, update)
        size = len(row_states) * len(quad_states)
        torch.add(
            row_states.unsqueeze(1),
            quad_states,
            out=states[start : start + size].view(len(row_states), len(quad_states)),
        )
        start += size
    lanes = mix64_(states).view(torch.int16)
    found = torch.empty(sum(rows.elements for rows in chunk), dtype=torch.int32, device=device)
    start = taken = 0
    for rows, shape in zip(chunk, shapes, strict=True):
        size, offset = LANES * prod(shape), rows.slot.offset[-1] % LANES
        own = lanes[taken : taken + size].view(shape[0], -1).narrow(1, offset, rows.columns)
        found[start : start + rows.elements].view(own.shape).copy_(own)
        start, taken = start + rows.elements, taken + size
    return found.bitwise_and_(0xFFFF)


def _quads(rows: StoredRows, device: torch.device) -> tuple[Tensor, Tensor]:
    """The shares that each row, and each four columns of a row, have of the states before they are mixed."""
    slot = rows.slot
    *dims, columns = slot.global_shape
    begin, end = slot.offset[-1], slot.offset[-1] + rows.columns
    number = torch.arange(rows.first, rows.first + rows.height, device=device)
    row, stride = torch.zeros_like(number), 1
    for size, here, offset in zip(
        reversed(dims), reversed(slot.part[:-1]), reversed(slot.offset[:-1]), strict=True
    ):
        row += (number % here + offset) * stride
        number, stride = number // here, stride * size
    quads = torch.arange(begin // LANES, -(-end // LANES), device=device)
    golden = signed(GOLDEN)
    return row * (-(-columns // LANES)) * golden, quads * golden


def round_(values: Tensor, draw: Tensor) -> Tensor:
    """Round fp32 or fp64 in place to numbers of bf16, by the bits below those and `draw`; returns `values`.

    What is not finite stays so: NaN becomes infinite.
    """
    values.nan_to_num_(nan=torch.inf, posinf=torch.inf, neginf=-torch.inf)
    kind, below = _BITS[values.dtype]
    bits = values.view(kind)
    bits += draw.to(kind) << (below - 16) if below > 16 else draw
    bits &= -1 << below
    return values
