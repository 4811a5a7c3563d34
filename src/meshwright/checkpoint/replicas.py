"""Ranks that hold the same part of a tensor: how they share the work on it, and give it to each other.

Those ranks differ in the replicated dims of the tensor's mesh only, which each of them knows without asking.
Each writes an equal share of the bytes; on a load each reads an equal share and broadcasts it, so the disk is
read once.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

from meshwright.comm.collectives import start_broadcast
from meshwright.comm.mesh import Axis
from meshwright.comm.traffic_counter import TrafficCounter
from meshwright.parallel.flat_param import UnpaddedDTensor

T = TypeVar("T")


def deal(sizes: Sequence[int], count: int) -> list[int]:
    """Return which of `count` ranks takes each item: consecutive items, about as many bytes for each rank."""
    total = max(1, sum(sizes))
    return [(end - size) * count // total for size, end in zip(sizes, accumulate(sizes), strict=True)]


@dataclass(frozen=True)
class Replicas:
    """The ranks that hold the local part of a tensor that this rank holds.

    `mesh` is the tensor's; None for a plain tensor, which each rank has for itself. `dims` are the mesh's
    replicated dims of more than one rank. Only ranks in `among` count, by default all.
    """

    mesh: DeviceMesh | None
    dims: tuple[int, ...]
    among: range | None = None

    @classmethod
    def of(cls, tensor: Tensor | UnpaddedDTensor, among: range | None = None) -> Replicas | None:
        """Return the replicas of a tensor's local part; None on a rank outside the tensor's mesh."""
        tensor = tensor.padded if isinstance(tensor, UnpaddedDTensor) else tensor
        if not isinstance(tensor, DTensor):
            return cls(None, (), among)
        mesh = tensor.device_mesh
        if mesh.get_coordinate() is None:
            return None
        dims = [dim for dim, placement in enumerate(tensor.placements) if isinstance(placement, Replicate)]
        return cls(mesh, tuple(dim for dim in dims if mesh.size(dim) > 1), among)

    @property
    def sizes(self) -> list[int]:
        """Ranks along each of `dims`."""
        return [self.mesh.size(dim) for dim in self.dims] if self.mesh is not None else []

    @property
    def count(self) -> int:
        """Number of ranks that hold the part, this one included."""
        return math.prod(self.sizes) if self.among is None else len(self._near())

    @property
    def index(self) -> int:
        """Number of this rank among them, in [0, count)."""
        place = int(np.ravel_multi_index(self._places(), self.sizes)) if self.dims else 0
        return place if self.among is None else self._near().index(place)

    def first(self, rank: int) -> int:
        """Return the first rank of the tensor's mesh; `rank` for a plain tensor."""
        if self.mesh is None:
            return rank
        ranks = self.mesh.mesh.flatten().tolist()
        return int(ranks[0] if self.among is None else min(set(ranks) & set(self.among)))

    def _near(self) -> list[int]:
        """Return the places of the ranks in `among`, counted over all ranks that hold the part."""
        if self.mesh is None:
            return [0]
        assert self.among is not None
        coordinate = self.mesh.get_coordinate()
        assert coordinate is not None
        holders = self.mesh.mesh[
            tuple(slice(None) if dim in self.dims else c for dim, c in enumerate(coordinate))
        ]
        return [place for place, rank in enumerate(holders.flatten().tolist()) if rank in self.among]

    def broadcast(self, local: Tensor, source: int, wire: TrafficCounter) -> None:
        """Give `local` of replica `source` to all of them, in place; each of them calls this.

        One dim of the mesh after the other: first along the line of ranks that goes through the source, then
        from all that have it by then.
        """
        if self.mesh is None or not self.dims or not local.numel():
            return
        places = self._places()
        origin = list(map(int, np.unravel_index(source, self.sizes)))
        whole = local.contiguous()
        if local.device.type != self.mesh.device_type:  # moments that are offloaded
            whole = whole.to(self.mesh.device_type)
        sent = whole.view(-1).view(torch.uint8)  # backends do not know every dtype
        names = self.mesh.mesh_dim_names
        for step, dim in enumerate(self.dims):
            if places[step + 1 :] == origin[step + 1 :]:
                name, rank, group = names[dim] if names else "storage", places[step], self.mesh.get_group(dim)
                axis = Axis(name, self.mesh.size(dim), rank, group, sent.device, wire)
                start_broadcast(sent, origin[step], axis).wait()
        if whole is not local:
            local.copy_(whole)

    def _places(self) -> list[int]:
        """Return this rank's place along each of `dims`."""
        return [self.mesh.get_local_rank(dim) for dim in self.dims] if self.mesh is not None else []


def assign(items: Iterable[tuple[T, int, Replicas]]) -> Iterator[tuple[T, Replicas, int]]:
    """Yield (item, replicas, the one of them that works on it) for items of so many bytes.

    Replicas share the items that they all hold evenly (`deal`).
    """
    groups: dict[Replicas, list[tuple[T, int]]] = defaultdict(list)
    for item, size, replicas in items:
        groups[replicas].append((item, size))
    for replicas, group in groups.items():
        workers = deal([size for _, size in group], replicas.count)
        for (item, _), worker in zip(group, workers, strict=True):
            yield item, replicas, worker
