"""Compressed exchanges of islands: numbers in few bits, or of each block the largest only.

Splits        nothing: a message is of the part of a unit that a rank stores.
Wire          for P parameters of a rank in matrices, R islands, b bytes of an exact number, and blocks of B
              numbers of which k are sent: an all-gather of (R-1) P/B times the bytes of a block. These are
              b k for fp32 and 2 k for bf16; k for int8, k/2 for int4 and fp4, and b for the scale of these
              three; and k for the indices, unless all are sent. Norms and biases are sent in b bytes each.

Each island adds up the decoded messages in exact numbers, in the order of islands: no sum is rounded, and all
islands find the same bits. Blocks are those of 8-bit moments (`spec/eight_bit.py`), which no layout cuts: a
message does not depend on the layout inside an island. Codes are found of numbers rounded to fp32, so that in
float64 layouts, whose sums differ in their last bits, agree where two numbers tie.

With error feedback (Seide et al. 2014; Karimireddy et al. 2019) an island adds to what it moved by what its
earlier messages left out, times `outer.error_decay`. The largest of each block with it, without outer
momentum, are SparseLoCo (Sarfi et al. 2025); E3M0 is the format of Streaming DiLoCo (Douillard et al. 2025).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from meshwright.comm.collectives import start_all_gather
from meshwright.comm.mesh import Axis
from meshwright.comm.traffic_counter import Pending
from meshwright.parallel.fsdp_unit import Unit
from meshwright.spec.outer import OuterFormat, OuterSpec

_LEVELS = (0.0, *(2.0**power for power in range(-6, 1)))
"""Magnitudes of fp4 (E3M0), as shares of a block's largest number."""

_ROUND_UP = tuple((low + high) / 2 for low, high in pairwise(_LEVELS))
"""Least magnitudes that become the next level: halfway between two, the larger is taken."""

_CHUNK = {"cpu": 2**18, "cuda": 2**24}
"""Numbers that are encoded at a time, so that temporaries stay small."""


class Sum(Protocol):
    """A tensor of all islands that is being summed."""

    @property
    def tensors(self) -> Sequence[Tensor]:
        """The tensors that are sent and received in."""
        ...

    def total(self) -> Tensor:
        """The sum, once it has come; the caller may change it."""
        ...


@dataclass(frozen=True)
class ExactSum:
    """An all-reduce: `buffer` holds the sum when `work` has ended."""

    buffer: Tensor
    work: Pending

    @property
    def tensors(self) -> Sequence[Tensor]:
        """The tensor that is summed in place."""
        return (self.buffer,)

    def total(self) -> Tensor:
        """The sum."""
        self.work.wait()
        return self.buffer


class _BlocksOfOneSize(NamedTuple):
    """A part of a unit's buffers, of matrices whose blocks are of one size."""

    place: slice
    block: int


@dataclass(frozen=True)
class CompressedSum:
    """An all-gather of messages, which are decoded and added up when their sum is asked for."""

    sent: Tensor
    """The message of this island, (bytes,), which has to live until the work has ended."""
    buffer: Tensor
    """The message of each island, (R, bytes)."""
    fields: Sequence[tuple[torch.dtype, torch.Size]]
    """Tensors that a message consists of, in order."""
    work: Pending
    compression: Compression

    @property
    def tensors(self) -> Sequence[Tensor]:
        """The messages."""
        return self.sent, self.buffer

    def total(self) -> Tensor:
        """The sum of all islands' messages, in exact numbers."""
        self.work.wait()
        compression = self.compression
        found = torch.zeros_like(compression.unit.stored, dtype=compression.exact)
        for message in self.buffer:
            compression.add_decoded(found, _split(message, self.fields))
        return found


