"""Computation of the same batch by several replicas, which tells faulty arithmetic from faulty memory.

When two replicas differ, no vote says which one is wrong. So both take the state and the samples of one, and
compute forward and backward twice. Kernels are deterministic, so a rank that differs from itself is at fault
(defective cores mostly err now and then: Hochschild et al. 2021). Where only the replicas differ from each
other, one of them errs always; where all is equal, memory had changed, or the error did not come again.
"""

from __future__ import annotations

import socket
from dataclasses import dataclass

import torch
from torch import Tensor

from meshwright.comm.checksum import checksum
from meshwright.comm.collectives import gather_rows, start_broadcast
from meshwright.comm.mesh import Axis, Mesh
from meshwright.data.loader import TENSORS, Batch
from meshwright.train.guard.aside import aside
from meshwright.train.guard.trace import FORWARD, Place, StepTracer
from meshwright.train.step import Trainer


@dataclass(frozen=True)
class Miscomputation:
    """The first tensor that came out otherwise, and the ranks that may be at fault.

    `unsteady` says that these ranks differed from themselves.
    """

    what: str
    ranks: list[int]
    hosts: list[str]
    unsteady: bool

    def __str__(self) -> str:
        named = ", ".join(f"{rank} ({host})" for rank, host in zip(self.ranks, self.hosts, strict=True))
        how = "otherwise each time" if self.unsteady else "in different ways"
        return f"rank{'s' * (len(self.ranks) > 1)} {named} computed {self.what} {how} from the same numbers"


def replicas(mesh: Mesh) -> Axis | None:
    """The ranks that can compute the same: those that hold the same states and whole samples, if several."""
    axis = mesh.replicate
    if axis.size == 1 and mesh.layout.zero == 0 and mesh.layout.cp == 1:
        axis = mesh.shard
    return axis if axis.size > 1 else None


def replay(trainer: Trainer, batch: Batch, axis: Axis) -> Miscomputation | None:
    """Compute forward and backward of the first replica's batch twice on every replica, and compare.

    The states of all replicas become those of the first. Returns None where everything is equal. Every rank
    calls this between two steps with its `replicas`, and all get the same.
    """
    for unit in trainer.states.units:
        start_broadcast(unit.stored, 0, unit.replicas).wait()
        unit.expire()
    for bias in trainer.balance.biases().values():
        start_broadcast(bias.to_local(), 0, axis).wait()
    common = Batch(*(_from_first(getattr(batch, name), axis) for name in TENSORS))
    first, again = (_recorded(trainer, common) for _ in range(2))
    sums = torch.stack(first.sums)
    everywhere = gather_rows(sums, axis)
    unsteady, unequal = sums != torch.stack(again.sums), (everywhere != everywhere[0]).any(0)
    control = trainer.mesh.control
    listed = control.gather([socket.gethostname(), first.earliest(unsteady), first.earliest(unequal)])
    found = None
    for kind in (1, 2):
        failures = [(row[kind], rank, row[0]) for rank, row in enumerate(listed) if row[kind] is not None]
        if failures:
            # Other ranks of the replica have its error later in the order of the step.
            (place, what), _, _ = min(failures)
            guilty = [(rank, host) for (its_place, _), rank, host in failures if its_place == place]
            found = [what, [rank for rank, _ in guilty], [host for _, host in guilty], kind == 1]
            break
    message = control.broadcast(found)
    return None if message is None else Miscomputation(*message)


def _recorded(trainer: Trainer, batch: Batch) -> _Recorder:
    """Checksums of the tensors of a forward and backward."""
    with aside(trainer), _Recorder(trainer) as recorder:
        trainer.gradients(batch)
    return recorder


class _Recorder(StepTracer):
    """Checksums of a step's tensors, in the order of their computation."""

    def __init__(self, trainer: Trainer) -> None:
        super().__init__(trainer)
        self.sums = [torch.zeros((), dtype=torch.int64, device=trainer.mesh.device)]
        """The first is of nothing: a rank without a layer has that alone."""
        self._places: list[tuple[Place, str]] = [((0, 0, 0, 0), "nothing")]

    def seen(self, what: str, tensor: Tensor, place: Place) -> None:
        """Take down a tensor's checksum; on CUDA of forwards only, as some backwards add in any order."""
        if place[0] == FORWARD or tensor.device.type == "cpu":
            self._places.append((place, f"{what} in microbatch {place[1]}"))
            self.sums.append(checksum(tensor.contiguous().view(-1)))

    def earliest(self, flags: Tensor) -> list[object] | None:
        """[place, description] of the first flagged tensor in the order of a step; None without any."""
        flagged = [self._places[number] for number in flags.nonzero().flatten().tolist()]
        return [list(min(flagged)[0]), min(flagged)[1]] if flagged else None


def _from_first(tensor: Tensor, axis: Axis) -> Tensor:
    """The tensor of the axis's first rank, on every rank."""
    moved = tensor.to(axis.device).contiguous()
    start_broadcast(moved, 0, axis).wait()
    return moved.to(tensor.device)
