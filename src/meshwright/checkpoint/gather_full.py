"""Gathering of sharded tensors: whole copies on rank 0."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor

from meshwright.checkpoint.manifest import DTYPE_NAMES, DTYPES
from meshwright.checkpoint.replicas import Replicas
from meshwright.checkpoint.save_plan import local_chunks
from meshwright.comm.collectives import start_receive, start_send
from meshwright.comm.mesh import Mesh
from meshwright.parallel.flat_param import UnpaddedDTensor

Kinds = dict[str, tuple[list[int], str]]
"""Shape and dtype of whole tensors, by name."""
Place = tuple[str, tuple[int, ...], tuple[int, ...]]
"""Name, offset and local shape of a rectangle of a tensor."""


def gather_full(
    named: Iterable[tuple[str, Tensor | UnpaddedDTensor]], mesh: Mesh, into: dict[str, Tensor] | None = None
) -> dict[str, Tensor]:
    """Gather every tensor on rank 0, and return {name: whole tensor}; an empty dict on the other ranks.

    Collective over the mesh; each rank passes the tensors of its own stages. Of ranks that hold the same part
    the first sends it, and a rank sends all its parts as one message. The whole tensors are written to those
    of `into`, or else to new ones on rank 0's device. A new tensor is NaN, or 0 for integers, where no rank
    has a part of it.
    """
    places: list[Place] = []
    parts: list[Tensor] = []
    kinds: Kinds = {}
    for name, tensor in named:
        replicas = Replicas.of(tensor)
        if replicas is not None and replicas.index == 0:
            kinds[name] = list(tensor.shape), DTYPE_NAMES[tensor.dtype]
            for shard in local_chunks(name, tensor):
                places.append((name, *shard.rectangle))
                parts.append(shard.local)
    rows = mesh.control.gather([kinds, places])
    if mesh.rank > 0:
        if parts:
            joined = torch.cat([part.to(mesh.device).reshape(-1).view(torch.uint8) for part in parts])
            start_send(joined, 0, mesh.world).wait()
        return {}
    whole = into if into is not None else {}
    for rank, (theirs, held) in enumerate(rows):
        for name, (shape, dtype) in theirs.items():
            if name not in whole:
                empty = math.nan if DTYPES[dtype].is_floating_point else 0
                whole[name] = torch.full(shape, empty, dtype=DTYPES[dtype], device=mesh.device)
        received = parts if rank == 0 else _receive(rank, theirs, held, mesh)
        for (name, offset, local_shape), part in zip(held, received, strict=True):
            target = whole[name].detach()
            for dim, (start, length) in enumerate(zip(offset, local_shape, strict=True)):
                target = target.narrow(dim, start, length)
            target.copy_(part)
    return whole


def _receive(rank: int, kinds: Kinds, places: list[Place], mesh: Mesh) -> list[Tensor]:
    """The parts at `places` of the tensors `kinds`, in the message of `rank`."""
    dtypes = [DTYPES[kinds[name][1]] for name, _, _ in places]
    counts = [math.prod(shape) * dtype.itemsize for (_, _, shape), dtype in zip(places, dtypes, strict=True)]
    if not counts:
        return []
    joined = torch.empty(sum(counts), dtype=torch.uint8, device=mesh.device)
    start_receive(joined, rank, mesh.world).wait()
    # Each part is cloned, since a view in another dtype must begin at a multiple of its item's bytes.
    return [
        part.clone().view(dtype).view(shape)
        for (_, _, shape), dtype, part in zip(places, dtypes, joined.split(counts), strict=True)
    ]
