"""Weights gathered in 8 bits: ZeRO's ranks round what they store, and send the numbers and their scales.

Splits nothing.
Wire          of the blocks' matrices 1 byte a parameter instead of 2, and for fp8-blockwise 1 for each
              128 x 128, in the all-gathers of parameters.
Saves         those bytes. A weight that was rounded once is rounded to itself by the products that use it,
              so results are equal, bit for bit (PyTorch's float8 all-gather for FSDP2, 2024).

Each rank's message has the unit's other parameters first, in the compute format, then the numbers of all
matrices, then the exponents of their scales, and ends at a multiple of 8 bytes.
"""

from __future__ import annotations

from math import prod

import torch
import torch.nn.functional as F
from torch import Tensor

from meshwright.kernels.low_precision import E4M3, power_of_two
from meshwright.kernels.low_precision_casts import Cast, by_tensor, by_tile
from meshwright.model.low_precision_linear import ROLES, LowPrecision
from meshwright.parallel.flat_param import ParamSlot
from meshwright.parallel.fsdp_unit import Unit
from meshwright.spec.precision import FP8_TILE, WORD

BIAS = 127
"""Offset of the exponents of scales, as in OCP's E8M0 (2023)."""


class Fp8Gather:
    """Packs a rank's part of a unit into bytes, and unpacks those of all ranks."""

    def __init__(self, products: LowPrecision) -> None:
        self._products = products

    @property
    def ready(self) -> bool:
        """True if scales are known, as they are not in a run's first step with scales of whole tensors."""
        return self._products.scaled

    def pack(self, unit: Unit) -> Tensor:
        """The message of this rank, in bytes."""
        others: list[Tensor] = []
        numbers: list[Tensor] = []
        exponents: list[Tensor] = []
        for slot in unit.slots:
            own = unit.stored[slot.start : slot.start + slot.padded].to(unit.formats.compute)
            if not slot.rounded:
                others.append(own.view(torch.uint8))
                continue
            cast = self._cast(unit, slot, own.view(slot.part))
            numbers.append(cast.numbers.flatten().view(torch.uint8))
            if cast.scales.ndim:
                tiles = cast.scales[..., : -(-slot.part[-1] // FP8_TILE)].flatten()
                exponents.append((torch.frexp(tiles).exponent - 1 + BIAS).to(torch.uint8))
        message = torch.cat([*others, *numbers, *exponents])
        return F.pad(message, (0, -len(message) % WORD))

    def _cast(self, unit: Unit, slot: ParamSlot, own: Tensor) -> Cast:
        """The numbers of this rank's part of a matrix, with the scale of it all or of each tile."""
        if self._products.recipe == "fp8":
            scaling, place = self._products.scalings[unit.parameters[slot.key]], ROLES.index("weight")
            found = by_tensor(own, E4M3, scaling.scales[place], [scaling.seen[place]], columns=False)
        else:
            found = by_tile(own, E4M3, FP8_TILE, square=True, mx=False, columns=False)
        assert found.along is not None
        return found.along

    def unpack(self, unit: Unit, messages: Tensor) -> None:
        """Write the parameters of all ranks' `messages` (ranks, bytes) into the unit's whole copy."""
        width, start = unit.formats.compute.itemsize, 0
        for slot in unit.slots:
            if not slot.rounded:
                target, end = unit.whole_rows(slot), start + slot.padded * width
                target.copy_(messages[:, start:end].view(unit.formats.compute).view(target.shape))
                start = end
        rounded = [slot for slot in unit.slots if slot.rounded]
        exponents = start + sum(slot.padded for slot in rounded)
        for slot in rounded:
            end, target = start + slot.padded, unit.whole_rows(slot)
            numbers = messages[:, start:end].view(torch.float8_e4m3fn).view(-1, *slot.part).to(target.dtype)
            start = end
            if self._products.recipe == "fp8":
                scales = self._products.scalings[unit.parameters[slot.key]].scales[ROLES.index("weight")]
                numbers.mul_(scales)
            else:  # ranks have whole tiles of rows
                *experts, rows, columns = slot.part
                tiles = *experts, -(-rows // FP8_TILE), -(-columns // FP8_TILE)
                found = power_of_two(messages[:, exponents : exponents + prod(tiles)].int() - BIAS)
                exponents += prod(tiles)
                each = found.view(-1, *tiles).to(target.dtype).repeat_interleave(FP8_TILE, -1)
                numbers.unflatten(-2, (tiles[-2], -1)).mul_(each[..., :columns].unsqueeze(-2))
            target.copy_(numbers.view(target.shape))
