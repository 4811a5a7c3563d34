"""Which rectangles of which tensors a rank holds, and which of them it writes.

A DTensor's local part is one rectangle of the global tensor, or several where a `_StridedShard` interleaves.
Replicas hold the same rectangles, and all of them know that they do, so each computes its own share of the
writing and no plan is exchanged (`replicas.py`). Rectangles are cut along their first dim into at most
PIECE_BYTES, so that replicas share the writing evenly and a reader under another layout verifies (and reads)
little more than it needs.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Placement, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from meshwright.checkpoint.pieces import ITEM_BYTES
from meshwright.checkpoint.replicas import Replicas, deal
from meshwright.parallel.flat_param import UnpaddedDTensor
from meshwright.spec.sharded_tensor import Rectangle, ShardedTensor

PIECE_BYTES = 64 << 20
DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in ITEM_BYTES}
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True)
class LocalShard(ShardedTensor):
    """A rectangle of a global tensor that this rank holds; `local` is a view of its memory."""

    local: Tensor


def local_chunks(name: str, tensor: Tensor | UnpaddedDTensor) -> list[LocalShard]:
    """The rectangles of ``tensor`` on this rank, none where its shard is empty or it is outside the mesh.

    A plain tensor is the same on every rank that has it. Raises ValueError for a Partial placement.
    """
    if isinstance(tensor, UnpaddedDTensor):
        real = (_first_rows(chunk, tensor.rows) for chunk in local_chunks(name, tensor.padded))
        return [chunk for chunk in real if chunk.local_shape[0]]
    if not isinstance(tensor, DTensor):
        shape = tuple(tensor.shape)
        whole = LocalShard(name, shape, (0,) * tensor.ndim, shape, tensor.detach())
        return [whole] if tensor.numel() else []
    coordinate = tensor.device_mesh.get_coordinate()
    if coordinate is None:
        return []
    with torch.no_grad():
        local = tensor.to_local()
    sizes = [tensor.device_mesh.size(axis) for axis in range(tensor.device_mesh.ndim)]
    indices = _global_indices(name, tensor.shape, tensor.placements, sizes, coordinate)
    if tuple(local.shape) != tuple(len(index) for index in indices):
        raise RuntimeError(
            f"{name}: the local shape is {tuple(local.shape)}, its placements {tensor.placements} give "
            f"{tuple(len(index) for index in indices)}"
        )
    chunks = []
    for places, (offsets, lengths) in _rectangles(indices):
        view = local
        for dim, (start, length) in enumerate(zip(places, lengths, strict=True)):
            view = view.narrow(dim, start, length)
        chunks.append(LocalShard(name, tuple(tensor.shape), offsets, lengths, view))
    return chunks


def rectangles(
    name: str,
    shape: Sequence[int],
    placements: Sequence[Placement],
    sizes: Sequence[int],
    coordinate: Sequence[int],
) -> list[Rectangle]:
    """The rectangles of a tensor on the rank at `coordinate` of a mesh of these `sizes`.

    Raises ValueError for a Partial placement.
    """
    indices = _global_indices(name, shape, placements, sizes, coordinate)
    return [rectangle for _, rectangle in _rectangles(indices)]


def _rectangles(indices: list[Tensor]) -> Iterator[tuple[tuple[int, ...], Rectangle]]:
    """(where it lies in the local part, the rectangle) for each product of runs of the dims."""
    for runs in itertools.product(*(list(_runs(index)) for index in indices)):
        places, offsets, lengths = (tuple(run[part] for run in runs) for part in range(3))
        yield places, (offsets, lengths)


def _first_rows(chunk: LocalShard, rows: int) -> LocalShard:
    """The part of a rectangle that lies in the first ``rows`` of the whole."""
    count = max(0, min(chunk.local_shape[0], rows - chunk.offset[0]))
    shape = (count, *chunk.local_shape[1:])
    whole = (rows, *chunk.global_shape[1:])
    return LocalShard(chunk.key, whole, chunk.offset, shape, chunk.local.narrow(0, 0, count))


def _global_indices(
    name: str,
    shape: Sequence[int],
    placements: Sequence[Placement],
    sizes: Sequence[int],
    coordinate: Sequence[int],
) -> list[Tensor]:
    """Per dim, the global index of each local index: placements applied from the first axis to the last."""
    indices = [torch.arange(length) for length in shape]
    for axis, placement in enumerate(placements):
        if isinstance(placement, Partial):
            raise ValueError(f"{name} is Partial over axis {axis} of its mesh: reduce it before it is saved")
        size, place = sizes[axis], coordinate[axis]
        if isinstance(placement, _StridedShard):
            blocks = indices[placement.dim].chunk(int(placement.split_factor))
            parts = [_part(block, size, place) for block in blocks]
            indices[placement.dim] = torch.cat(parts)
        elif isinstance(placement, Shard):
            indices[placement.dim] = _part(indices[placement.dim], size, place)
    return indices


def _part(index: Tensor, size: int, place: int) -> Tensor:
    """Share ``place`` of ``size`` by torch's rule for uneven shards: equal ceilings, the rest, then none."""
    parts = index.chunk(size)
    return parts[place] if place < len(parts) else index[:0]


