"""Which rectangles of which tensors a rank holds, and who writes what: the plan of a save.

A DTensor's local part is one rectangle of the global tensor, or several where a `_StridedShard` interleaves.
Replicas hold the same rectangles; `torch.distributed.checkpoint`'s planner gives each to one of its holders,
by load. Rectangles are cut along their first dim into at most PIECE_BYTES, so that replicas share the writing
evenly and a reader under another layout verifies (and reads) little more than it needs.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.tensor import DTensor, Partial, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from meshwright.checkpoint.manifest import ITEM_BYTES
from meshwright.parallel.slots import Trimmed

PIECE_BYTES = 64 << 20
DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in ITEM_BYTES}
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True)
class Chunk:
    """A rectangle of a global tensor that this rank holds; ``local`` is a view into its storage."""

    name: str
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    local: Tensor

    @property
    def key(self) -> tuple[str, tuple[int, ...], tuple[int, ...]]:
        return self.name, self.offsets, self.sizes


def local_chunks(name: str, tensor: Tensor | Trimmed) -> list[Chunk]:
    """The rectangles of ``tensor`` on this rank, none where its shard is empty or it is outside the mesh.

    A plain tensor is the same on every rank that has it. Raises ValueError for a Partial placement.
    """
    if isinstance(tensor, Trimmed):
        real = (_first_rows(chunk, tensor.rows) for chunk in local_chunks(name, tensor.padded))
        return [chunk for chunk in real if chunk.sizes[0]]
    if not isinstance(tensor, DTensor):
        whole = Chunk(name, (0,) * tensor.ndim, tuple(tensor.shape), tensor.detach())
        return [whole] if tensor.numel() else []
    coordinate = tensor.device_mesh.get_coordinate()
    if coordinate is None:
        return []
    with torch.no_grad():
        local = tensor.to_local()
    indices = _global_indices(name, tensor, coordinate)
    if tuple(local.shape) != tuple(len(index) for index in indices):
        raise RuntimeError(
            f"{name}: the local shape is {tuple(local.shape)}, its placements {tensor.placements} give "
            f"{tuple(len(index) for index in indices)}"
        )
    chunks = []
    for runs in itertools.product(*(list(_runs(index)) for index in indices)):
        view = local
        for dim, (start, _, length) in enumerate(runs):
            view = view.narrow(dim, start, length)
        offsets = tuple(offset for _, offset, _ in runs)
        chunks.append(Chunk(name, offsets, tuple(view.shape), view))
    return chunks


def _first_rows(chunk: Chunk, rows: int) -> Chunk:
    """The part of a rectangle that lies in the first ``rows`` of the whole."""
    count = max(0, min(chunk.sizes[0], rows - chunk.offsets[0]))
    return Chunk(chunk.name, chunk.offsets, (count, *chunk.sizes[1:]), chunk.local.narrow(0, 0, count))


def _global_indices(name: str, tensor: DTensor, coordinate: Sequence[int]) -> list[Tensor]:
    """Per dim, the global index of each local index: placements applied from the first axis to the last."""
    indices = [torch.arange(length) for length in tensor.shape]
    for axis, placement in enumerate(tensor.placements):
        if isinstance(placement, Partial):
            raise ValueError(f"{name} is Partial over axis {axis} of its mesh: reduce it before it is saved")
        size, place = tensor.device_mesh.size(axis), coordinate[axis]
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


def _cut(chunk: Chunk) -> Iterator[Chunk]:
    """Cut a rectangle along its first dim into pieces of at most PIECE_BYTES (one row at least)."""
    if not chunk.sizes:
        yield chunk
        return
    row_bytes = math.prod(chunk.sizes[1:]) * chunk.local.element_size()
    rows = max(1, PIECE_BYTES // row_bytes)
    for start in range(0, chunk.sizes[0], rows):
        view = chunk.local.narrow(0, start, min(rows, chunk.sizes[0] - start))
        offsets = (chunk.offsets[0] + start, *chunk.offsets[1:])
        yield Chunk(chunk.name, offsets, tuple(view.shape), view)


def local_plan(tensors: Mapping[str, Tensor | Trimmed]) -> tuple[dict[str, Any], list[Chunk]]:
    """What this rank could write: a JSON description for rank 0, and the chunks themselves.

    The description is {name: [dtype, shape, [[offsets, sizes], ...]]}. Raises ValueError for a dtype that a
    checkpoint cannot hold.
    """
    description: dict[str, Any] = {}
    chunks: list[Chunk] = []
    for name, tensor in tensors.items():
        if tensor.dtype not in DTYPE_NAMES:
            raise ValueError(f"{name} has dtype {tensor.dtype}, which a checkpoint cannot hold")
        own = [piece for chunk in local_chunks(name, tensor) for piece in _cut(chunk)]
        rows = [[list(chunk.offsets), list(chunk.sizes)] for chunk in own]
        description[name] = [DTYPE_NAMES[tensor.dtype], list(tensor.shape), rows]
        chunks += own
    return description, chunks


def merge_plans(plans: Sequence[Mapping[str, Any]]) -> tuple[list[list[Any]], dict[str, Any]]:
    """On rank 0: give each piece to one of its holders.

    Returns per rank the (name, offsets, sizes) it writes, and {name: [dtype, shape]} of all tensors. Raises
    ValueError where ranks disagree on a tensor or where their pieces overlap or leave a hole.
    """
    tensors: dict[str, Any] = {}
    for plan in plans:
        for name, (dtype, shape, _) in plan.items():
            if tensors.setdefault(name, [dtype, shape]) != [dtype, shape]:
                raise ValueError(f"{name} is {dtype} {shape} on one rank and {tensors[name]} on another")
    proposals = [SavePlan(_write_items(plan)) for plan in plans]
    planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    merged, _ = planner.create_global_plan(proposals)
    return [[_key(item) for item in plan.items] for plan in merged], tensors


def _write_items(plan: Mapping[str, Any]) -> list[WriteItem]:
    items = []
    for name, (dtype, shape, rows) in plan.items():
        properties = TensorProperties(dtype=DTYPES[dtype])
        for offsets, sizes in rows:
            chunk = ChunkStorageMetadata(offsets=torch.Size(offsets), sizes=torch.Size(sizes))
            data = TensorWriteData(chunk=chunk, properties=properties, size=torch.Size(shape))
            items.append(WriteItem(MetadataIndex(name, offsets), WriteItemType.SHARD, tensor_data=data))
    return items


def _key(item: WriteItem) -> list[Any]:
    if item.tensor_data is None:
        raise RuntimeError(f"the planner returned an item without a tensor: {item.index}")
    chunk = item.tensor_data.chunk
    return [item.index.fqn, list(chunk.offsets), list(chunk.sizes)]
