"""An exponential moving average of the weights (Polyak & Juditsky 1992), sharded as they are.

After each update average <- decay x average + (1 - decay) x weights. It starts at the weights, those before
the first step or those of a checkpoint without an average, so it has no bias towards 0 to correct. It is
kept in the format of exact sums, also where weights are in bf16, whose gaps would swallow its steps.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor

from meshwright.parallel.data_parallel import DataParallel
from meshwright.parallel.flat_param import Stored
from meshwright.parallel.fsdp_unit import Unit
from meshwright.parallel.step_part import StepEnd, StepPart
from meshwright.spec import RunSpec

_CHUNK = 2**22
"""Elements that are converted at a time where weights are in another format."""


class Ema(StepPart):
    """The moving average of the trained parameters that a rank stores, one flat buffer for each unit."""

    component = "optimiser"

    def __init__(self, states: DataParallel, decay: float) -> None:
        self.states, self.decay = states, decay
        exact = states.formats.exact
        self.flats = [torch.zeros_like(unit.stored, dtype=exact) for unit in states.trained]

    @torch.no_grad()
    def begin(self) -> None:
        """Set the average to the weights."""
        for flat, unit in zip(self.flats, self.states.trained, strict=True):
            flat.copy_(unit.stored)

    @torch.no_grad()
    def after_update(self, end: StepEnd) -> None:
        """Move the average towards the weights, where these were updated."""
        if not end.updated:
            return
        for flat, unit in zip(self.flats, self.states.trained, strict=True):
            for average, weights in zip(flat.split(_CHUNK), unit.stored.split(_CHUNK), strict=True):
                average.lerp_(weights.to(average.dtype), 1 - self.decay)

    def tensors(self) -> Iterator[tuple[str, Stored]]:
        """(`ema/name`, average) of each parameter, in this object's memory."""
        for _, unit, flat in self.averages():
            yield from ((f"ema/{name}", average) for name, average in unit.tensors(flat))

    def missing(self, state: Mapping[str, Any]) -> tuple[str, ...]:
        """Beginnings of names that a checkpoint of this state lacks: a run without an average has none."""
        return () if has_average(state) else ("ema/",)

    def restore(self, state: Mapping[str, Any]) -> None:
        """Begin with the weights of a checkpoint that has no average."""
        if not has_average(state):
            self.begin()

    def models(self) -> Iterator[tuple[str, AbstractContextManager[None]]]:
        """The average, which is evaluated beside the weights."""
        yield "ema", self.in_place_of_weights()

    def averages(self) -> Iterator[tuple[str, Unit, Tensor]]:
        """("ema", unit, flat buffer) of all units."""
        for unit, flat in zip(self.states.trained, self.flats, strict=True):
            yield "ema", unit, flat

    def held(self) -> Iterator[tuple[Unit | None, Tensor]]:
        """The buffers of all units."""
        return ((unit, flat) for _, unit, flat in self.averages())

    @contextmanager
    def in_place_of_weights(self) -> Iterator[None]:
        """Compute with the average; the weights come back at the end.

        Between two steps only: a copy of the weights takes the room that gradients have left.
        """
        units = self.states.trained
        kept = [unit.stored.clone() for unit in units]
        try:
            self._store(self.flats)
            yield
        finally:
            self._store(kept)

    @torch.no_grad()
    def _store(self, flats: list[torch.Tensor]) -> None:
        for unit, flat in zip(self.states.trained, flats, strict=True):
            unit.expire()
            unit.stored.copy_(flat)


def has_average(state: Mapping[str, Any]) -> bool:
    """True if a checkpoint of this state has a moving average of the weights."""
    return state["spec"]["train"].get("ema") is not None


def ema_of(spec: RunSpec, states: DataParallel) -> list[Ema]:
    """The average that a run keeps, if it keeps one."""
    return [] if spec.train.ema is None else [Ema(states, spec.train.ema)]
