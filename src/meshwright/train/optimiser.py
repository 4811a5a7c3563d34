"""Optimisers over the flat buffers in which the units store their parameters."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from meshwright.parallel.data_parallel import DataParallel
from meshwright.parallel.flat_param import Stored
from meshwright.parallel.fsdp_unit import Unit
from meshwright.spec.train import TrainSpec

_CHUNK = 2**20
"""Elements that Lion updates at a time, so that its temporaries stay small."""


class Part(NamedTuple):
    """The decayed, or the undecayed, parameters of a unit that this rank stores, as one flat tensor."""

    unit: Unit
    place: slice
    """Its place in the unit's buffers."""
    flat: Tensor
    moments: tuple[Tensor, ...]
    decay: float

    @property
    def gradient(self) -> Tensor:
        """The gradient, clipped."""
        assert self.unit.gradient is not None
        return self.unit.gradient[self.place]


class Optimiser:
    """The moments of the parameters that a rank stores; a subclass updates both.

    An update is of single elements, so that it does not depend on how parameters are sharded. Norms and
    biases are not decayed.
    """

    def __init__(self, states: DataParallel, train: TrainSpec) -> None:
        self.states, self.train, self.updates = states, train, 0
        self.moments = {
            name: [unit.stored.new_zeros(unit.part - self.begins(name, unit)) for unit in states.units]
            for name in train.moments
        }
        """Name -> for each unit the flat buffer of the moment, or of what it has from `begins` on."""
        self.parts: list[Part] = []
        for index, unit in enumerate(states.units):
            for start, end, decay in ((0, unit.decayed, train.weight_decay), (unit.decayed, unit.part, 0.0)):
                if start < end:
                    begins = {name: self.begins(name, unit) for name in self.moments}
                    moments = tuple(
                        self.moments[name][index][start - begin : end - begin]
                        for name, begin in begins.items()
                        if begin <= start
                    )
                    place = slice(start, end)
                    self.parts.append(Part(unit, place, unit.stored[place], moments, decay))

    @staticmethod
    def begins(moment: str, unit: Unit) -> int:
        """Where the buffer of a moment begins in those of a unit."""
        return 0

    def step(self, rate: float) -> None:
        """Update the stored parameters from the units' gradients at learning rate `rate`."""
        raise NotImplementedError

    def resume(self, updates: int) -> None:
        """Go on after `updates` updates; the moments are restored by themselves."""
        self.updates = updates

    def tensors(self) -> Iterator[tuple[str, Stored]]:
        """(`exp_avg/name` or `exp_avg_sq/name`, moment) of each parameter, in the optimiser's memory."""
        for moment, buffers in self.moments.items():
            for unit, flat in zip(self.states.units, buffers, strict=True):
                for name, tensor in unit.tensors(flat):
                    yield f"{moment}/{name}", tensor

    def memory(self) -> int:
        """Bytes of the moments that this rank holds."""
        return sum(flat.untyped_storage().nbytes() for buffers in self.moments.values() for flat in buffers)


class AdamW(Optimiser):
    """PyTorch's fused AdamW (Loshchilov & Hutter 2019), with decoupled decay."""

    def __init__(self, states: DataParallel, train: TrainSpec) -> None:
        super().__init__(states, train)
        device, groups = states.mesh.device, dict[float, list[Tensor]]()
        self._adam_parts = [part for part in self.parts if len(part.moments) == len(self.moments)]
        for part in self._adam_parts:
            groups.setdefault(part.decay, []).append(part.flat)
        if not groups:  # a stage may hold nothing
            groups[0.0] = [torch.zeros(0, device=device)]
        self._adam = torch.optim.AdamW(
            [{"params": flats, "weight_decay": decay} for decay, flats in groups.items()],
            lr=train.lr,
            betas=(train.beta1, train.beta2),
            eps=train.eps,
            fused=True,
        )
        for part in self._adam_parts:
            count = torch.zeros((), dtype=torch.float32, device=device)
            self._adam.state[part.flat] = {
                "step": count,
                **dict(zip(self.moments, part.moments, strict=True)),
            }

    def step(self, rate: float) -> None:
        """Update the stored parameters from the units' gradients at learning rate `rate`."""
        for group in self._adam.param_groups:
            group["lr"] = rate
        for part in self._adam_parts:
            part.flat.grad = part.gradient
        self._adam.step()
        for part in self._adam_parts:
            part.flat.grad = None
        self.updates += 1

    def resume(self, updates: int) -> None:
        """Go on after `updates` updates; the moments are restored by themselves."""
        super().resume(updates)
        for part in self._adam_parts:
            self._adam.state[part.flat]["step"].fill_(updates)


class Lion(Optimiser):
    """Lion (Chen et al. 2023, algorithm 2): steps by the sign of momentum and gradient, decoupled decay."""

    @torch.no_grad()
    def step(self, rate: float) -> None:
        """Update the stored parameters from the units' gradients at learning rate `rate`."""
        beta1, beta2 = self.train.beta1, self.train.beta2
        for part in self.parts:
            tensors = part.flat, part.gradient, *part.moments
            for flat, gradient, momentum in zip(*(each.split(_CHUNK) for each in tensors), strict=True):
                direction = torch.lerp(momentum, gradient, 1 - beta1).sign_()
                flat.mul_(1 - rate * part.decay).sub_(direction, alpha=rate)
                momentum.lerp_(gradient, 1 - beta2)
        self.updates += 1
