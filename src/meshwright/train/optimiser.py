"""AdamW over the flat buffers in which the units store their parameters."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from meshwright.parallel.data_parallel import DataParallel
from meshwright.parallel.flat_param import Stored
from meshwright.parallel.fsdp_unit import Unit
from meshwright.spec.sections import TrainSpec


class Optimiser:
    """PyTorch's fused AdamW (Loshchilov & Hutter 2019): decoupled decay, none on norms and biases.

    It updates each rank's stored part only; two flat tensors a unit, decayed and undecayed.
    """

    def __init__(self, states: DataParallel, train: TrainSpec) -> None:
        self.states = states
        self.moments = {
            moment: [torch.zeros_like(unit.stored) for unit in states.units]
            for moment in ("exp_avg", "exp_avg_sq")
        }
        device = states.mesh.device
        flats: tuple[list[Tensor], list[Tensor]] = [], []
        self._pairs: list[tuple[Tensor, Unit, slice]] = []
        held: dict[Tensor, dict[str, Tensor]] = {}
        for index, unit in enumerate(states.units):
            for group, part in zip(flats, (slice(unit.decayed), slice(unit.decayed, None)), strict=True):
                flat = unit.stored[part]
                if flat.numel():
                    group.append(flat)
                    self._pairs.append((flat, unit, part))
                    held[flat] = {name: buffers[index][part] for name, buffers in self.moments.items()}
        if not self._pairs:  # a stage may hold nothing
            flats[0].append(torch.zeros(0, device=device))
        decays, betas = (train.weight_decay, 0.0), (train.beta1, train.beta2)
        groups = [
            {"params": flat, "weight_decay": decay} for flat, decay in zip(flats, decays, strict=True) if flat
        ]
        self.adam = torch.optim.AdamW(groups, lr=train.lr, betas=betas, eps=train.eps, fused=True)
        for flat, moments in held.items():
            self.adam.state[flat] = {"step": torch.zeros((), dtype=torch.float32, device=device), **moments}

    def step(self, rate: float) -> None:
        """Update the stored parameters from the units' gradients at learning rate `rate`."""
        for group in self.adam.param_groups:
            group["lr"] = rate
        for flat, unit, part in self._pairs:
            assert unit.gradient is not None
            flat.grad = unit.gradient[part]
        self.adam.step()
        for flat, _, _ in self._pairs:
            flat.grad = None

    @property
    def updates(self) -> int:
        """Number of updates made: Adam's t."""
        return int(self.adam.state[self._pairs[0][0]]["step"]) if self._pairs else 0

    @updates.setter
    def updates(self, count: int) -> None:
        for flat, _, _ in self._pairs:
            self.adam.state[flat]["step"].fill_(count)

    def tensors(self) -> Iterator[tuple[str, Stored]]:
        """(`exp_avg/name` or `exp_avg_sq/name`, moment) of each parameter, in the optimiser's memory."""
        for moment, buffers in self.moments.items():
            for unit, flat in zip(self.states.units, buffers, strict=True):
                for name, tensor in unit.tensors(flat):
                    yield f"{moment}/{name}", tensor

    def memory(self) -> int:
        """Bytes of the moments that this rank holds."""
        return sum(flat.untyped_storage().nbytes() for buffers in self.moments.values() for flat in buffers)
