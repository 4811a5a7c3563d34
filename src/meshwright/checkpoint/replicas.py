"""Ranks that hold the same part of a tensor: how they share the work on it, and give it to each other.

They are those that differ in the replicated dims of the tensor's mesh only, which each of them knows without
asking. Each writes an equal share of the bytes; on a load each reads an equal share and broadcasts it, so the
disk is read once.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

from meshwright.parallel.collectives import start_broadcast
from meshwright.parallel.flat_param import UnpaddedDTensor
from meshwright.parallel.mesh import Axis, TrafficCounter


def deal(sizes: Sequence[int], count: int) -> list[int]:
    """Which of `count` ranks takes each item: consecutive ones, about as many bytes for each rank."""
    total = max(1, sum(sizes))
    return [(end - size) * count // total for size, end in zip(sizes, accumulate(sizes), strict=True)]


@dataclass(frozen=True)
class Replicas:
    """The ranks that hold what this one holds of a tensor, from its place in the tensor's mesh."""

    mesh: DeviceMesh | None
    """None of a plain tensor, which each rank has for itself."""
    dims: tuple[int, ...]
    """The replicated dims of the mesh, those of one rank left out."""

    @classmethod
    def of(cls, tensor: Tensor | UnpaddedDTensor) -> Replicas | None:
        """The replicas of a tensor's local part; None on a rank outside the tensor's mesh."""
        tensor = tensor.padded if isinstance(tensor, UnpaddedDTensor) else tensor
        if not isinstance(tensor, DTensor):
            return cls(None, ())
        mesh = tensor.device_mesh
        if mesh.get_coordinate() is None:
            return None
        placed = enumerate(tensor.placements)
        dims = [dim for dim, each in placed if isinstance(each, Replicate) and mesh.size(dim) > 1]
        return cls(mesh, tuple(dims))

    @property
    def sizes(self) -> list[int]:
        """Ranks along each of `dims`."""
        return [self.mesh.size(dim) for dim in self.dims] if self.mesh is not None else []

    @property
    def count(self) -> int:
        """How many ranks hold the part, this one included."""
        return math.prod(self.sizes)

    @property
    def index(self) -> int:
        """Which of them this rank is."""
        found = 0
        for size, place in zip(self.sizes, self._places(), strict=True):
            found = found * size + place
        return found

    def first(self, rank: int) -> int:
        """The first rank of the tensor's mesh; `rank` of a plain tensor."""
        return rank if self.mesh is None else int(self.mesh.mesh.view(-1)[0])

    def broadcast(self, local: Tensor, source: int, wire: TrafficCounter) -> None:
        """Give `local` of replica `source` to all of them, in place; each of them calls this.

        One dim of the mesh after the other: first along the line of ranks that goes through the source, then
        from all that have it by then.
        """
        if self.mesh is None or not self.dims or not local.numel():
            return
        places = self._places()
        origin: list[int] = []
        for size in reversed(self.sizes):
            source, place = divmod(source, size)
            origin.insert(0, place)
        whole = local.contiguous()
        sent = whole.view(-1).view(torch.uint8)  # any dtype, whatever the backend knows
        for step, dim in enumerate(self.dims):
            if places[step + 1 :] == origin[step + 1 :]:
                start_broadcast(sent, origin[step], self._axis(dim, local.device, wire)).wait()
        if whole is not local:
            local.copy_(whole)

    def _places(self) -> list[int]:
        coordinate = self.mesh.get_coordinate() if self.mesh is not None else None
        return [coordinate[dim] for dim in self.dims] if coordinate is not None else []

    def _axis(self, dim: int, device: torch.device, wire: TrafficCounter) -> Axis:
        assert self.mesh is not None
        names = self.mesh.mesh_dim_names
        name, rank = names[dim] if names else "storage", self.mesh.get_local_rank(dim)
        return Axis(name, self.mesh.size(dim), rank, self.mesh.get_group(dim), device, wire)
