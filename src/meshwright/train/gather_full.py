"""Whole parameters on the first rank, wherever their pieces are."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.parallel.flat_param import Stored
from meshwright.parallel.mesh import Mesh


def gather_full(named: Iterable[tuple[str, Stored]], mesh: Mesh) -> Iterator[tuple[str, Tensor]]:
    """(name, whole tensor) of each, one at a time: on the first rank all, of every stage; elsewhere none.

    Every rank goes through all of it with the tensors of its own stages, in the same order as the ranks that
    share them. What two stages hold comes once.
    """
    named = list(named)
    column = mesh.replicate.rank == mesh.shard.rank == mesh.tensor.rank == 0
    owners: dict[str, int] = {}
    forms = {name: (tuple(tensor.shape), str(tensor.dtype).removeprefix("torch.")) for name, tensor in named}
    listed = mesh.control.gather([mesh.pipeline.rank, forms] if column else None)
    listed = [row for row in listed if row is not None]
    for stage, theirs in listed:
        for name in theirs:
            owners.setdefault(name, stage)
    for name, tensor in named:
        whole = tensor.full_tensor().detach()
        if column and mesh.pipeline.rank == 0:
            yield name, whole
        elif column:
            dist.send(whole.contiguous(), group=mesh.pipeline.group, group_dst=0)
    for stage, theirs in listed[1:]:
        for name, (shape, dtype) in theirs.items():
            whole = torch.empty(shape, dtype=getattr(torch, dtype), device=mesh.device)
            dist.recv(whole, group=mesh.pipeline.group, group_src=stage)
            if owners[name] == stage:
                yield name, whole
