"""AdamW with moments of matrices in 8 bits, a scale for each block (Dettmers et al. 2022, arXiv 2110.02861).

A step dequantises both moments, updates them and the parameters in the format of the masters, and quantises
the moments again, some blocks at a time. Norms and biases have moments in the format of the masters.

Blocks lie within a row and no layout cuts them (`spec/eight_bit.py`): equal gradients give equal codes and
scales, to the bit, in every layout. Nothing crosses a link.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from math import sqrt
from typing import NamedTuple

import torch
from torch import Tensor

from meshwright.optim.eight_bit import SIGNED, UNSIGNED, DynamicMap, dequantised
from meshwright.optim.offload import MomentMemory
from meshwright.optim.optimiser import AdamW, FlatPart, StateBuffer
from meshwright.optim.stochastic_rounding import chunks_of, draws, round_
from meshwright.parallel.data_parallel import DataParallel
from meshwright.parallel.flat_param import ParamSlot
from meshwright.parallel.fsdp_unit import Unit
from meshwright.spec import RunSpec
from meshwright.spec.eight_bit import blocks_of

_CHUNK = {"cpu": 2**17, "cuda": 2**22}
"""Elements that are updated at a time, so that temporaries stay small: on a CPU in its cache."""


class _Matrices(NamedTuple):
    """Adjacent matrices of a unit whose blocks are of one size, and where their scales begin."""

    slots: Sequence[ParamSlot]
    scales: int
    block: int


class _Moment(NamedTuple):
    """A moment of the matrices of all units: codes and scales by unit, and the map."""

    codes: list[Tensor]
    scales: list[Tensor]
    map: DynamicMap

    def stepped(self, unit: int, place: slice, scales: slice, numbers: Tensor, rate: float) -> Tensor:
        """The moment of a unit's blocks, moved to `numbers` (n, block) by `rate`, before it is rounded."""
        codes, scale = self.codes[unit][place].view_as(numbers), self.scales[unit][scales]
        moved = dequantised(codes, scale, self.map.values).lerp_(numbers, rate)
        for held, new in zip((codes, scale), self.map.quantised(moved), strict=True):
            held.copy_(new)
        return moved


