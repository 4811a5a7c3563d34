"""Comparison of what several ranks hold alike: states of replicas, and copies on tensor ranks.

Replicas compute the same numbers from the same sums, so their states are equal to the bit. One that is not
shows a fault of memory or of arithmetic that raised no error (silent data corruption: Dixit et al. 2021;
Hochschild et al. 2021). What no other rank holds, such as ZeRO's shards without `replicate`, is not compared.

Wire          8 bytes for each buffer of each unit, all-gathered over the ranks that hold the same; then one
              sum of one number over all ranks. After a difference also 8 bytes for each parameter of the
              buffer.
"""

from __future__ import annotations

import socket
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from meshwright.comm.checksum import checksum
from meshwright.comm.collectives import gather_rows, start_all_reduce
from meshwright.comm.mesh import Axis, Mesh
from meshwright.optim.optimiser import StateBuffer
from meshwright.parallel.flat_param import ParamSlot
from meshwright.train.guard.nonfinite import buffers
from meshwright.train.step import Trainer


@dataclass(frozen=True)
class Divergence:
    """A tensor that differs between ranks which must hold it alike.

    `ranks` are those that have another value than most, or all of them where none is in the majority.
    """

    tensor: str
    ranks: list[int]
    hosts: list[str]
    replicas: int

    @property
    def certain(self) -> bool:
        """True if a majority of the ranks agrees, so that the others are wrong."""
        return len(self.ranks) < self.replicas

    def __str__(self) -> str:
        named = ", ".join(f"{rank} ({host})" for rank, host in zip(self.ranks, self.hosts, strict=True))
        if self.certain:
            return f"{self.tensor} on rank {named} differs from its copies on other ranks"
        return f"{self.tensor} differs between its copies on ranks {named}"


@dataclass(frozen=True)
class _Copies:
    """Tensors that all ranks of an axis hold alike.

    `parts` are the (name, flat tensor) of each parameter, `flats` the same elements, in few tensors.
    """

    axis: Axis
    parts: Sequence[tuple[str, Tensor]]
    flats: Sequence[Tensor]


class Vote:
    """The comparisons that one rank takes part in; every rank calls it together.

    They are those of the ranks that step together, and `between_groups` those of what such groups have agreed
    on, which takes all ranks of the run.
    """

    def __init__(self, trainer: Trainer, *, between_groups: bool = False) -> None:
        self._trainer, self._between = trainer, between_groups
        self._mesh = trainer.run_mesh if between_groups else trainer.mesh

    def __call__(self) -> Divergence | None:
        """Compare everything over all ranks: the first difference, or None; every rank gets the same."""
        tables = [self._gathered(_sums(group), group[0].axis) for group in self._groups]
        count = torch.zeros((), dtype=torch.float64, device=self._mesh.device)
        for table in tables:
            count += (table[:, 1:] != table[0, 1:]).any()
        start_all_reduce(count, self._mesh.world, "scalars").wait()
        return self._named(tables) if float(count) else None

    @cached_property
    def _groups(self) -> list[list[_Copies]]:
        """This rank's comparisons by axis; ranks that share an axis come to it in the same order."""
        mesh = self._mesh
        sharing = mesh.tensor, mesh.copies, mesh.expert_tensor
        axes = (mesh.replicate, mesh.shard, mesh.expert_data, *sharing, mesh.ends)
        groups: dict[int, list[_Copies]] = {id(axis): [] for axis in axes}
        for copies in (_agreed_copies if self._between else _all_copies)(self._trainer):
            if copies.axis.size > 1 and copies.flats:
                groups[id(copies.axis)].append(copies)
        return [group for group in groups.values() if group]

    def _gathered(self, sums: list[Tensor], axis: Axis) -> Tensor:
        """For each rank of an axis its number in the world, then its sums: (n, 1 + k)."""
        own = torch.full_like(sums[0], self._mesh.rank)
        return gather_rows(torch.stack([own, *sums]), axis)

    def _named(self, tables: list[Tensor]) -> Divergence:
        """The first tensor that differs, and the ranks to blame: those whom all of its comparisons name."""
        rows = []
        for group, table in zip(self._groups, tables, strict=True):
            for copies, column in zip(group, table[:, 1:].T.tolist(), strict=True):
                if len(set(column)) > 1:
                    rows.append(self._parameter(copies))
                    break  # the others of this axis would tell the same
        control = self._mesh.control
        listed = control.gather([socket.gethostname(), rows])
        found = [row for _, rows in listed for row in rows]
        if found:
            negative, name, ranks = min(found)
            common = set(ranks).intersection(*(row[2] for row in found if row[1] == name)) or set(ranks)
            message = [name, sorted(common), [listed[rank][0] for rank in sorted(common)], -negative]
        name, ranks, hosts, copies = control.broadcast(message if found else None)
        return Divergence(name, [self._mesh.numbers[rank] for rank in ranks], hosts, copies)

    def _parameter(self, copies: _Copies) -> list[object]:
        """[- number of copies, name, ranks to blame] of the first parameter that differs."""
        table = self._gathered([checksum(part) for _, part in copies.parts], copies.axis)
        ranks = table[:, 0].tolist()
        for (name, _), column in zip(copies.parts, table[:, 1:].T.tolist(), strict=True):
            if len(set(column)) > 1:
                (value, votes), *_ = Counter(column).most_common(1)
                wrong = [rank for rank, own in zip(ranks, column, strict=True) if own != value]
                return [-len(ranks), name, wrong if 2 * votes > len(ranks) else ranks]
        return [-len(ranks), f"a unit with {copies.parts[0][0]}", ranks]  # it differed, and does no more


