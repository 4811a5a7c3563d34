"""Optimisers over the flat buffers in which the units store their parameters."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from meshwright.optim.offload import MomentMemory, Span, Staging
from meshwright.optim.stochastic_rounding import StoredRows, chunks_of, draws, round_
from meshwright.parallel.data_parallel import DataParallel
from meshwright.parallel.flat_param import ParamSlot, Stored, stored
from meshwright.parallel.fsdp_unit import Unit
from meshwright.spec import RunSpec
from meshwright.spec.parameter_groups import Group, group_of

_CHUNK = {"cpu": 2**18, "cuda": 2**24}
"""Elements that are updated at a time where that takes temporaries, so that these stay small."""


class FlatPart(NamedTuple):
    """Adjacent parameters of a unit that are updated alike, as one flat tensor of what this rank stores."""

    unit: Unit
    place: slice
    """Its place in the unit's buffers."""
    flat: Tensor
    moments: tuple[Tensor, ...]
    group: Group

    @property
    def gradient(self) -> Tensor:
        """The gradient, without the factor that `Optimiser.step` is given."""
        assert self.unit.gradient is not None
        return self.unit.gradient[self.place]


class StateBuffer(NamedTuple):
    """A flat buffer of a unit on this rank, with the places in it of the parameters that it has."""

    kind: str
    """Name of the state, such as `exp_avg`; empty for the parameters themselves."""
    unit: Unit
    flat: Tensor
    slots: Sequence[ParamSlot]

    def part(self, slot: ParamSlot) -> Tensor:
        """The part of a parameter, padding included."""
        return self.flat[slot.start : slot.start + slot.padded]

    def local(self, slot: ParamSlot) -> Tensor:
        """This rank's rows of a parameter, as a view."""
        return self.part(slot).view(slot.part).narrow(slot.dim, 0, slot.rows)


Cut = tuple[FlatPart, int, int]
"""A part, and the elements from one to another of it."""


def cuts_of(part: FlatPart, most: int) -> list[Cut]:
    """A part in chunks of `most` elements at most."""
    size = len(part.flat)
    return [(part, start, min(start + most, size)) for start in range(0, size, most)]


