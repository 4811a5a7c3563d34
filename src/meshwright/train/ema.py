"""An exponential moving average of the weights (Polyak & Juditsky 1992), sharded as they are.

After each update average <- decay x average + (1 - decay) x weights. It starts at the weights, those before
the first step or those of a checkpoint without an average, so it has no bias towards 0 to correct. It is
kept in the format of exact sums, also where weights are in bf16, whose gaps would swallow its steps.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from meshwright.parallel.data_parallel import DataParallel
from meshwright.parallel.flat_param import Stored

_CHUNK = 2**22
"""Elements that are converted at a time where weights are in another format."""


class Ema:
    """The moving average of the parameters that a rank stores, one flat buffer for each unit."""

    def __init__(self, states: DataParallel, decay: float) -> None:
        self.states, self.decay = states, decay
        exact = states.formats.exact
        self.flats = [torch.zeros_like(unit.stored, dtype=exact) for unit in states.units]

    @torch.no_grad()
    def begin(self) -> None:
        """Set the average to the weights."""
        for flat, unit in zip(self.flats, self.states.units, strict=True):
            flat.copy_(unit.stored)

    @torch.no_grad()
    def update(self) -> None:
        """Move the average towards the weights; called after each update of these."""
        for flat, unit in zip(self.flats, self.states.units, strict=True):
            for average, weights in zip(flat.split(_CHUNK), unit.stored.split(_CHUNK), strict=True):
                average.lerp_(weights.to(average.dtype), 1 - self.decay)

    def tensors(self) -> Iterator[tuple[str, Stored]]:
        """(name, average) of each parameter, in this object's memory."""
        for unit, flat in zip(self.states.units, self.flats, strict=True):
            yield from unit.tensors(flat)

    @contextmanager
    def in_place_of_weights(self) -> Iterator[None]:
        """Compute with the average; the weights come back at the end.

        Between two steps only: a copy of the weights takes the room that gradients have left.
        """
        units = self.states.units
        kept = [unit.stored.clone() for unit in units]
        try:
            self._store(self.flats)
            yield
        finally:
            self._store(kept)

    @torch.no_grad()
    def _store(self, flats: list[torch.Tensor]) -> None:
        for unit, flat in zip(self.states.units, flats, strict=True):
            unit.expire()
            unit.stored.copy_(flat)

    def memory(self) -> int:
        """Bytes of the average that this rank holds."""
        return sum(flat.untyped_storage().nbytes() for flat in self.flats)