class AdamW8bit(AdamW):
    """AdamW with the moments of matrices in 8 bits, by blocks."""

    def __init__(self, states: DataParallel, spec: RunSpec, memory: MomentMemory) -> None:
        super().__init__(states, spec, memory)
        device, exact, blocks = states.mesh.device, states.formats.exact, blocks_of(spec)
        self._scale_slots = [_scale_slots(unit, blocks) for unit in states.trained]
        counts = [sum(slot.padded for slot in slots) for slots in self._scale_slots]
        self._eight_bit = {
            name: _Moment(
                [unit.stored.new_zeros(unit.decayed, dtype=torch.uint8) for unit in states.trained],
                [torch.zeros(count, dtype=exact, device=device) for count in counts],
                DynamicMap.make(values, exact, device),
            )
            for name, values in (("exp_avg", SIGNED), ("exp_avg_sq", UNSIGNED))
        }
        index = {id(unit): number for number, unit in enumerate(states.trained)}
        self._matrices: list[tuple[int, FlatPart, list[_Matrices]]] = []
        for part in self.parts:
            if not part.moments:
                number = index[id(part.unit)]
                self._matrices.append((number, part, _runs(part, self._scale_slots[number], blocks)))

    @staticmethod
    def begins(moment: str, unit: Unit) -> int:
        """Where the buffer of a moment begins in those of a unit: that of matrices is apart."""
        return unit.decayed

    @torch.no_grad()
    def step(self, rate: float, factor: float = 1.0) -> None:
        """Update the stored parameters from the units' gradients times `factor`, at learning rate `rate`."""
        for unit, part, runs in self._matrices:
            for run in runs:
                self._update(unit, part, run, rate, factor)
        super().step(rate, factor)

    def _update(self, unit: int, part: FlatPart, run: _Matrices, rate: float, factor: float) -> None:
        formats, start = self.states.formats, run.slots[0].start
        scale = run.scales
        for chunk in chunks_of(run.slots, _CHUNK[part.flat.device.type]):  # of whole rows, so of whole blocks
            size = sum(rows.elements for rows in chunk)
            place, scales = slice(start, start + size), slice(scale, scale + size // run.block)
            stored = part.unit.stored[place]
            wide = stored.to(formats.exact, copy=True) if formats.rounded else stored
            assert part.unit.gradient is not None
            part.unit.gradient[place].mul_(factor)  # of a chunk, which then is in the cache
            self._update_blocks(unit, part, place, scales, wide.view(-1, run.block), rate)
            if formats.rounded:
                seed = self.train.seed
                stored.copy_(round_(wide, draws(chunk, seed, self.updates + 1, stored.device)))
            start, scale = place.stop, scales.stop

    def _update_blocks(
        self, unit: int, part: FlatPart, place: slice, scales: slice, parameters: Tensor, rate: float
    ) -> None:
        """Update some blocks of `parameters` (n, block) and their moments in place."""
        train, number = self.train, self.updates + 1
        first_bias, second_bias = 1 - train.beta1**number, 1 - train.beta2**number
        assert part.unit.gradient is not None
        gradient = part.unit.gradient[place].view_as(parameters)
        exp_avg, exp_avg_sq = self._eight_bit["exp_avg"], self._eight_bit["exp_avg_sq"]
        first = exp_avg.stepped(unit, place, scales, gradient, 1 - train.beta1)
        second = exp_avg_sq.stepped(unit, place, scales, gradient.square(), 1 - train.beta2)
        spread = second.sqrt_().div_(sqrt(second_bias)).add_(train.eps)
        rate *= part.group.factor
        parameters.mul_(1 - rate * part.group.decay).addcdiv_(first, spread, value=-rate / first_bias)

    def buffers(self) -> Iterator[StateBuffer]:
        """The flat buffers of all states; scales have the kind of their moment, with `_scale` behind."""
        yield from super().buffers()
        for name, moment in self._eight_bit.items():
            for unit, codes, scales, slots in zip(
                self.states.trained, moment.codes, moment.scales, self._scale_slots, strict=True
            ):
                yield StateBuffer(name, unit, codes, [slot for slot in unit.slots if slot.decay])
                yield StateBuffer(f"{name}_scale", unit, scales, slots)

    def memory(self) -> dict[str, int]:
        """Bytes of states that this rank holds, and of the maps."""
        maps = sum(tensor.nbytes for each in self._eight_bit.values() for tensor in each.map)
        return {"optimiser": super().memory()["optimiser"] + maps}


def _scale_slots(unit: Unit, blocks: Mapping[str, int]) -> list[ParamSlot]:
    """The matrices of a unit, each with its scales in the place of its blocks."""
    slots, start = [], 0
    for slot in unit.slots:
        if not slot.decay:
            continue
        block = blocks[slot.key]
        held = slot.piece
        assert held.local_shape[-1] % block == 0 and held.offset[-1] % block == 0, slot.key
        piece = replace(
            held,
            global_shape=_blocks_in(held.global_shape, block),
            offset=_blocks_in(held.offset, block),
            local_shape=_blocks_in(held.local_shape, block),
        )
        slots.append(
            replace(
                slot,
                global_shape=piece.global_shape,
                offset=_blocks_in(slot.offset, block),
                local_shape=_blocks_in(slot.local_shape, block),
                piece=piece,
                start=start,
                padded=slot.padded // block,
            )
        )
        start += slot.padded // block
    return slots


def _blocks_in(shape: tuple[int, ...], block: int) -> tuple[int, ...]:
    return (*shape[:-1], shape[-1] // block)


def _runs(part: FlatPart, scale_slots: list[ParamSlot], blocks: Mapping[str, int]) -> list[_Matrices]:
    """The runs of the matrices of a part, of which neighbours with equal blocks are one."""
    own = range(part.place.start, part.place.stop)
    every = zip([slot for slot in part.unit.slots if slot.decay], scale_slots, strict=True)
    pairs, runs = [pair for pair in every if pair[0].start in own], []
    for block, same in groupby(pairs, lambda pair: blocks[pair[0].key]):
        listed = list(same)
        runs.append(_Matrices([slot for slot, _ in listed], listed[0][1].start, block))
    return runs
