"""Where a number that is not finite came from: the first module, parameter and rank that had one.

A step that is not finite says little by itself: one infinity in a forward makes the loss and every gradient
NaN, and their sums carry it to all ranks. So the step is computed once more, with a check of each module's
output and of each gradient before it is summed. Findings of all ranks are put in the order in which a step
computes: forward by microbatch and layer, backward by microbatch and layer, then the sums over ranks.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from meshwright.data.loader import Batch
from meshwright.parallel.fsdp_unit import Unit
from meshwright.parallel.pipeline_parallel import ActionHook
from meshwright.schedule import Action, Kind
from meshwright.train.step import Trainer

Place = tuple[int, int, int, int]
"""Phase, microbatch, layer in the order of the phase, check within them: sorts by when a step computes it."""
_STATE, _FORWARD, _BACKWARD, _SUMS = range(4)


@dataclass(frozen=True)
class Origin:
    """The first place with a number that is not finite, and the rank that had it."""

    what: str
    rank: int
    host: str

    def __str__(self) -> str:
        return f"{self.what} on rank {self.rank} ({self.host})"


def buffers(trainer: Trainer) -> Iterator[tuple[str, Unit, Tensor]]:
    """(prefix of names, unit, flat buffer) of parameters and moments that this rank stores."""
    for index, unit in enumerate(trainer.states.units):
        yield "", unit, unit.stored
        for moment, flats in trainer.optimiser.moments.items():
            yield f"{moment} of ", unit, flats[index]


@torch.no_grad()
def bad_state(trainer: Trainer) -> str | None:
    """Name of a parameter, moment or router bias of this rank that is not finite; None where all are.

    One pass sums each buffer, since a sum is finite only if every term is; elements are looked at one by one
    only where a sum is not.
    """
    biases = {name: bias.to_local() for name, bias in trainer.balance.biases().items()}
    flats = [flat for _, _, flat in buffers(trainer)]
    sums = [tensor.sum().double() for tensor in (*flats, *biases.values())]
    if not sums or bool(torch.stack(sums).isfinite().all()):
        return None
    for prefix, unit, flat in buffers(trainer):
        for slot in unit.slots:
            if not _finite(unit.local(flat, slot)):
                return prefix + slot.key
    return next((name for name, bias in biases.items() if not _finite(bias)), None)


def locate(trainer: Trainer, batch: Batch, loss_scale: float) -> Origin | None:
    """Compute the gradients of `batch` again, and find where they first were not finite.

    `loss_scale` is the one that the step had. Returns None where everything was finite this time: a fault
    that passed. Every rank calls this between two steps, and all get the same.
    """
    counts, scale = trainer.balance.counts, trainer.loss_scale
    kept_counts, kept_scale = None if counts is None else counts.clone(), scale.value
    scale.value = loss_scale
    with _Search(trainer) as search:
        search.state()
        trainer.gradients(batch)
        search.sums()
    trainer.states.end_step()
    scale.value = kept_scale
    if counts is not None and kept_counts is not None:
        counts.copy_(kept_counts)
    control = trainer.mesh.control
    own = None
    if search.first is not None:
        place, what = search.first
        own = [list(place), what, control.rank, socket.gethostname()]
    found = [row for row in control.gather(own) if row is not None]
    first = control.broadcast(min(found) if found else None)
    return None if first is None else Origin(*first[1:])


class _Search(ActionHook):
    """Checks of a step's tensors while it is computed; `first` is the earliest failure of this rank."""

    def __init__(self, trainer: Trainer) -> None:
        self.first: tuple[Place, str] | None = None
        self._trainer = trainer
        self._action: Action | None = None
        self._checks = 0
        self._stack = ExitStack()

    def __enter__(self) -> _Search:
        pipeline, decoder = self._trainer.pipeline, self._trainer.decoder
        watch, take = pipeline.watch, pipeline.take
        names = {parameter: name for name, parameter in decoder.named_parameters()}

        def taken(parameter: nn.Parameter, gradient: Tensor) -> None:
            self._gradient(f"the gradient of {names[parameter]}", gradient)
            take(parameter, gradient)

        pipeline.watch, pipeline.take = self, taken
        self._stack.callback(lambda: vars(pipeline).update(watch=watch, take=take))
        for name, module in decoder.named_modules():
            # What is inside a compiled block has no hooks.
            inner = name not in ("embed", "head") and not name.removeprefix("blocks.").isdecimal()
            if name not in ("", "blocks") and not (inner and self._trainer.spec.train.compile):
                handle = module.register_forward_hook(partial(self._output, name))
                self._stack.callback(handle.remove)
        for parameter, name in names.items():
            if parameter.device.type != "meta":
                check = partial(self._gradient, f"the gradient of {name}")
                self._stack.callback(parameter.register_hook(check).remove)
        return self

    def __exit__(self, *_error: object) -> None:
        self._stack.close()

    def before(self, action: Action) -> None:
        """Note which microbatch the next checks are of."""
        self._action = action

    def state(self) -> None:
        """Check what the rank stores."""
        name = bad_state(self._trainer)
        if name is not None:
            self._note((_STATE, 0, 0, 0), name)

    def sums(self) -> None:
        """Check the gradients that were summed over ranks."""
        for unit in self._trainer.states.units:
            for slot in unit.slots:
                if not _finite(unit.gradient_of(slot)):
                    layer = self._layer(slot.key)
                    self._note((_SUMS, 0, -layer, 0), f"the sum over ranks of the gradient of {slot.key}")

    def _output(self, name: str, _module: nn.Module, _inputs: Any, output: Any) -> None:
        action = self._action
        if not isinstance(output, Tensor) or action is None or action.kind is not Kind.F:
            return  # no tensor, or a forward that is recomputed in the backward
        self._checks += 1
        if not _finite(output):
            self._note(
                (_FORWARD, action.microbatch, self._layer(name), self._checks), f"the output of {name}"
            )
        if output.requires_grad:
            output.register_hook(partial(self._gradient, f"the gradient at the output of {name}"))

    def _gradient(self, what: str, gradient: Tensor | None) -> None:
        assert self._action is not None
        self._checks += 1
        if gradient is not None and not _finite(gradient):  # none of a weight whose gradient is deferred
            layer = self._layer(what.rpartition(" ")[2])
            self._note((_BACKWARD, self._action.microbatch, -layer, self._checks), what)

    def _layer(self, name: str) -> int:
        """0 for the embedding, then the blocks from 1, then the head."""
        if name.startswith("blocks."):
            return int(name.split(".")[1]) + 1
        return 0 if name.startswith("embed") else self._trainer.spec.model.layers + 1

    def _note(self, place: Place, what: str) -> None:
        if self.first is None or (place, what) < self.first:
            self.first = place, what


@torch.no_grad()  # a check must not count among the tensors that recomputation saves
def _finite(tensor: Tensor) -> bool:
    return bool(tensor.isfinite().all())
