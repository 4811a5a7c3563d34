"""Flat storage of parameters: each one's piece on the tensor axis, rows on the shard axis, and offset."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor.placement_types import _StridedShard

from meshwright.comm.mesh import Mesh
from meshwright.spec.low_precision_rules import is_rounded
from meshwright.spec.parameters import Piece
from meshwright.spec.sharded_tensor import ShardedTensor

Owners = tuple[tuple[nn.Module, str], ...]
"""The (module, attribute) pairs that use a parameter; two if it is tied."""


@dataclass(frozen=True)
class ParamSlot(ShardedTensor):
    """The rows of one parameter that a rank stores, and their place in the flat buffers of its unit.

    Rows are indices of dim 0 of the rank's `piece`, or for experts of dim 1, so that every rank stores some
    rows of each expert.
    """

    piece: Piece
    start: int
    """Offset in `Unit.stored` and `Unit.gradient`, in elements."""
    padded: int
    """Elements that each rank stores, padding included."""
    owners: Owners

    @property
    def dim(self) -> int:
        """The dim of the rows."""
        return self.piece.rows_dim

    @property
    def rows(self) -> int:
        """Number of rows of this rank."""
        return self.local_shape[self.dim]

    @property
    def part(self) -> tuple[int, ...]:
        """The shape of what each rank stores, padding included."""
        shape, dim = self.piece.local_shape, self.dim
        per_rank = self.padded // (math.prod(shape) // shape[dim])
        return (*shape[:dim], per_rank, *shape[dim + 1 :])

    @property
    def decay(self) -> bool:
        """True for a matrix, which `train.weight_decay` acts on; not for norms and biases."""
        return self.is_matrix

    @property
    def rounded(self) -> bool:
        """True if its products are those that low precision rounds."""
        return is_rounded(self.key, len(self.global_shape))

    def indices(self) -> list[Tensor]:
        """For each dim, the global index of each local index."""
        return [torch.arange(o, o + size) for o, size in zip(self.offset, self.local_shape, strict=True)]


def make_slots(parameters: list[tuple[Piece, Owners]], ranks: int, rank: int) -> list[ParamSlot]:
    """Shard the rows of each piece over `ranks`, as DTensor's `Shard(0)` does, or `Shard(1)` for experts.

    Matrices come first; within each half those whose gradients the tensor axis must sum
    come last.
    """
    slots, start = [], 0
    for piece, owners in sorted(parameters, key=lambda item: (not item[0].is_matrix, item[0].summed)):
        shape, dim = piece.local_shape, piece.rows_dim
        per_rank = math.ceil(shape[dim] / ranks)
        first = min(rank * per_rank, shape[dim])
        padded = per_rank * (math.prod(shape) // shape[dim])
        rows = min(per_rank, shape[dim] - first)
        offset = (*piece.offset[:dim], piece.offset[dim] + first, *piece.offset[dim + 1 :])
        local_shape = (*shape[:dim], rows, *shape[dim + 1 :])
        slots.append(
            ParamSlot(piece.key, piece.global_shape, offset, local_shape, piece, start, padded, owners)
        )
        start += padded
    return slots


@dataclass(frozen=True)
class UnpaddedDTensor:
    """A DTensor without its last rows, which are padding: the first `rows` of its dim 0."""

    padded: DTensor
    rows: int

    @property
    def shape(self) -> torch.Size:
        """Shape of the whole parameter, without padding."""
        return torch.Size((self.rows, *self.padded.shape[1:]))

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of its elements."""
        return self.padded.dtype

    def full_tensor(self) -> Tensor:
        """The whole parameter; collective over its mesh."""
        return self.padded.full_tensor()[: self.rows]


Stored = DTensor | UnpaddedDTensor


def stored(slot: ParamSlot, local: Tensor, mesh: Mesh, sharded: bool) -> Stored:
    """A DTensor over the local rows of a parameter, its gradient or a moment, sharing their memory.

    Dim 0 of routed experts is sharded over expert ranks, their channels over those that share an expert.
    """
    piece, shape = slot.piece, list(slot.global_shape)
    split = piece.parts > 1
    channels: Placement = Shard(piece.dim) if split else Replicate()
    rows: Placement = Replicate()
    if sharded and split and piece.dim == slot.dim:
        rows = _StridedShard(slot.dim, split_factor=piece.parts)
    elif sharded:
        rows = Shard(slot.dim)
    if piece.routed:
        storage, placements = mesh.expert_storage, {"expert_data": rows, "ep": Shard(0), "etp": channels}
    else:
        storage = mesh.split_storage if split and piece.copies > 1 else mesh.storage
        placements = {"shard": rows, "tp": channels, "parts": channels}
        if split:
            shape[piece.dim] = piece.size * piece.parts
    assert storage.mesh_dim_names is not None
    dims = [placements.get(name, Replicate()) for name in storage.mesh_dim_names]
    tensor = dtensor(local, storage, dims, shape)
    return UnpaddedDTensor(tensor, slot.global_shape[0]) if shape[0] > slot.global_shape[0] else tensor


def dtensor(
    local: Tensor, mesh: DeviceMesh, placements: Sequence[Placement], shape: Sequence[int] | None = None
) -> DTensor:
    """The DTensor of `shape` (default that of `local`) whose part on this rank is `local`, in its memory.

    That may be outside its mesh's device, for reading and writing the local part: collectives of its own
    would want it there. `DTensor.from_local` would copy it to the device; and it calls the constructor, which
    imports Dynamo, in most of a second.
    """
    size = torch.Size(local.shape if shape is None else shape)
    meta = TensorMeta(size, torch.empty(size, device="meta").stride(), local.dtype)
    spec = DTensorSpec(mesh, tuple(placements), tensor_meta=meta)
    return DTensor.__new__(DTensor, local, spec, requires_grad=False)
