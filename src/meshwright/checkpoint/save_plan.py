"""Which rectangles of which tensors a rank holds, and which of them it writes.

A DTensor's local part is one rectangle of the global tensor, or several where a `_StridedShard` interleaves.
Replicas hold equal rectangles, and each knows it, so each computes its own share of the writing and no plan
is exchanged (`replicas.py`). Rectangles are cut along their first dim into pieces of at most `piece_bytes`
(`spec/tiling.py`), so that replicas share the writing evenly and a reader under another layout verifies (and
reads) little more than it needs.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Placement, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from meshwright.checkpoint.manifest import DTYPE_NAMES, DTYPES
from meshwright.checkpoint.replicas import Replicas, assign
from meshwright.comm.control import Control
from meshwright.parallel.flat_param import UnpaddedDTensor
from meshwright.spec.sharded_tensor import Rectangle, ShardedTensor
from meshwright.spec.tiling import tiling

Tensors = Mapping[str, Tensor | UnpaddedDTensor]


@dataclass(frozen=True)
class LocalShard(ShardedTensor):
    """A rectangle of a global tensor that this rank holds; `local` is a view of its memory."""

    local: Tensor


def narrow(tensor: Tensor, rectangle: Rectangle, origin: Sequence[int] | None = None) -> Tensor:
    """Return the view of a rectangle in a tensor whose first element lies at `origin`, by default 0."""
    offsets, sizes = rectangle
    starts = [offset - first for offset, first in zip(offsets, origin or (0,) * len(offsets), strict=True)]
    return tensor[tuple(slice(start, start + size) for start, size in zip(starts, sizes, strict=True))]


def local_chunks(name: str, tensor: Tensor | UnpaddedDTensor) -> list[LocalShard]:
    """Return the rectangles of `tensor` on this rank: none if its shard is empty or it is outside the mesh.

    A plain tensor is equal on every rank that has it. Raises ValueError for a Partial placement.
    """
    if isinstance(tensor, UnpaddedDTensor):
        chunks = local_chunks(name, tensor.padded)
        counts = [min(chunk.local_shape[0], tensor.rows - chunk.offset[0]) for chunk in chunks]
        return [
            replace(_rows(chunk, 0, count), global_shape=tuple(tensor.shape))
            for chunk, count in zip(chunks, counts, strict=True)
            if count > 0
        ]
    shape = tuple(tensor.shape)
    if not isinstance(tensor, DTensor):
        whole = LocalShard(name, shape, (0,) * tensor.ndim, shape, tensor.detach())
        return [whole] if tensor.numel() else []
    mesh = tensor.device_mesh
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        return []
    with torch.no_grad():
        local = tensor.to_local()
    indices = global_indices(name, shape, tensor.placements, mesh.shape, coordinate)
    if local.shape != tuple(map(len, indices)):
        raise RuntimeError(
            f"{name}: the local shape is {tuple(local.shape)}, its placements {tensor.placements} give "
            f"{tuple(map(len, indices))}"
        )
    return [
        LocalShard(name, shape, offsets, lengths, narrow(local, (places, lengths)))
        for places, (offsets, lengths) in rectangles(indices)
    ]


def rectangles(indices: list[Tensor]) -> Iterator[tuple[tuple[int, ...], Rectangle]]:
    """Yield (offsets in the local part, rectangle of the whole) for each product of runs of the dims."""
    for runs in itertools.product(*(list(_runs(index)) for index in indices)):
        places, offsets, lengths = (tuple(run[part] for run in runs) for part in range(3))
        yield places, (offsets, lengths)


def _rows(chunk: LocalShard, start: int, count: int) -> LocalShard:
    """Return `count` rows (of dim 0) of a rectangle, from its row `start` on."""
    return replace(
        chunk,
        offset=(chunk.offset[0] + start, *chunk.offset[1:]),
        local_shape=(count, *chunk.local_shape[1:]),
        local=chunk.local.narrow(0, start, count),
    )


def global_indices(
    name: str,
    shape: Sequence[int],
    placements: Sequence[Placement],
    sizes: Sequence[int],
    coordinate: Sequence[int],
) -> list[Tensor]:
    """Return for each dim the global index of each local index on the rank at `coordinate` of a mesh.

    Placements are applied from the first axis of the mesh, of these `sizes`, to the last. Raises ValueError
    for a Partial placement.
    """
    indices = [torch.arange(length) for length in shape]
    for axis, (placement, size, place) in enumerate(zip(placements, sizes, coordinate, strict=True)):
        if isinstance(placement, Partial):
            raise ValueError(f"{name} is Partial over axis {axis} of its mesh: reduce it before it is saved")
        if isinstance(placement, _StridedShard):
            blocks = indices[placement.dim].chunk(int(placement.split_factor))
            indices[placement.dim] = torch.cat([_share(block, size, place) for block in blocks])
        elif isinstance(placement, Shard):
            indices[placement.dim] = _share(indices[placement.dim], size, place)
    return indices


def _share(index: Tensor, size: int, place: int) -> Tensor:
    """Return share `place` of `size` by torch's rule for uneven shards: equal ceilings, rest, then none."""
    parts = index.chunk(size)
    return parts[place] if place < len(parts) else index[:0]