def _runs(index: Tensor) -> Iterator[tuple[int, int, int]]:
    """Cut rising indices into runs without holes: (first local index, first global index, length)."""
    breaks = (torch.diff(index) != 1).nonzero().flatten() + 1
    bounds = [0, *breaks.tolist(), len(index)]
    for start, end in itertools.pairwise(bounds):
        if end > start:
            yield start, int(index[start]), end - start


def _cut(chunk: LocalShard) -> Iterator[LocalShard]:
    """Cut a rectangle along its first dim into pieces of at most PIECE_BYTES (one row at least)."""
    if not chunk.local_shape:
        yield chunk
        return
    for start, rows in cut_rows(chunk.local_shape, chunk.local.element_size()):
        offsets = (chunk.offset[0] + start, *chunk.offset[1:])
        view = chunk.local.narrow(0, start, rows)
        yield LocalShard(chunk.key, chunk.global_shape, offsets, tuple(view.shape), view)


def cut_rows(sizes: Sequence[int], item_bytes: int) -> Iterator[tuple[int, int]]:
    """(first, number) of the rows of each piece of a rectangle with at least one dim."""
    rows = max(1, PIECE_BYTES // (math.prod(sizes[1:]) * item_bytes))
    for start in range(0, sizes[0], rows):
        yield start, min(rows, sizes[0] - start)


def describe(tensors: Mapping[str, Tensor | UnpaddedDTensor], rank: int) -> dict[str, Any]:
    """{name: [dtype, shape, first rank of the tensor's mesh]} of what this rank is in the mesh of.

    A plain tensor counts as held by `rank` alone. Raises ValueError for a dtype that cannot be stored.
    """
    found: dict[str, Any] = {}
    for name, tensor in tensors.items():
        if tensor.dtype not in DTYPE_NAMES:
            raise ValueError(f"{name} has dtype {tensor.dtype}, which a checkpoint cannot hold")
        replicas = Replicas.of(tensor)
        if replicas is not None:
            found[name] = [DTYPE_NAMES[tensor.dtype], list(tensor.shape), replicas.first(rank)]
    return found


def own_share(tensors: Mapping[str, Tensor | UnpaddedDTensor], names: Collection[str]) -> list[LocalShard]:
    """The pieces of the tensors `names` that this rank writes: its equal share of what its replicas hold."""
    pieces: dict[Replicas, list[LocalShard]] = defaultdict(list)
    for name in sorted(names):
        replicas = Replicas.of(tensors[name])
        if replicas is not None:
            chunks = local_chunks(name, tensors[name])
            pieces[replicas] += [piece for chunk in chunks for piece in _cut(chunk)]
    return [
        piece
        for replicas, held in pieces.items()
        for piece, writer in zip(
            held, deal([each.local.nbytes for each in held], replicas.count), strict=True
        )
        if writer == replicas.index
    ]
