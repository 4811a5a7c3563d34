"""Delayed scaling: scales of whole tensors follow from the largest numbers of the steps before.

Splits nothing. A tensor of which ranks hold parts has one scale, and none of them waits for its largest
number before a product (Micikevicius et al. 2022; Transformer Engine). In the first step no scale is known,
and products are in the format of their operands.
Wire          once a step the largest numbers of 3 operands of each matrix, 4 bytes each, over all ranks.
Saves         a message before each product.
"""

from __future__ import annotations

import torch

from meshwright.model.low_precision import E2M1, E4M3, ROOM, scale_of
from meshwright.model.low_precision_linear import ROLES, LowPrecision, Scaling
from meshwright.parallel.collectives import start_all_reduce
from meshwright.parallel.data_parallel import DataParallel
from meshwright.parallel.mesh import Mesh
from meshwright.spec import RunSpec
from meshwright.spec.low_precision_rules import rounded_parameters


class DelayedScaling:
    """The history of largest numbers, and the scales that follow, of the matrices of all stages."""

    def __init__(self, spec: RunSpec, mesh: Mesh, states: DataParallel, products: LowPrecision) -> None:
        self._mesh, self.products = mesh, products
        names = [parameter.name for parameter in rounded_parameters(spec)]
        self._scales = torch.ones(len(names), len(ROLES), device=mesh.device)
        self._seen = torch.zeros_like(self._scales)
        self._history = self._seen.new_zeros(spec.precision.amax_history, *self._seen.shape)
        self._steps = 0
        """Steps that were noted; step s is in row s mod the length of the history."""
        places = {name: place for place, name in enumerate(names)}
        products.scalings = {
            unit.parameters[slot.key]: Scaling(self._scales[place], self._seen[place])
            for unit in states.units
            for slot in unit.slots
            if (place := places.get(slot.key)) is not None
        }

    def begin_step(self) -> None:
        """Note the largest numbers from here on, which those of a validation are not among."""
        self.products.noting = True

    def end_step(self, applied: bool) -> None:
        """Take the largest numbers of all ranks into the history, unless the step was skipped.

        Numbers that are not finite are left out, also of a history that has some by a fault of memory: no
        scale follows from them, and no later step could be applied.
        """
        _leave_out_bad(self._seen)
        start_all_reduce(self._seen, self._mesh.world, "amax").wait()
        if applied:
            self._history[self._steps % len(self._history)].copy_(self._seen)
            self._steps += 1
        if self._steps:
            _leave_out_bad(self._history)
            self._rescale()
        self._seen.zero_()
        self.products.noting = False

    def _rescale(self) -> None:
        largest = self._history.amax(0)  # rows that no step has filled yet are 0
        for place, role in enumerate(ROLES):
            if self.products.recipe == "nvfp4":
                roomy = (largest[:, place] * ROOM).clamp(max=torch.finfo(largest.dtype).max)
                scales = scale_of(roomy, E2M1.largest * E4M3.largest)
            else:
                scales = scale_of(largest[:, place], self.products.forms[role].largest)
            self._scales[:, place] = torch.where(largest[:, place] > 0, scales, 1.0)
        self.products.scaled = True

    def assume(self) -> None:
        """Take scales for known before any step, in a rehearsal."""
        self.products.scaled = True

    def tensors(self) -> tuple[torch.Tensor, ...]:
        """All that this rank holds."""
        return self._scales, self._seen, self._history

    def state(self) -> list[list[list[float]]]:
        """The history for a checkpoint: steps, oldest first, x matrices x operands."""
        length = len(self._history)
        steps = range(max(0, self._steps - length), self._steps)
        return [self._history[step % length].tolist() for step in steps]

    def restore(self, state: list[list[list[float]]]) -> None:
        """Continue from `state()`, of which the newest steps are kept."""
        kept = state[-len(self._history) :]
        self._history.zero_()
        for row, each in zip(self._history, kept, strict=False):
            row.copy_(torch.tensor(each))
        self._steps = len(kept)
        self.products.scaled = bool(state)
        if state:
            self._rescale()


def _leave_out_bad(largest: torch.Tensor) -> None:
    """Set what is not finite to 0, which stands for an operand that was not met."""
    largest.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)
