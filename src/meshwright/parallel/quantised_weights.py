"""Frozen weights that a rank keeps in 8 or 4 bits, and dequantises where they are used (Dettmers et al. 2023,
QLoRA).

Splits        nothing: a unit of such weights is sharded as others, by ZeRO-3 alone, between rows and so
              between blocks.
Wire          with ZeRO-3 the codes and the scales that are stored: of 4 bits in bf16, 0.53 bytes a weight
              instead of 2.
Saves         as much of the memory that a weight takes, under every stage of ZeRO. The copy that computes
              is that of one block at a time.

A rank stores the codes of all its weights, then the largest numbers of their blocks in the format that
computes (`model/blockwise_quantisation.py`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from meshwright.model.blockwise_quantisation import (
    codes_a_byte,
    dequantise_blocks,
    quantise_blocks,
    values_of_bytes,
)
from meshwright.parallel.flat_param import ParamSlot, Stored
from meshwright.parallel.fsdp_unit import Unit
from meshwright.parallel.precision import Formats
from meshwright.spec.lora import BLOCK
from meshwright.spec.parameters import BaseFormat


class QuantisedWeights:
    """The bytes in which the weights of a unit are stored and gathered."""

    ready = True

    def __init__(self, form: BaseFormat, formats: Formats) -> None:
        self._form, self._formats = form, formats

    def size(self, part: int) -> int:
        """Bytes of so many weights, which are whole blocks."""
        return part // codes_a_byte(self._form) + part // BLOCK * self._formats.compute.itemsize

    def pack(self, unit: Unit) -> Tensor:
        """The message of this rank: what it stores."""
        return unit.stored

    def unpack(self, unit: Unit, messages: Tensor) -> None:
        """Write the weights of all ranks' `messages` (ranks, bytes) into the unit's whole copy."""
        table = self._table(unit)
        for slot in unit.slots:
            for message, rows in zip(messages, unit.whole_rows(slot), strict=True):
                dequantise_blocks(*self._places(unit, message, slot), table, rows.view(-1))

    def read(self, unit: Unit, slot: ParamSlot) -> Tensor:
        """This rank's rows of a weight, in the format that computes."""
        rows = torch.empty(slot.padded, dtype=self._formats.compute, device=unit.stored.device)
        dequantise_blocks(*self._places(unit, unit.stored, slot), self._table(unit), rows)
        return rows.view(slot.part).narrow(slot.dim, 0, slot.rows)

    def write(self, unit: Unit, slot: ParamSlot, values: Tensor) -> None:
        """Store this rank's rows of a weight, rounded to the format that computes and then to codes."""
        rows = torch.zeros(slot.part, dtype=self._formats.compute, device=unit.stored.device)
        rows.narrow(slot.dim, 0, slot.rows).copy_(values.bfloat16() if self._formats.rounded else values)
        quantise_blocks(rows.view(-1), self._form, *self._places(unit, unit.stored, slot))

    def _table(self, unit: Unit) -> Tensor:
        return values_of_bytes(self._form, self._formats.compute, unit.stored.device)

    def _places(self, unit: Unit, message: Tensor, slot: ParamSlot) -> tuple[Tensor, Tensor]:
        """The codes of a weight in a message, and the largest numbers of its blocks."""
        packed, width = codes_a_byte(self._form), self._formats.compute.itemsize
        start, end = slot.start, slot.start + slot.padded
        behind = unit.part // packed
        largest = message[behind + start // BLOCK * width : behind + end // BLOCK * width]
        return message[start // packed : end // packed], largest.view(self._formats.compute)


def put_values(units: Sequence[Unit], values: Mapping[str, Tensor | Stored]) -> None:
    """Store new `values` of quantised weights, by name: parts of the whole as `Unit.parameters_stored` gives
    them, which are no views of what is stored."""
    for unit in units:
        for slot in unit.slots if unit.quantised is not None else ():
            if slot.key in values:
                given = values[slot.key]
                assert isinstance(given, DTensor)
                unit.set_values(slot, given.to_local())
        unit.expire()
