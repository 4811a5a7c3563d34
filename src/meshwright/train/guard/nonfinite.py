"""Where a number that is not finite came from: the first module, parameter and rank that had one.

A step that is not finite says little by itself: one infinity in a forward makes the loss and every gradient
NaN, and their sums carry it to all ranks. So the step is computed once more, with a check of each module's
output and of each gradient before it is summed. Findings of all ranks are put in the order in which a step
computes: forward by microbatch and layer, backward by microbatch and layer, then the sums over ranks.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from meshwright.data.loader import Batch
from meshwright.optim.optimiser import StateBuffer
from meshwright.train.guard.aside import aside
from meshwright.train.guard.trace import BACKWARD, FORWARD, Place, StepTracer
from meshwright.train.step import Trainer

_STATE, _SUMS = FORWARD - 1, BACKWARD + 1


@dataclass(frozen=True)
class Origin:
    """The first place with a number that is not finite, and the rank that had it."""

    what: str
    rank: int
    host: str

    def __str__(self) -> str:
        return f"{self.what} on rank {self.rank} ({self.host})"


def buffers(trainer: Trainer) -> Iterator[tuple[str, StateBuffer]]:
    """(prefix of names, flat buffer) of parameters, the optimiser's states and averages of this rank, but for
    the bytes of a quantised base."""
    for unit in (each for each in trainer.states.units if each.quantised is None):
        yield "", StateBuffer("", unit, unit.stored, unit.slots)
    for buffer in trainer.optimiser.buffers():
        yield f"{buffer.kind} of ", buffer
    for part in trainer.parts:
        for kind, unit, flat in part.averages():
            yield f"{kind} of ", StateBuffer(kind, unit, flat, unit.slots)


@torch.no_grad()
def bad_state(trainer: Trainer) -> str | None:
    """Name of a parameter, moment, average or router bias of this rank that is not finite, or None.

    One pass sums each buffer, since a sum is finite only if every term is; elements are looked at one by one
    only where a sum is not.
    """
    biases = {name: bias.to_local() for name, bias in trainer.balance.biases().items()}
    flats = [buffer.flat for _, buffer in buffers(trainer)]
    sums = [tensor.sum().double().to(trainer.mesh.device) for tensor in (*flats, *biases.values())]
    if not sums or bool(torch.stack(sums).isfinite().all()):
        return None
    for prefix, buffer in buffers(trainer):
        for slot in buffer.slots:
            if not _finite(buffer.local(slot)):
                return prefix + slot.key
    return next((name for name, bias in biases.items() if not _finite(bias)), None)


def locate(trainer: Trainer, batch: Batch, loss_scale: float) -> Origin | None:
    """Compute the gradients of `batch` again, and find where they first were not finite.

    `loss_scale` is the one that the step had. Returns None where everything was finite this time: a fault
    that passed. Every rank calls this between two steps, and all get the same.
    """
    with aside(trainer), _Search(trainer) as search:
        trainer.loss_scale.value = loss_scale
        search.state()
        trainer.gradients(batch)
        search.sums()
    control = trainer.mesh.control
    own = None
    if search.first is not None:
        place, what = search.first
        own = [list(place), what, control.rank, socket.gethostname()]
    found = [row for row in control.gather(own) if row is not None]
    first = control.broadcast(min(found) if found else None)
    return None if first is None else Origin(*first[1:])


class _Search(StepTracer):
    """Checks of a step's tensors; `first` is the earliest failure of this rank."""

    def __init__(self, trainer: Trainer) -> None:
        super().__init__(trainer)
        self.first: tuple[Place, str] | None = None

    def seen(self, what: str, tensor: Tensor, place: Place) -> None:
        """Check one tensor of the step."""
        if not _finite(tensor):
            self._note(place, what)

    def state(self) -> None:
        """Check what the rank stores."""
        name = bad_state(self._trainer)
        if name is not None:
            self._note((_STATE, 0, 0, 0), name)

    def sums(self) -> None:
        """Check the gradients that were summed over ranks."""
        for unit in self._trainer.states.trained:
            for slot in unit.slots:
                if not _finite(unit.gradient_of(slot)):
                    layer = self.layer(slot.key)
                    self._note((_SUMS, 0, -layer, 0), f"the sum over ranks of the gradient of {slot.key}")

    def _note(self, place: Place, what: str) -> None:
        if self.first is None or (place, what) < self.first:
            self.first = place, what


@torch.no_grad()  # a check must not count among the tensors that recomputation saves
def _finite(tensor: Tensor) -> bool:
    return bool(tensor.isfinite().all())
