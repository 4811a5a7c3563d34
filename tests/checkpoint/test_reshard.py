"""Four gloo ranks: any layout in, any layout out, and every rank is told the same.

The oracle of every placement is `distribute_tensor` of the full tensor, not the code under test.
"""

from __future__ import annotations

import errno
import os
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from faults import FailingWrites, SlowDisk, leftovers, steps
from meshwright.checkpoint import BadCheckpointError, CheckpointError, CheckpointStore, Lease
from meshwright.checkpoint import writer as writer_module
from meshwright.checkpoint.errors import SaveError
from meshwright.checkpoint.inspect import verify_checkpoint
from meshwright.checkpoint.manifest import ManifestPart, PartFile
from meshwright.checkpoint.save_plan import local_chunks
from meshwright.comm.control import Connections, Control, new_scope
from meshwright.comm.mesh import Mesh
from meshwright.spec import Layout
from meshwright.spec.tiling import Tiling, tiled
from placed_tensors import LAYOUTS, blank, check_equal, full_tensors, placed
from ranks import RANKS, WAIT, Ranks


def chunks_are_the_places_of_local_elements(control: Control, directory: Path) -> None:
    for shape, placements in LAYOUTS.values():
        mesh = init_device_mesh("cpu", shape)
        for full in full_tensors().values():
            for tensor in placed({"x": full}, mesh, placements).values():
                seen = 0
                for chunk in local_chunks("x", tensor):
                    box = tuple(slice(o, o + s) for o, s in zip(*chunk.rectangle, strict=True))
                    assert torch.equal(chunk.local, full[box])
                    seen += chunk.local.numel()
                assert isinstance(tensor, DTensor)
                assert seen == tensor.to_local().numel()


def any_layout_loads_into_any_other(control: Control, directory: Path) -> None:
    full = full_tensors()
    meshes = {shape: init_device_mesh("cpu", shape) for shape, _ in LAYOUTS.values()}
    store = CheckpointStore(directory, keep=len(LAYOUTS) + 1, control=control)
    for step, (shape, placements) in enumerate(LAYOUTS.values()):
        store.save(step, placed(full, meshes[shape], placements), {"step": step}, asynchronous=step % 2 == 0)
    store.save(len(LAYOUTS), full, {"step": len(LAYOUTS)})
    for step in range(len(LAYOUTS) + 1):
        for shape, placements in LAYOUTS.values():
            expected = placed(full, meshes[shape], placements)
            target = blank(expected)
            assert store.load(step, target) == {"step": step}
            check_equal(target, expected)
    store.close()


def fewer_ranks_load_what_four_wrote(control: Control, directory: Path) -> None:
    full = full_tensors()
    store = CheckpointStore(directory, 2, control)
    store.save(7, placed(full, init_device_mesh("cpu", (2, 2)), LAYOUTS["zero over tensor"][1]), {"n": 4})
    store.close()
    for ranks in (1, 2, 3):
        members = list(range(ranks))
        some = Connections().control("fewer", ranks, new_scope(), WAIT)
        mesh = DeviceMesh("cpu", members)
        if dist.get_rank() not in members:
            continue
        for placements in ((Shard(0),), (Shard(1),), (Replicate(),)):
            expected = placed(full, mesh, placements)
            target = blank(expected)
            reader = CheckpointStore(directory, 2, some)
            assert reader.load(None, target) == {"n": 4}
            check_equal(target, expected)
    dist.barrier()