def _runs(index: Tensor) -> Iterator[tuple[int, int, int]]:
    """Cut rising indices into runs without holes: (first local index, first global index, length)."""
    breaks = (torch.diff(index) != 1).nonzero().flatten() + 1
    bounds = [0, *breaks.tolist(), len(index)]
    for start, end in itertools.pairwise(bounds):
        if end > start:
            yield start, int(index[start]), end - start


def _cut(chunk: LocalShard) -> list[LocalShard]:
    """Cut a rectangle along its first dim into pieces of at most `piece_bytes` (one row at least)."""
    if not chunk.local_shape:
        return [chunk]
    cuts = cut_rows(chunk.local_shape, chunk.local.element_size())
    return [_rows(chunk, start, count) for start, count in cuts]


def cut_rows(sizes: Sequence[int], item_bytes: int, most: int = 0) -> Iterator[tuple[int, int]]:
    """Yield (first, number) of the rows of each piece of a rectangle with at least one dim.

    Pieces have at most `most` bytes, by default `piece_bytes`, and one row at least.
    """
    rows = max(1, (most or tiling().piece_bytes) // (math.prod(sizes[1:]) * item_bytes))
    for start in range(0, sizes[0], rows):
        yield start, min(rows, sizes[0] - start)


def describe(tensors: Tensors, rank: int, among: range | None = None) -> dict[str, Any]:
    """Return {name: [dtype, shape, first rank of the tensor's mesh]} of the tensors that this rank holds.

    `among` are the ranks that count, by default all. A plain tensor counts as held by `rank` alone. Raises
    ValueError for a dtype that cannot be stored.
    """
    described: dict[str, Any] = {}
    for name, tensor in tensors.items():
        if tensor.dtype not in DTYPE_NAMES:
            raise ValueError(f"{name} has dtype {tensor.dtype}, which a checkpoint cannot hold")
        replicas = Replicas.of(tensor, among)
        if replicas is not None:
            described[name] = [DTYPE_NAMES[tensor.dtype], list(tensor.shape), replicas.first(rank)]
    return described


class SavePlan:
    """Which tensors this rank has a share in writing, agreed on by the ranks of `control`.

    The ranks write all tensors once; or, with `host_ranks`, every run of so many ranks writes once all parts
    that they hold.
    """

    def __init__(self, control: Control, host_ranks: int | None = None) -> None:
        self.bytes = 0
        """Bytes of all tensors of all ranks."""
        self.forms: dict[str, tuple[str, list[int]]] = {}
        """On rank 0: (dtype, shape) of every tensor."""
        self._ranks = control
        self._host_ranks = host_ranks or control.size
        first = control.rank - control.rank % self._host_ranks
        self.among = range(first, first + host_ranks) if host_ranks else None
        """The ranks that share the writing with this one; None if all do."""
        self._own: list[str] = []
        self._description: dict[str, Any] | None = None

    def agree(self, description: dict[str, Any]) -> None:
        """Learn which tensors this rank writes, given what `describe` says of those that it holds.

        Every rank calls it before each save; they exchange messages where a description has changed.
        """
        if not self._ranks.any(description != self._description):
            return
        self._description = None  # an agreement that fails is sought again
        first = {name: form for name, (*form, first) in description.items() if first == self._ranks.rank}
        listed = self._ranks.gather(first)
        self.bytes, owners_by_host = self._ranks.on_first(lambda: self._owners(listed))
        owners = owners_by_host[self._ranks.rank // self._host_ranks]
        self._own = [name for name, (_, _, first) in description.items() if owners.get(name, first) == first]
        self._description = description

    def own_share(self, tensors: Tensors) -> list[LocalShard]:
        """Return the pieces that this rank writes: an equal share among the replicas of each tensor."""
        held: list[tuple[LocalShard, int, Replicas]] = []
        for name in sorted(self._own):
            replicas = Replicas.of(tensors[name], self.among)
            if replicas is not None:
                pieces = [piece for chunk in local_chunks(name, tensors[name]) for piece in _cut(chunk)]
                held += [(piece, piece.local.nbytes, replicas) for piece in pieces]
        return [piece for piece, replicas, writer in assign(held) if writer == replicas.index]

    def _owners(self, listed: list[dict[str, Any]]) -> tuple[int, list[dict[str, int]]]:
        """On rank 0, from the tensors that the first rank of each mesh holds: bytes of all, and for each host
        the writer of each tensor of several meshes, the lowest of these ranks."""
        self.forms = {}
        owners: list[dict[str, int]] = [{} for _ in range(0, len(listed), self._host_ranks)]
        several: list[dict[str, int]] = [{} for _ in owners]
        for rank, held in enumerate(listed):
            host = rank // self._host_ranks
            for name, (dtype, shape) in held.items():
                known = self.forms.setdefault(name, (dtype, shape))
                if known != (dtype, shape):
                    raise ValueError(f"{name} is {dtype} {shape} on rank {rank} and {known} on another")
                if owners[host].setdefault(name, rank) != rank:
                    several[host][name] = owners[host][name]
        needed = sum(math.prod(shape) * DTYPES[dtype].itemsize for dtype, shape in self.forms.values())
        return needed, several