class Compression:
    """The messages of one unit of an island, and what they left out so far."""

    def __init__(self, outer: OuterSpec, unit: Unit, blocks: Mapping[str, int], exact: torch.dtype) -> None:
        self.outer, self.unit, self.exact = outer, unit, exact
        self.error: Tensor | None = None
        """The sum that messages left out, (P/n,), if the next one adds it, after its decay."""
        if outer.kept_error:
            self.error = torch.zeros_like(unit.stored, dtype=exact)
        matrices = [slot for slot in unit.slots if slot.decay]
        self._runs: list[_BlocksOfOneSize] = []
        for block, slots in groupby(matrices, lambda slot: blocks[slot.key] if outer.has_blocks else 1):
            listed = list(slots)
            assert all(slot.part[-1] % block == 0 for slot in listed), "a layout cuts blocks"
            start, end = listed[0].start, listed[-1].start + listed[-1].padded
            most = max(1, _CHUNK[unit.stored.device.type] // block) * block
            cuts = [*range(start, end, most), end]
            self._runs += [_BlocksOfOneSize(slice(*cut), block) for cut in pairwise(cuts)]

    def start(self, delta: Tensor, axis: Axis) -> CompressedSum:
        """Send how far the unit moved, (P/n,), to all islands."""
        if self.error is not None:
            delta = self.error.mul_(self.outer.kept_error).add_(delta)
        fields: list[Tensor] = []
        for run in self._runs:
            fields += self._encoded(delta[run.place].view(-1, run.block))
        fields.append(delta[self.unit.decayed :].clone())
        if self.error is not None:
            self.add_decoded(self.error, fields, -1)
        message = torch.cat([field.contiguous().view(-1).view(torch.uint8) for field in fields])
        gathered = message.new_empty(axis.size, len(message))
        work = start_all_gather(gathered.view(-1), message, axis)
        return CompressedSum(message, gathered, [(field.dtype, field.shape) for field in fields], work, self)

    def _encoded(self, blocks: Tensor) -> list[Tensor]:
        """The fields of a message of blocks (n, block)."""
        if self.outer.top_k is None:
            return _codes(blocks, self.outer.format)
        sent = self.outer.sent_of(blocks.shape[1])
        order = blocks.abs().float().argsort(dim=1, descending=True, stable=True)  # of equals, the first
        chosen = order[:, :sent]
        return [chosen.to(torch.uint8), *_codes(blocks.gather(1, chosen), self.outer.format)]

    def add_decoded(self, total: Tensor, fields: Sequence[Tensor], sign: int = 1) -> None:
        """Add a message, times `sign`, to `total` (P/n,)."""
        left, form = iter(fields), self.outer.format
        for run in self._runs:
            blocks = total[run.place].view(-1, run.block)
            chosen = None if self.outer.top_k is None else next(left).long()
            width = self.outer.sent_of(run.block)
            scales = next(left) if form in ("int8", "int4", "fp4") else None
            values = _values(next(left), scales, width, form)
            if chosen is None:
                blocks.add_(values, alpha=sign)
            else:
                blocks.scatter_add_(1, chosen, values.to(self.exact) * sign)
        total[self.unit.decayed :].add_(next(left), alpha=sign)


def _codes(blocks: Tensor, form: OuterFormat) -> list[Tensor]:
    """Numbers (n, m) in a format: scales (n, 1) where it has any, and codes (n, m) or (n, m/2)."""
    if form == "fp32":
        return [blocks]
    if form == "bf16":
        return [blocks.float().bfloat16()]
    scales = blocks.abs().amax(1, keepdim=True)
    shares = (blocks / scales.masked_fill(scales == 0, 1)).float()
    if form == "int8":
        return [scales, (shares.to(blocks.dtype) * 127).round().to(torch.int8)]
    if form == "int4":
        codes = (shares.to(blocks.dtype) * 7).round() + 7
    else:
        codes, magnitudes = (shares < 0).to(torch.uint8) * 8, shares.abs_()
        for end in _ROUND_UP:
            codes += magnitudes >= end
    return [scales, _packed(codes.to(torch.uint8))]


def _values(codes: Tensor, scales: Tensor | None, width: int, form: OuterFormat) -> Tensor:
    """The numbers (n, width) that `_codes` stand for."""
    if scales is None:
        return codes
    if form == "int8":
        return codes.to(scales.dtype) * (scales / 127)
    codes = _unpacked(codes, width)
    if form == "int4":
        return (codes.to(scales.dtype) - 7) * (scales / 7)
    halves = scales.new_full((len(_LEVELS) - 1,), 0.5).cumprod(0)  # a constant's device is not a dry run's
    levels = torch.cat([halves.new_zeros(1), 2 * halves.flip(0)])
    return torch.cat([levels, -levels])[codes.int()] * scales


def _packed(codes: Tensor) -> Tensor:
    """Codes of 4 bits (n, m), two a byte, the first in the lower half; the last of an odd m has its own."""
    if codes.shape[1] % 2:
        codes = torch.cat([codes, codes.new_zeros(len(codes), 1)], 1)
    return codes[:, ::2] | (codes[:, 1::2] << 4)


def _unpacked(pairs: Tensor, width: int) -> Tensor:
    return torch.stack([pairs & 15, pairs >> 4], -1).flatten(1)[:, :width]


def _split(message: Tensor, fields: Sequence[tuple[torch.dtype, torch.Size]]) -> list[Tensor]:
    """The tensors of a message in bytes; each is a copy, since an offset in bytes may not be aligned."""
    sizes = [shape.numel() * dtype.itemsize for dtype, shape in fields]
    parts = zip(message.split(sizes), fields, strict=True)
    return [part.clone().view(dtype).view(shape) for part, (dtype, shape) in parts]