class Optimiser:
    """The moments of the parameters that a rank stores; a subclass updates both.

    An update is of single elements, so that it does not depend on how parameters are sharded.
    """

    def __init__(self, states: DataParallel, spec: RunSpec, memory: MomentMemory) -> None:
        self.states, self.train, self.updates = states, spec.train, 0
        sizes = {name: [u.part - self.begins(name, u) for u in states.trained] for name in spec.train.moments}
        flats = iter(
            memory.zeros([size for listed in sizes.values() for size in listed], states.formats.exact)
        )
        self.moments = {name: [next(flats) for _ in listed] for name, listed in sizes.items()}
        """Name -> for each unit the flat buffer of the moment, or of what it has from `begins` on."""
        self.staging: Staging | None = None
        if memory.staged:
            rows = [slot.part[-1] for unit in states.trained for slot in unit.slots]
            least = max(rows, default=0) if states.formats.rounded else 0  # chunks end at whole rows
            self.staging = Staging([*self.moments.values()], memory, states.mesh.device, least)
        self.parts: list[FlatPart] = []
        for index, unit in enumerate(states.trained):
            begins = {name: self.begins(name, unit) for name in self.moments}

            def alike(slot: ParamSlot) -> tuple[bool, Group]:
                return slot.decay, group_of(spec, slot.key, len(slot.global_shape))

            for (_, group), slots in groupby(unit.slots, alike):
                listed = list(slots)
                start, end = listed[0].start, listed[-1].start + listed[-1].padded
                moments = tuple(
                    self.moments[name][index][start - begin : end - begin]
                    for name, begin in begins.items()
                    if begin <= start
                )
                place = slice(start, end)
                self.parts.append(FlatPart(unit, place, unit.stored[place], moments, group))

    def pieces(
        self, parts: Sequence[FlatPart], *more: Tensor, factor: float = 1.0
    ) -> Iterator[tuple[Any, ...]]:
        """(part, parameters, gradient, each moment, each of `more`) of a chunk at a time, to be updated.

        Gradients are multiplied by `factor`, in place, while a chunk is in a processor's cache.
        Parameters in bf16 are a copy in the moments' format, which is rounded and stored after its update.
        """
        most, rounded = _CHUNK[self.states.mesh.device.type], self.states.formats.rounded
        most = min(most, self.staging.length) if self.staging else most
        cuts: list[Cut] = []
        chunks: list[list[StoredRows]] = []
        for part in parts:
            if not rounded:
                cuts += (found := cuts_of(part, most))
                chunks += [[]] * len(found)
                continue
            slots = [slot for slot in part.unit.slots if part.place.start <= slot.start < part.place.stop]
            start = 0
            for chunk in chunks_of(slots, most):
                end = start + sum(rows.elements for rows in chunk)
                cuts.append((part, start, end))
                chunks.append(chunk)
                start = end
        for (part, start, end), chunk, moments in zip(cuts, chunks, self.moments_at(cuts), strict=True):
            flat = stored = part.flat[start:end]
            if rounded:
                flat = stored.to(self.states.formats.exact, copy=True)
            gradient = part.gradient[start:end]
            if factor != 1.0:
                gradient.mul_(factor)
            yield part, flat, gradient, *moments, *(each[start:end] for each in more)
            if rounded:
                stored.copy_(round_(flat, draws(chunk, self.train.seed, self.updates + 1, stored.device)))

    def moments_at(self, cuts: Sequence[Cut]) -> Iterator[tuple[Tensor, ...]]:
        """The moments of parts from an element to another, on the device, to be updated in place."""
        if self.staging is not None:
            yield from self.staging.through([Span(part.moments, start, end) for part, start, end in cuts])
            return
        for part, start, end in cuts:
            yield tuple(moment[start:end] for moment in part.moments)

    @staticmethod
    def begins(moment: str, unit: Unit) -> int:
        """Where the buffer of a moment begins in those of a unit."""
        return 0

    def step(self, rate: float, factor: float = 1.0) -> None:
        """Update the stored parameters from the units' gradients times `factor`, at learning rate `rate`.

        The values of gradients are not defined afterwards.
        """
        raise NotImplementedError

    @property
    def takes_divisor(self) -> bool:
        """True if `step_divided` updates every parameter."""
        return False

    def step_divided(self, rate: float, divisor: Tensor, skipped: Tensor) -> None:
        """Update as `step` does from gradients divided by a number that is on the device, without a wait.

        `divisor` is a scalar in float64, and `skipped` one in fp32; nothing changes where `skipped` is 1, and
        the caller counts the update where it is 0.
        """
        raise NotImplementedError

    def resume(self, updates: int) -> None:
        """Go on after `updates` updates; the moments are restored by themselves."""
        self.updates = updates

    def tensors(self) -> Iterator[tuple[str, Stored]]:
        """(`exp_avg/name`, such a state) of each parameter, in the optimiser's memory."""
        for buffer in self.buffers():
            unit = buffer.unit
            for slot in buffer.slots:
                local = buffer.local(slot)
                yield f"{buffer.kind}/{slot.key}", stored(slot, local, unit.mesh, unit.shards is not None)

    def buffers(self) -> Iterator[StateBuffer]:
        """The flat buffers of all states."""
        for moment, flats in self.moments.items():
            for unit, flat in zip(self.states.trained, flats, strict=True):
                begin = unit.part - len(flat)
                slots = [replace(slot, start=slot.start - begin) for slot in unit.slots_in(flat)]
                yield StateBuffer(moment, unit, flat, slots)

    def memory(self) -> dict[str, int]:
        """Bytes of states that this rank holds: "optimiser" on its device, "offloaded" elsewhere."""
        held = sum(buffer.flat.nbytes for buffer in self.buffers())
        if self.train.offload == "none":
            return {"optimiser": held}
        return {"optimiser": self.staging.nbytes() if self.staging else 0, "offloaded": held}


