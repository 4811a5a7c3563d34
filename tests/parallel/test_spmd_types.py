"""A proof by types beside that by numbers: the tensor axis's layers under the checker of `spmd_types`.

It runs our own forward and backward, on a group without other ranks, and infers for each tensor from its
operations if ranks hold it alike (R), each a shard of it (S), or each a summand (P). A sum that is left out
leaves its summands as they are.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from meshwright.comm.collectives import DONE
from meshwright.comm.mesh import Axis
from meshwright.comm.traffic_counter import Pending, TrafficCounter
from meshwright.parallel import tensor_linears
from meshwright.parallel.recompute_cache import RecomputeCache
from meshwright.parallel.tensor_linears import ColumnParallel, EnterParallelRegion, RowParallel

spmd = pytest.importorskip("spmd_types", reason="spmd_types is not installed; it is in the extra `dev`")
checker = pytest.importorskip("spmd_types.checker")

B, T, D, F, RANKS = 2, 3, 8, 5, 4


@pytest.fixture(scope="module")
def mesh() -> Iterator[DeviceMesh]:
    """A mesh of fake ranks, of which this process is the first."""
    dist.init_process_group("fake", rank=0, world_size=RANKS)
    yield init_device_mesh("cpu", (RANKS,), mesh_dim_names=("tp",))
    dist.destroy_process_group()


class Typed:
    """The tensor axis of a mesh, whose tensors have types."""

    def __init__(self, mesh: DeviceMesh) -> None:
        self.group = mesh.get_group("tp")
        self.axis = Axis("tensor", RANKS, 0, self.group, torch.device("cpu"), TrafficCounter())

    def tensor(self, kind: Any, *shape: int) -> Tensor:
        """A rank's part of a tensor of this type."""
        tensor = torch.randn(shape)  # where zeros would have a type of their own
        spmd.assert_type(tensor, {self.group: kind})
        return tensor

    def column(self) -> tuple[list[Tensor], list[Tensor]]:
        """Results, and gradients of x, the weight and the bias, of a column-parallel layer."""
        layer = ColumnParallel(self.axis, False, RecomputeCache())
        x, weight = self.tensor(spmd.R, B, T, D), self.tensor(spmd.S(0), F, D)
        bias = self.tensor(spmd.S(0), F)
        grad = self.tensor(spmd.S(2), B, T, F)
        return list(layer.forward([x, weight, bias])), list(layer.backward([x, weight, bias], [grad]))

    def row(self) -> tuple[list[Tensor], list[Tensor]]:
        """Results, and gradients of x and the weight, of a row-parallel layer."""
        layer = RowParallel(self.axis, False, RecomputeCache())
        x, weight = self.tensor(spmd.S(2), B, T, F), self.tensor(spmd.S(1), D, F)
        grad = self.tensor(spmd.R, B, T, D)
        return list(layer.forward([x, weight])), list(layer.backward([x, weight], [grad]))

    def enter(self) -> tuple[list[Tensor], list[Tensor]]:
        """Results, and the gradient of x, of the entry of a region where ranks each compute a summand."""
        region = EnterParallelRegion(self.axis, False, RecomputeCache())
        x, grad = self.tensor(spmd.R, B, T, D), self.tensor(spmd.P, B, T, D)
        return list(region.forward([x])), list(region.backward([], [grad]))

    def types(self, tensors: list[Tensor]) -> list[Any]:
        """Types that the checker has inferred, one for each tensor."""
        return [spmd.get_local_type(each)[spmd.normalize_axis(self.group)] for each in tensors]


EXPECTED = {"column": ("V", "RVV"), "row": ("R", "VV"), "enter": ("R", "R")}


@pytest.mark.parametrize("layer", EXPECTED)
def test_types_of_results_and_gradients_are_those_of_their_tensors(mesh: DeviceMesh, layer: str) -> None:
    with spmd.set_current_mesh(mesh), checker.typecheck(local=False):
        typed = Typed(mesh)
        found = [typed.types(tensors) for tensors in getattr(typed, layer)()]
    assert found == [[getattr(spmd, letter) for letter in letters] for letters in EXPECTED[layer]]


@pytest.mark.parametrize(("layer", "part"), [("column", 1), ("row", 0), ("enter", 1)])
def test_a_missing_sum_is_seen_by_its_type(
    mesh: DeviceMesh, layer: str, part: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tensor_linears, "start_all_reduce", lambda tensor, axis: DONE)
    with spmd.set_current_mesh(mesh), checker.typecheck(local=False):
        typed = Typed(mesh)
        found = typed.types(getattr(typed, layer)()[part])
    assert found[0] is spmd.P  # and nothing else is: other gradients are shards, which need no sum
    assert spmd.P not in found[1:]


def test_a_sum_too_many_is_refused(mesh: DeviceMesh, monkeypatch: pytest.MonkeyPatch) -> None:
    once = tensor_linears.start_all_reduce

    def twice(tensor: Tensor, axis: Axis) -> Pending:
        once(tensor, axis)
        return once(tensor, axis)

    monkeypatch.setattr(tensor_linears, "start_all_reduce", twice)
    refused = pytest.raises(spmd.SpmdTypeError, match="all_reduce: expected input type")
    with spmd.set_current_mesh(mesh), checker.typecheck(local=False), refused:
        Typed(mesh).row()