def _sums(group: list[_Copies]) -> list[Tensor]:
    return [
        torch.stack([checksum(flat).to(copies.axis.device) for flat in copies.flats]).sum()
        for copies in group
    ]


def _all_copies(trainer: Trainer) -> Iterator[_Copies]:
    """Every tensor of this rank and an axis over which it is equal, in the order of units."""
    mesh, states = trainer.mesh, trainer.states
    for prefix, buffer in buffers(trainer):
        parts = [(prefix + slot.key, buffer.part(slot)) for slot in buffer.slots]
        yield _Copies(buffer.unit.replicas, parts, [buffer.flat] if parts else [])
        for axis in (mesh.tensor, mesh.copies, mesh.expert_tensor):
            slots = zip(parts, buffer.slots, strict=True)
            same = [part for part, slot in slots if _ranks_alike(slot, mesh) is axis]
            yield _Copies(axis, same, [tensor for _, tensor in same])
        if mesh.ends is not None and states.apart is not None:
            same = [part for part, slot in zip(parts, buffer.slots, strict=True) if slot.key == states.apart]
            yield _Copies(mesh.ends, same, [tensor for _, tensor in same])
    for name, bias in trainer.balance.biases().items():
        for axis in (mesh.shard, mesh.replicate, mesh.tensor):
            yield _Copies(axis, [(name, bias.to_local())], [bias.to_local()])


def _agreed_copies(trainer: Trainer) -> Iterator[_Copies]:
    """Tensors of this rank that are alike on all replicas of the run, though these step apart."""
    for words, unit, flat in (each for part in trainer.parts for each in part.agreed()):
        parts = [(words, flat)]
        if unit is not None:
            buffer = StateBuffer("", unit, flat, unit.slots)
            parts = [(words + slot.key, buffer.part(slot)) for slot in buffer.slots]
        yield _Copies(trainer.run_mesh.replicate, parts, [flat] if parts else [])


def _ranks_alike(slot: ParamSlot, mesh: Mesh) -> Axis | None:
    """The tensor ranks that hold a parameter's piece alike to the bit, if there are several."""
    piece = slot.piece
    # Some kernels of CUDA add in any order: gradients that each rank computes for itself may differ there.
    if piece.copies == 1 or (mesh.device.type == "cuda" and not piece.summed):
        return None
    return mesh.alike(piece)