class AdamW(Optimiser):
    """PyTorch's fused AdamW (Loshchilov & Hutter 2019), with decoupled decay.

    One call updates all parts of a group, or with weights in bf16, and with staged moments, a chunk of one.
    Its kernel divides gradients, too, which saves a pass over them; by a number in fp32, so in float64 they
    are divided before. `torch.optim.AdamW` is not used, since it would import Dynamo, which takes most of a
    second.
    """

    def __init__(self, states: DataParallel, spec: RunSpec, memory: MomentMemory) -> None:
        super().__init__(states, spec, memory)
        self._in_chunks = states.formats.rounded or memory.staged
        self._adam_parts = [part for part in self.parts if len(part.moments) == len(self.moments)]
        self._groups: dict[Group, list[tuple[FlatPart, Tensor]]] = {}
        """Where nothing is in chunks, the parts that are updated alike, each with its count of updates on the
        device."""
        if not self._in_chunks:
            for part in self._adam_parts:
                count = torch.zeros((), dtype=torch.float32, device=states.mesh.device)
                self._groups.setdefault(part.group, []).append((part, count))

    @property
    def takes_divisor(self) -> bool:
        """True if `step_divided` updates every parameter."""
        return len(self._adam_parts) == len(self.parts)

    def step(self, rate: float, factor: float = 1.0) -> None:
        """Update the stored parameters from the units' gradients times `factor`, at learning rate `rate`."""
        exact, divisor = self.states.formats.exact, None
        if factor * torch.finfo(exact).max > 1:
            divisor = torch.full((), 1 / factor, dtype=torch.float64, device=self.states.mesh.device)
        elif self._adam_parts:
            torch._foreach_mul_([part.gradient for part in self._adam_parts], factor)
        self.step_divided(rate, divisor)
        self.updates += 1

    @torch.no_grad()
    def step_divided(self, rate: float, divisor: Tensor | None = None, skipped: Tensor | None = None) -> None:
        """Update the stored parameters from gradients divided by a number on the device, unless skipped."""
        train = self.train
        if divisor is not None and self.states.formats.exact == torch.float32:
            divisor = divisor.float()
        elif divisor is not None and self._adam_parts:
            torch._foreach_div_([part.gradient for part in self._adam_parts], divisor)
            divisor = None
        for group, flats, gradients, first, second, counts in self._tensors():
            adamw(
                flats, gradients, first, second, [], counts, fused=True, amsgrad=False,
                lr=rate * group.factor, beta1=train.beta1, beta2=train.beta2,
                weight_decay=group.decay, eps=train.eps, maximize=False,
                grad_scale=divisor, found_inf=skipped,
            )  # fmt: skip

    def _tensors(self) -> Iterator[tuple[Any, ...]]:
        """(group, parameters, gradients, first and second moments, counts of updates) of a kernel's call."""
        if self._in_chunks:
            for part, *tensors in self.pieces(self._adam_parts):
                count = torch.full((), self.updates, dtype=torch.float32, device=self.states.mesh.device)
                yield part.group, *([tensor] for tensor in (*tensors, count))
            return
        for group, members in self._groups.items():
            listed = [(part.flat, part.gradient, *part.moments, count) for part, count in members]
            yield group, *map(list, zip(*listed, strict=True))

    def resume(self, updates: int) -> None:
        """Go on after `updates` updates; the moments are restored by themselves."""
        super().resume(updates)
        for members in self._groups.values():
            for _, count in members:
                count.fill_(updates)


class Lion(Optimiser):
    """Lion (Chen et al. 2023, algorithm 2): steps by the sign of momentum and gradient, decoupled decay."""

    @torch.no_grad()
    def step(self, rate: float, factor: float = 1.0) -> None:
        """Update the stored parameters from the units' gradients times `factor`, at learning rate `rate`."""
        beta1, beta2 = self.train.beta1, self.train.beta2
        for part, flat, gradient, momentum in self.pieces(self.parts, factor=factor):
            own_rate = rate * part.group.factor
            direction = torch.lerp(momentum, gradient, 1 - beta1).sign_()
            flat.mul_(1 - own_rate * part.group.decay).sub_(direction, alpha=own_rate)
            momentum.lerp_(gradient, 1 - beta2)
        self.updates += 1


class Sgd(Optimiser):
    """SGD with heavy-ball momentum beta1 (Polyak 1964; Sutskever et al. 2013), and decoupled decay."""

    @torch.no_grad()
    def step(self, rate: float, factor: float = 1.0) -> None:
        """Update the stored parameters from the units' gradients times `factor`, at learning rate `rate`."""
        for part, flat, gradient, momentum in self.pieces(self.parts):
            own_rate = rate * part.group.factor
            momentum.mul_(self.train.beta1).add_(gradient, alpha=factor)
            flat.mul_(1 - own_rate * part.group.decay).sub_(momentum, alpha=own_rate)
        self.updates += 1
