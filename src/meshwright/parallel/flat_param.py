"""Where each parameter lies: its piece of the tensor axis, its rows of the shard axis, its place."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from meshwright.parallel.mesh import Mesh
from meshwright.spec.parameters import Piece

Owners = tuple[tuple[nn.Module, str], ...]
"""The (module, attribute) pairs that read a parameter; two when tied."""


@dataclass(frozen=True)
class ParamSlot:
    """Where one parameter lies in its unit's flat buffers; `shape` is that of its piece."""

    name: str
    piece: Piece
    start: int
    """Offset in `stored` and `gradient`, in elements."""
    padded: int
    """Elements of one rank's part, padding included."""
    first_row: int
    rows: int
    """Rows of this rank, of those of the piece: `first_row` to `first_row + rows`. Rows are indices of dim 0,
    or of dim 1 for experts, where each of the rank's experts has some of its rows on every rank."""
    owners: Owners

    @property
    def shape(self) -> torch.Size:
        """What computes on this tensor rank."""
        return torch.Size(self.piece.shape)

    @property
    def dim(self) -> int:
        """The dim of the rows."""
        return self.piece.rows_dim

    @property
    def part(self) -> tuple[int, ...]:
        """The shape of one rank's part, padding included."""
        shape, dim = self.shape, self.dim
        per_rank = self.padded // (shape.numel() // shape[dim])
        return (*shape[:dim], per_rank, *shape[dim + 1 :])

    @property
    def decay(self) -> bool:
        """Whether weight decay applies: not to norms and biases."""
        return len(self.piece.whole) >= 2

    def indices(self) -> list[Tensor]:
        """For each dim of the local rows, the place of each index in the whole parameter."""
        found = [torch.arange(size) for size in self.shape]
        found[self.piece.dim] += self.piece.first
        if self.piece.experts is not None:
            found[0] += self.piece.experts.start
        found[self.dim] = found[self.dim][self.first_row : self.first_row + self.rows]
        return found


def make_slots(parameters: list[tuple[str, Piece, Owners]], ranks: int, rank: int) -> list[ParamSlot]:
    """Deal the rows of each piece over `ranks`, as DTensor's `Shard(0)` deals them.

    Those of experts as `Shard(1)` does. Decayed parameters come first; within each half those whose gradients
    the tensor axis must sum.
    """
    slots, start = [], 0
    for name, piece, owners in sorted(parameters, key=lambda item: (len(item[1].whole) < 2, item[1].summed)):
        rows_of_piece = piece.shape[piece.rows_dim]
        per_rank = math.ceil(rows_of_piece / ranks)
        first = min(rank * per_rank, rows_of_piece)
        padded = per_rank * (math.prod(piece.shape) // rows_of_piece)
        slots.append(
            ParamSlot(name, piece, start, padded, first, min(per_rank, rows_of_piece - first), owners)
        )
        start += padded
    return slots


@dataclass(frozen=True)
class UnpaddedDTensor:
    """A DTensor whose last rows are padding, seen without them: `rows` of its first dim are real."""

    padded: DTensor
    rows: int

    @property
    def shape(self) -> torch.Size:
        """Of the whole parameter, without padding."""
        return torch.Size((self.rows, *self.padded.shape[1:]))

    @property
    def ndim(self) -> int:
        """Number of dims."""
        return self.padded.ndim

    @property
    def dtype(self) -> torch.dtype:
        """Of its elements."""
        return self.padded.dtype

    def full_tensor(self) -> Tensor:
        """The whole parameter; collective over its mesh."""
        return self.padded.full_tensor()[: self.rows]


Stored = DTensor | UnpaddedDTensor


def stored(slot: ParamSlot, local: Tensor, mesh: Mesh, sharded: bool) -> Stored:
    """A parameter's, gradient's or moment's local rows as a part of the whole; they share its memory."""
    piece = slot.piece
    if piece.experts is not None:
        return _stored_experts(slot, local, mesh, sharded)
    split = piece.parts > 1
    rows: Placement = Replicate()
    if sharded:
        rows = _StridedShard(0, split_factor=piece.parts) if split and piece.dim == 0 else Shard(0)
    over_tensor: Placement = Shard(piece.dim) if split else Replicate()
    shape = list(piece.whole)
    if split:
        shape[piece.dim] = piece.size * piece.parts
    found = _part_of(
        torch.Size(shape),
        local,
        mesh.storage_of(piece.copies if split else 1),
        {"shard": rows, "tp": over_tensor, "parts": over_tensor},
    )
    return UnpaddedDTensor(found, piece.whole[0]) if shape[0] > piece.whole[0] else found


def _stored_experts(slot: ParamSlot, local: Tensor, mesh: Mesh, sharded: bool) -> DTensor:
    """Local rows of routed experts: dim 0 over the expert ranks, channels over those that share an expert."""
    piece = slot.piece
    split = piece.parts > 1
    rows: Placement = Replicate()
    if sharded:
        both = split and piece.dim == 1
        rows = _StridedShard(1, split_factor=piece.parts) if both else Shard(1)
    channels: Placement = Shard(piece.dim) if split else Replicate()
    placements = {"expert_data": rows, "ep": Shard(0), "etp": channels}
    return _part_of(torch.Size(piece.whole), local, mesh.expert_storage, placements)


def _part_of(
    whole: torch.Size, local: Tensor, mesh: DeviceMesh, placements: Mapping[str, Placement]
) -> DTensor:
    """A part of a tensor of shape `whole`; dims of the mesh that have no placement replicate it."""
    names = mesh.mesh_dim_names
    assert names is not None
    return DTensor.from_local(
        local,
        mesh,
        [placements.get(name, Replicate()) for name in names],
        run_check=False,
        shape=whole,
        stride=torch.empty(whole, device="meta").stride(),
    )