def stages_write_their_own_and_load_across(control: Control, directory: Path) -> None:
    """Pipeline stages: a tensor is on some ranks only, sharded over the ranks of their stage."""
    full = full_tensors()
    pipeline = init_device_mesh("cpu", (2, RANKS // 2), mesh_dim_names=("pp", "dp"))
    stage = dist.get_rank() // (RANKS // 2)
    own = {name: full[name] for index, name in enumerate(sorted(full)) if index % 2 == stage}
    store = CheckpointStore(directory, 2, control)
    store.save(1, placed(own, pipeline["dp"], (Shard(0),)), {})
    target = blank(placed(full, init_device_mesh("cpu", (RANKS,)), (Shard(0),)))
    store.load(1, target)
    check_equal(target, placed(full, init_device_mesh("cpu", (RANKS,)), (Shard(0),)))
    store.close()


def fsdp_over_tensor_parallel_weights_round_trip(control: Control, directory: Path) -> None:
    mesh = init_device_mesh("cpu", (2, RANKS // 2), mesh_dim_names=("dp", "tp"))
    full = torch.arange(40.0).reshape(10, 4)
    linear = torch.nn.Linear(4, 10, bias=False)
    weight = distribute_tensor(full, mesh["tp"], [Shard(0)], src_data_rank=None)
    linear.weight = torch.nn.Parameter(weight)
    fully_shard(linear, mesh=mesh["dp"])
    store = CheckpointStore(directory, 2, control)
    store.save(1, dict(linear.named_parameters()), {})
    alone = {"weight": torch.zeros_like(full)}
    store.load(1, alone)
    assert torch.equal(alone["weight"], full)
    local = linear.weight.to_local().detach().clone()
    with torch.no_grad():
        linear.weight.to_local().zero_()
    store.load(1, dict(linear.named_parameters()))
    assert torch.equal(linear.weight.to_local(), local)
    store.close()


def replicas_share_the_writing(control: Control, directory: Path) -> None:
    store = CheckpointStore(directory, 2, control)
    mesh = init_device_mesh("cpu", (2, RANKS // 2))
    everywhere = (Replicate(), Replicate())
    small = {f"model/{i}": torch.full((64, 8), float(i)) for i in range(8)}
    store.save(1, placed(small, mesh, everywhere), {})
    sizes = [path.stat().st_size for path in sorted((directory / "step-00000001").glob("rank-*.bin"))]
    assert sizes == [8 * 64 * 8 * 4 // RANKS] * RANKS
    with tiled(Tiling(piece_bytes=256)):  # one large tensor is cut, so that it is shared too
        big = placed({"model/big": torch.arange(64 * 8.0).reshape(64, 8)}, mesh, everywhere)
        store.save(2, big, {})
        sizes = [path.stat().st_size for path in sorted((directory / "step-00000002").glob("rank-*.bin"))]
        assert sizes == [64 * 8 * 4 // RANKS] * RANKS
        target = blank(big)
        store.load(2, target)
        check_equal(target, big)
    store.close()


def a_failure_on_one_rank_is_everyones(control: Control, directory: Path) -> None:
    rank = dist.get_rank()
    full = full_tensors()
    mesh = init_device_mesh("cpu", (4,))
    tensors = placed(full, mesh, (Shard(0),))
    disk = FailingWrites()
    store = CheckpointStore(directory, 3, control, disk=disk)
    store.save(1, tensors, {"step": 1})
    told: list[list[str]] = []
    disk.broken = rank == 2
    for asynchronous in (False, True):
        with pytest.raises(CheckpointError) as failure:
            store.save(2, tensors, {"step": 2}, asynchronous)
            store.wait()
        told.append([str(failure.value)])
    disk.broken = False
    everyone: list[object] = [None] * RANKS
    dist.all_gather_object(everyone, told)
    assert everyone == [told] * RANKS
    assert os.strerror(errno.EIO) in told[0][0]
    assert steps(store) == [1]
    dist.barrier()
    assert not leftovers(directory)
    target = blank(tensors)
    assert store.load(None, target) == {"step": 1}
    check_equal(target, tensors)
    store.save(3, tensors, {"step": 3})
    assert store.latest() == 3
    store.close()


def damage_that_one_rank_reads_is_refused_by_all(control: Control, directory: Path) -> None:
    full = full_tensors()
    tensors = placed(full, init_device_mesh("cpu", (4,)), (Shard(0),))
    store = CheckpointStore(directory, 3, control)
    for step in (1, 2):
        store.save(step, tensors, {"step": step})
    if dist.get_rank() == 0:
        path = directory / "step-00000002" / "rank-00003.bin"
        data = bytearray(path.read_bytes())
        data[-1] ^= 128
        path.write_bytes(data)
        assert verify_checkpoint(directory, 2).problems
    dist.barrier()
    target = blank(tensors)
    with pytest.raises(BadCheckpointError, match=r"rank-00003\.bin"):
        store.load(2, target)
    check_equal(target, blank(tensors))
    assert store.load(None, target) == {"step": 1}
    assert "rank-00003.bin" in store.warnings[0]
    check_equal(target, tensors)
    store.close()


def saves_behind_collectives_do_not_deadlock(control: Control, directory: Path) -> None:
    full = full_tensors()
    tensors = placed(full, init_device_mesh("cpu", (4,)), (Shard(0),))
    store = CheckpointStore(directory, 2, control, disk=SlowDisk(0.001))
    value = torch.ones(1)
    for step in range(20):
        store.save(step, tensors, {"step": step}, asynchronous=True)
        for _ in range(10):
            value = torch.ones(1)
            dist.all_reduce(value)
            store.poll()
    store.wait()
    assert value.item() == RANKS
    assert steps(store) == [18, 19]
    store.close()


def a_second_run_is_refused_on_all_ranks(control: Control, directory: Path) -> None:
    first = CheckpointStore(directory, 2, control, lease=Lease(directory, "first run"))
    first.claim()
    with pytest.raises(CheckpointError, match="first run"):
        CheckpointStore(directory, 2, control).claim()
    first.close()
    dist.barrier()


def a_partial_tensor_is_refused_on_all_ranks(control: Control, directory: Path) -> None:
    mesh = init_device_mesh("cpu", (RANKS,))
    partial = DTensor.from_local(torch.ones(4), mesh, [Partial()], run_check=False)
    store = CheckpointStore(directory, 2, control)
    with pytest.raises(ValueError, match="Partial"):
        store.save(1, {"grad": partial}, {})
    store.close()


def what_changes_on_its_way_is_not_published(control: Control, directory: Path) -> None:
    """A digest of rank 2's that changes before its part is written, or after that in the report of it."""
    tensors = placed(full_tensors(), init_device_mesh("cpu", (4,)), (Shard(0),))
    store = CheckpointStore(directory, 3, control)
    store.save(1, tensors, {"step": 1})
    kept, reported = ManifestPart.of, writer_module.report

    def other_row(gathered: list[list[list[object]]], first: int) -> ManifestPart:
        if gathered:
            gathered[2][0][-1] = "0" * 64
        return kept(gathered, first)

    def other_digest(part: ManifestPart, file: PartFile) -> dict[str, object]:
        return reported(part, file._replace(sha256="0" * 64))

    for patched in (
        patch.object(ManifestPart, "of", other_row),
        patch.object(writer_module, "report", other_digest),
    ):
        with patched, pytest.raises(SaveError, match=r"part-00000\.json .* does not list what rank"):
            store.save(2, tensors, {"step": 2})
    dist.barrier()
    assert steps(store) == [1] and not leftovers(directory)
    store.save(2, tensors, {"step": 2})
    assert steps(store) == [1, 2]
    store.close()


BODIES = [
    what_changes_on_its_way_is_not_published,
    chunks_are_the_places_of_local_elements,
    any_layout_loads_into_any_other,
    fewer_ranks_load_what_four_wrote,
    stages_write_their_own_and_load_across,
    fsdp_over_tensor_parallel_weights_round_trip,
    replicas_share_the_writing,
    a_failure_on_one_rank_is_everyones,
    damage_that_one_rank_reads_is_refused_by_all,
    saves_behind_collectives_do_not_deadlock,
    a_second_run_is_refused_on_all_ranks,
    a_partial_tensor_is_refused_on_all_ranks,
]


def run_body(mesh: Mesh, number: int, directory: Path) -> None:
    BODIES[number](mesh.background, directory)
    mesh.control.barrier()


@pytest.mark.parametrize("number", range(len(BODIES)), ids=[body.__name__ for body in BODIES])
def test_many_ranks(ranks: Ranks, number: int, tmp_path: Path) -> None:
    ranks.run(Layout(dp=RANKS), run_body, number, tmp_path)
