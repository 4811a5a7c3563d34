"""Collectives through the memory of one host, beside gloo's."""

from __future__ import annotations

import os
import platform
import signal
import sys
import time
from dataclasses import replace
from datetime import timedelta
from functools import reduce
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor

from meshwright.comm import collectives, shared_memory_group
from meshwright.comm.mesh import Axis, Mesh, build_mesh
from meshwright.comm.process_groups import Groups
from meshwright.comm.shared_memory_group import SWITCH, SharedMemoryGroup
from meshwright.spec import Layout
from meshwright.spec.errors import ECHOES
from ranks import Ranks, forks

shares_memory = pytest.mark.skipif(
    (sys.platform, platform.machine()) != ("linux", "x86_64"),
    reason="ranks share memory on Linux with x86-64 only",
)
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.int64)


def summands(axis: Axis, elements: int, seed: int, dtype: torch.dtype) -> Tensor:
    """Summands of all ranks, (n, elements), equal on each of them."""
    generator = torch.Generator().manual_seed(seed)
    return (100 * torch.randn(axis.size, elements, generator=generator, dtype=torch.float64)).to(dtype)


def all_operations(mesh: Mesh, shared: bool) -> None:
    """Start collectives of many sizes, wait for them in any order, and hold them to the sums of rows."""
    axis = mesh.tensor if shared else replace(mesh.tensor, memory=None)
    assert axis.memory is None or axis.memory.joined()
    for seed, dtype in enumerate(4 * DTYPES):
        given = summands(axis, axis.size * (1 + 997 * seed), seed, dtype)
        own, row = given[axis.rank], given.shape[1] // axis.size
        summed, largest, part = own.clone(), own.clone(), torch.empty(row, dtype=dtype)
        whole = torch.empty(axis.size, row, dtype=dtype)
        sizes = [row // 3, row - row // 3]
        several = [torch.full((axis.size, size), -1).to(dtype) for size in sizes]
        for each, mine in zip(several, own[:row].split(sizes), strict=True):
            each[axis.rank] = mine
        terms = [each.contiguous() for each in own.view(axis.size, -1).split(sizes, 1)]
        joined = torch.empty(row, dtype=dtype)
        started = [
            collectives.start_all_reduce(summed, axis),
            collectives.start_reduce_scatter(part, own, axis),
            collectives.start_all_gather(whole.view(-1), own[:row], axis),
            collectives.start_all_reduce(largest, axis, "amax"),
            collectives.start_all_gather_coalesced(several, axis),
            collectives.start_reduce_scatter_coalesced(joined, terms, axis),
        ]
        order = torch.randperm(len(started), generator=torch.Generator().manual_seed(axis.rank + 10 * seed))
        for index in order.tolist():
            started[index].wait()
            assert started[index].is_completed() or not shared
        expected = reduce(torch.add, given)
        largest_sum = float(given.abs().sum(0).max())
        error = 0 if shared or not dtype.is_floating_point else 3 * torch.finfo(dtype).eps * largest_sum
        torch.testing.assert_close(summed, expected, rtol=0, atol=error)
        torch.testing.assert_close(part, expected.view(axis.size, -1)[axis.rank], rtol=0, atol=error)
        torch.testing.assert_close(joined, expected.view(axis.size, -1)[axis.rank], rtol=0, atol=error)
        assert torch.equal(whole, given[:, :row])
        assert torch.equal(torch.cat(several, 1), given[:, :row])
        assert torch.equal(largest, given.amax(0))


def operations_of_groups_of_calls(mesh: Mesh) -> None:
    """As over NCCL, whose calls gloo takes, too, one tensor after another."""
    with patch.object(collectives, "_has_groups_of_calls", lambda axis: True):
        all_operations(mesh, False)


@pytest.mark.parametrize("size", [2, 4])
def test_several_tensors_in_a_group_of_calls(ranks: Ranks, size: int) -> None:
    ranks.run(Layout(tp=size), operations_of_groups_of_calls)


@pytest.mark.parametrize(
    "shared", [pytest.param(True, id="shared memory", marks=shares_memory), pytest.param(False, id="gloo")]
)
@pytest.mark.parametrize("size", [2, 4])
def test_every_operation_is_that_of_the_rows_in_order(ranks: Ranks, size: int, shared: bool) -> None:
    """Sums through shared memory are those of the rows one after another, to the bit, on every rank."""
    ranks.run(Layout(tp=size), all_operations, shared)


def one_rank_ahead(mesh: Mesh) -> None:
    """Rank 0 posts all of its collectives before rank 1 posts any."""
    axis, count = mesh.tensor, 20
    given = [summands(axis, 64, seed, torch.float64) for seed in range(count)]
    own = [each[axis.rank].clone() for each in given]
    if axis.rank == 1:
        mesh.control.barrier()
    works = [collectives.start_all_reduce(each, axis) for each in own]
    if axis.rank == 0:
        assert not any(work.is_completed() for work in works)
        mesh.control.barrier()
    for work in reversed(works):
        work.wait()
    assert all(torch.equal(mine, each.sum(0)) for mine, each in zip(own, given, strict=True))


@shares_memory
def test_a_rank_may_run_ahead(ranks: Ranks) -> None:
    ranks.run(Layout(tp=2), one_rank_ahead)


def few_records(mesh: Mesh) -> None:
    """Post many more collectives than a rank keeps records of, before waiting for any."""
    axis = mesh.tensor
    given = [summands(axis, 8, seed, torch.float64) for seed in range(50)]
    own = [each[axis.rank].clone() for each in given]
    mesh.control.barrier()
    with patch.object(shared_memory_group, "_RECORDS", 4):
        for work in [collectives.start_all_reduce(each, axis) for each in own]:
            work.wait()
        mesh.control.barrier()
    assert all(torch.equal(mine, each.sum(0)) for mine, each in zip(own, given, strict=True))


@shares_memory
def test_records_are_not_written_over_before_they_are_read(ranks: Ranks) -> None:
    ranks.run(Layout(tp=2), few_records)


def bytes_taken(mesh: Mesh) -> int:
    """Size of this rank's region after many collectives, of which two at most are under way."""
    groups = Groups("cpu", timedelta(seconds=60))
    fresh = SharedMemoryGroup(mesh.tensor.group, groups.timeout)  # type: ignore[arg-type]
    assert fresh.joined()
    before = None
    for size in range(1, 60):
        work = fresh.all_reduce(torch.ones(1000 * size))
        if before is not None:
            before.wait()
        before = work
    assert before is not None
    before.wait()
    assert fresh._regions is not None
    return os.fstat(fresh._regions[fresh.rank].descriptor).st_size


@shares_memory
def test_memory_of_what_was_read_is_used_again(ranks: Ranks) -> None:
    """A region holds three parts of at most 236 kB, that is what is under way and what others still read."""
    for taken in ranks.run(Layout(tp=2), bytes_taken):
        assert 236_000 < taken < 5 * 236_000


def different_calls(mesh: Mesh) -> str:
    """The error of a rank whose call is not that of the other one."""
    fresh = SharedMemoryGroup(mesh.tensor.group, timedelta(seconds=20))  # type: ignore[arg-type]
    assert fresh.joined()
    if fresh.rank == 0:
        work = fresh.all_reduce(torch.ones(8))
    else:
        work = fresh.all_gather([torch.ones(2, 8, dtype=torch.float64)], [torch.ones(8, dtype=torch.float64)])
    for _ in range(2):  # a caller that goes on after the first one is not given a wrong result
        with pytest.raises(RuntimeError) as caught:
            work.wait()
    mesh.control.barrier()
    return str(caught.value)


@shares_memory
def test_ranks_that_start_different_collectives_are_told(ranks: Ranks) -> None:
    first, second = ranks.run(Layout(tp=2), different_calls)
    assert "ranks 0 and 1" in first and "32 bytes" in first and "64" in first
    assert "ranks 1 and 0" in second and "another operation or format" in second


# Ranks of their own, for what would stop the pool's -----------------------------------------------------


def _start(function: object, folder: Path, *arguments: object) -> None:
    forks()
    given = (function, str(folder / "store"), *arguments)
    mp.start_processes(_rank, args=given, nprocs=2, start_method="forkserver")


def _rank(rank: int, function: object, store: str, *arguments: object) -> None:
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    function(rank, *arguments)  # type: ignore[operator]


def _axis() -> Axis:
    mesh = build_mesh(Layout(tp=2), torch.device("cpu"), groups=Groups("cpu", timedelta(seconds=60)))
    assert mesh is not None
    return mesh.tensor


def reduce_beside_a_killed_rank(rank: int) -> None:
    axis = _axis()
    first = torch.ones(8)
    collectives.start_all_reduce(first, axis).wait()
    assert axis.memory is not None and axis.memory.joined() and float(first[0]) == 2
    dist.barrier()
    if rank == 1:  # a parent that has not asked for its end yet leaves it a zombie
        if os.fork() == 0:
            os._exit(0)
        os.kill(os.getpid(), signal.SIGKILL)
    began = time.monotonic()
    with pytest.raises(RuntimeError) as caught:
        collectives.start_all_reduce(first, axis).wait()
    assert time.monotonic() - began < 10
    assert any(echo in str(caught.value) for echo in ECHOES)


@shares_memory
def test_a_wait_for_a_killed_rank_ends_at_once(tmp_path: Path) -> None:
    with pytest.raises(mp.ProcessExitedException, match="SIGKILL"):
        _start(reduce_beside_a_killed_rank, tmp_path)


def wait_for_a_late_rank(rank: int) -> None:
    axis = _axis()
    value = torch.ones(8)
    collectives.start_all_reduce(value, axis).wait()
    assert axis.memory is not None
    axis.memory.timeout = timedelta(seconds=0.5)
    if rank == 0:
        with pytest.raises(RuntimeError, match=r"Timed out waiting 500 ms for rank 1 of the group"):
            collectives.start_all_reduce(value, axis).wait()
    dist.barrier()


@shares_memory
def test_a_late_rank_is_named_at_the_limit(tmp_path: Path) -> None:
    _start(wait_for_a_late_rank, tmp_path)


def sum_without_shared_memory(rank: int, where: str) -> None:
    if where == "switch" and rank == 1:
        os.environ[SWITCH] = "1"
    host = shared_memory_group.host_number() + (rank if where == "hosts" else 0)
    with patch.object(shared_memory_group, "host_number", lambda: host):
        axis, value = _axis(), torch.ones(8)
        collectives.start_all_reduce(value, axis).wait()
    assert axis.memory is not None and not axis.memory.joined()
    assert value.tolist() == [2.0] * 8
    dist.barrier()


@pytest.mark.parametrize("where", ["switch", "hosts"])
def test_gloo_serves_ranks_that_do_not_share_memory(tmp_path: Path, where: str) -> None:
    """One rank that is elsewhere, or whose switch is off, is enough for all ranks to take gloo."""
    _start(sum_without_shared_memory, tmp_path, where)
