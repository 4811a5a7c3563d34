"""Tensors placed over four ranks in every way, and their comparison.

The oracle of every placement is `distribute_tensor` of the full tensor, not the code under test.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

# Rows divide evenly, unevenly, and into fewer shards than there are ranks.
SHAPES = {"even": (8, 4), "uneven": (10, 7), "few": (3, 5), "vector": (11,), "cube": (4, 6, 5)}
Placed = tuple[tuple[int, ...], tuple[Placement, ...]]
LAYOUTS: dict[str, Placed] = {
    "replicated": ((4,), (Replicate(),)),
    "rows": ((4,), (Shard(0),)),
    "hybrid": ((2, 2), (Replicate(), Shard(0))),
    "rows and columns": ((2, 2), (Shard(0), Shard(1))),
    "zero over tensor": ((2, 2), (_StridedShard(0, split_factor=2), Shard(0))),
    "rows twice": ((2, 2), (Shard(0), Shard(0))),
    "interleaved": ((2, 2), (_StridedShard(0, split_factor=2), Replicate())),
}


def full_tensors() -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(0)
    result = {f"model/{name}": torch.randn(shape, generator=draw) for name, shape in SHAPES.items()}
    result["optim/bf16"] = torch.randn(9, 6, generator=draw).to(torch.bfloat16)
    return result


def placed(
    tensors: dict[str, Tensor], mesh: DeviceMesh, placements: tuple[Placement, ...]
) -> dict[str, Tensor]:
    """The tensors as DTensors; a placement of a dim that a tensor does not have becomes Replicate."""
    result: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        fitting = [Replicate() if getattr(p, "dim", 0) >= tensor.ndim else p for p in placements]
        result[name] = distribute_tensor(tensor, mesh, fitting, src_data_rank=None)
    return result


def check_equal(loaded: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    for name, tensor in expected.items():
        actual = loaded[name]
        if isinstance(tensor, DTensor) and isinstance(actual, DTensor):
            assert torch.equal(actual.to_local(), tensor.to_local()), name
        else:
            assert torch.equal(actual, tensor), name


def blank(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
