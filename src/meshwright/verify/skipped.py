"""Steps whose gradients are not finite: they change no state on any rank, and lower a loss scale."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from meshwright.parallel.precision import LossScale
from meshwright.spec.precision import PrecisionSpec
from meshwright.train.guard.nonfinite import buffers
from meshwright.train.step import Trainer


class Unchanged:
    """A copy of all that a rank stores, taken before a step that must change none of it."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer, self._updates = trainer, trainer.optimiser.updates
        self._kept = {name: tensor.clone() for name, tensor in _stored(trainer)}

    def changes(self) -> list[str]:
        """Say what has changed, in the order in which it is stored."""
        own = [
            f"changed {name}"
            for name, tensor in _stored(self._trainer)
            if not torch.equal(self._kept[name], tensor)
        ]
        return own + ["changed the number of updates"] * (self._trainer.optimiser.updates != self._updates)


def _stored(trainer: Trainer) -> Iterator[tuple[str, Tensor]]:
    """This rank's stored parameters, moments, averages and routers' biases, by name."""
    for prefix, buffer in buffers(trainer):
        for slot in buffer.slots:
            yield prefix + slot.key, buffer.local(slot)
    for name, bias in trainer.balance.biases().items():
        yield name, bias.to_local()


@contextmanager
def infinite_gradient(trainer: Trainer) -> Iterator[None]:
    """Make the gradient of one norm, or other trained parameter, infinite on one rank, before it is summed.

    Tensor ranks may hold copies of it that are not summed, of which only the first one's counts. All ranks
    enter this.
    """
    control, counts = trainer.mesh.control, trainer.mesh.tensor.rank == 0
    trained = {
        name: parameter
        for name, parameter in trainer.decoder.named_parameters()
        if counts and parameter.requires_grad and parameter.device.type != "meta"
    }
    norms = [parameter for name, parameter in trained.items() if name.endswith("norm.weight")]
    own = norms or [*trained.values()]
    ranks = control.gather(bool(own))
    last = control.broadcast(max((rank for rank, has in enumerate(ranks) if has), default=0))
    if control.rank != last:
        yield
        return
    parameter = own[-1]

    def infinite(gradient: Tensor | None) -> Tensor | None:
        if gradient is not None:
            return torch.full_like(gradient, math.inf)
        added = trainer.states.gradient_sum(parameter)  # a product has added it where it is packed
        added.total.fill_(math.inf)
        return None

    handle = parameter.register_hook(infinite)
    try:
        yield
    finally:
        handle.remove()


def loss_scales(precision: PrecisionSpec) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The loss scales of steps that overflow and of others, by the step before, and those that are due: half
    as large after an overflow, and twice as large after a window of steps without one (Micikevicius et al.
    2018)."""
    scale, window = LossScale(precision), precision.loss_scale_window
    overflows = {window // 2, window // 2 + 1}
    found, wanted, due, good = {}, {}, float(precision.loss_scale), 0
    for step in range(2 * window + 2):
        scale.update(step not in overflows)
        good = 0 if step in overflows else good + 1
        due = max(1.0, due / 2) if step in overflows else due * 2 if good % window == 0 else due
        if step in overflows or good % window in (0, 1):
            name = f"step {step + 1}"
            found[name], wanted[name] = torch.tensor(scale.value), torch.tensor(due)
    return found, wanted
