"""Bounded staleness: gradients are summed over replicas while later steps run, and applied some steps late.

Splits        nothing; the ranks of a replica sum their gradients in the step itself (`data_parallel.py`).
Wire          for P parameters of a rank (P/n with ZeRO), R replicas, b bytes of an exact number: each step an
              all-reduce of 2 P b (R-1)/R over replicate, which has `staleness` steps of time.
Saves         the wait for that sum; costs `staleness` buffers of P exact numbers.

Step t computes gradients at its parameters, and applies those of step t - s, each with the normalising factor
of its own batch: SGD with a fixed delay (Langford et al. 2009, "Slow learners are fast"), the deterministic
case of stale synchronous parallelism (Ho et al. 2013). A run's first s steps apply none.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NotRequired

import torch
from torch import Tensor
from typing_extensions import TypedDict

from meshwright.comm.collectives import DONE, start_all_reduce
from meshwright.comm.traffic_counter import Pending
from meshwright.parallel.data_parallel import DataParallel
from meshwright.parallel.flat_param import Stored
from meshwright.parallel.step_part import StepPart
from meshwright.spec import RunSpec
from meshwright.spec.records import Positive
from meshwright.spec.sections import staleness_in


@dataclass
class _Sums:
    """The gradients of a step, which are being summed over replicas."""

    flats: list[Tensor]
    """Those of each unit, (P/n,)."""
    works: list[Pending]
    factor: float
    """Factor that makes gradients of them; see `Trainer.gradient_factor`."""

    def wait(self) -> None:
        """Return when the sums have come."""
        for work in self.works:
            work.wait()
        self.works = []


class DueGradients(StepPart):
    """The gradients that a step applies: by default those that it has computed."""

    steps = 0
    """How many steps late they are applied."""

    def exchange(self, factor: float) -> float | None:
        """Take a step's gradients, which need this `factor`, and put those that are due in their place.

        Returns the factor of these; None if none is due yet, and there are zeros.
        """
        return factor


class _Fields(TypedDict):
    """Fields of a checkpoint's state."""

    late_factors: NotRequired[list[Positive]]


class StaleGradients(DueGradients):
    """The gradients of one rank that are under way, the oldest first."""

    Fields = _Fields

    def __init__(self, states: DataParallel, steps: int) -> None:
        self._states, self.steps = states, steps
        self._under_way: deque[_Sums] = deque()

    @torch.no_grad()
    def exchange(self, factor: float) -> float | None:
        """Take a step's gradients, and put those of the step `steps` before in their place."""
        own = self._states.take_gradients()
        works = [start_all_reduce(flat, self._states.mesh.replicate) for flat in own]
        self._under_way.append(_Sums(own, works, factor))
        if len(self._under_way) <= self.steps:
            self._states.put_gradients([torch.zeros_like(flat) for flat in own])
            return None
        due = self._under_way.popleft()
        due.wait()
        self._states.put_gradients(due.flats)
        return due.factor

    # Checkpoints --------------------------------------------------------------------------------------

    def tensors(self) -> Iterator[tuple[str, Stored]]:
        """(`stale/0/name`, sum) of each parameter and step whose gradients are under way."""
        for place, sums in enumerate(self._under_way):
            sums.wait()
            for unit, flat in zip(self._states.trained, sums.flats, strict=True):
                yield from ((f"stale/{place}/{name}", each) for name, each in unit.tensors(flat))

    def form(self) -> object:
        """How many steps' gradients are under way."""
        return len(self._under_way)

    def state(self) -> dict[str, Any]:
        """The factors of gradients under way, as JSON."""
        return {"late_factors": [sums.factor for sums in self._under_way]}

    def expect(self, state: Mapping[str, Any]) -> None:
        """Make room for the gradients under way of a checkpoint of this `state`.

        They are dropped unless they are as late now.
        """
        late = staleness_in(state["spec"]) == self.steps
        exact = self._states.formats.exact
        self._under_way = deque(
            _Sums([torch.zeros_like(u.stored, dtype=exact) for u in self._states.trained], [DONE], factor)
            for factor in (state.get("late_factors", []) if late else [])
        )


def due_gradients(spec: RunSpec, states: DataParallel) -> DueGradients:
    """The gradients that steps of this run apply."""
    return StaleGradients(states, spec.staleness) if spec.staleness else DueGradients()
