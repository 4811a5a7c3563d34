"""Delayed scaling: scales of whole tensors follow from the largest numbers of the steps before.

Splits nothing. A tensor of which ranks hold parts has one scale, and none of them waits for its largest
number before a product (Micikevicius et al. 2022; Transformer Engine). In the first step no scale is known,
and products are in the format of their operands.
Wire          once a step the largest numbers of 3 operands of each matrix, 4 bytes each, over all ranks.
Saves         a message before each product.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NotRequired

import torch
from torch import Tensor
from typing_extensions import TypedDict

from meshwright.comm.collectives import start_all_reduce
from meshwright.comm.mesh import Mesh
from meshwright.kernels.low_precision import E2M1, E4M3, ROOM, scale_of
from meshwright.model.low_precision_linear import ROLES, LowPrecision, Products, Scaling
from meshwright.parallel.data_parallel import DataParallel
from meshwright.parallel.fsdp_unit import Unit
from meshwright.parallel.step_part import StepBegin, StepEnd, StepPart
from meshwright.spec import RunSpec
from meshwright.spec.low_precision_rules import rounded_parameters
from meshwright.spec.precision import DELAYED
from meshwright.spec.records import Number


class _Fields(TypedDict):
    """Fields of a checkpoint's state."""

    amax_history: NotRequired[list[list[list[Number]]]]


class DelayedScaling(StepPart):
    """The history of largest numbers, and the scales that follow, of the matrices of all stages."""

    component = "scaling"
    Fields = _Fields

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

    def begin_step(self, begin: StepBegin) -> None:
        """Note the largest numbers from here on, which those of a validation are not among."""
        self.products.noting = True

    def constants(self) -> bool:
        """True if scales are known, without which products are not rounded."""
        return self.products.scaled

    def retract(self) -> None:
        """Forget the step's largest numbers."""
        self._seen.zero_()

    def after_update(self, end: StepEnd) -> None:
        """Take the largest numbers of all ranks into the history, unless the step was skipped.

        Numbers that are not finite are left out, also of a history that has some by a fault of memory: no
        scale follows from them, and no later step could be applied.
        """
        _leave_out_bad(self._seen)
        start_all_reduce(self._seen, self._mesh.world, "amax").wait()
        if end.finite:
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

    def assume(self, number: int) -> None:
        """Take scales for known, as they are after the first step: for dry runs."""
        self.products.scaled = True

    def held(self) -> Iterator[tuple[Unit | None, Tensor]]:
        """All tensors that this rank holds."""
        return ((None, tensor) for tensor in self._tensors)

    def of_gradients(self) -> tuple[list[object], list[Tensor]]:
        """The largest numbers: they are noted while gradients are computed."""
        return [self, self.products], self._tensors

    @property
    def _tensors(self) -> list[Tensor]:
        return [self._scales, self._seen, self._history]

    def state(self) -> dict[str, Any]:
        """The history for a checkpoint: steps, oldest first, x matrices x operands."""
        length = len(self._history)
        steps = range(max(0, self._steps - length), self._steps)
        return {"amax_history": [self._history[step % length].tolist() for step in steps]}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from `state()`, of which the newest steps are kept; without one no scale is known."""
        saved = state.get("amax_history", [])
        kept = saved[-len(self._history) :]
        self._history.zero_()
        for row, each in zip(self._history, kept, strict=False):
            row.copy_(torch.tensor(each))
        self._steps = len(kept)
        self.products.scaled = bool(saved)
        if saved:
            self._rescale()


def _leave_out_bad(largest: torch.Tensor) -> None:
    """Set what is not finite to 0, which stands for an operand that was not met."""
    largest.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)


def delayed_scaling_of(
    spec: RunSpec, mesh: Mesh, states: DataParallel, products: Products
) -> list[DelayedScaling]:
    """The scaling of a run's products, if it is delayed."""
    if spec.precision.compute in DELAYED and isinstance(products, LowPrecision):
        return [DelayedScaling(spec, mesh, states, products)]
    return []
