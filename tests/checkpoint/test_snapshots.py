"""Snapshots in memory or in files: any layout in, any layout out; a torn or damaged one is never used."""

from __future__ import annotations

import errno
import os
import tempfile
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard

from meshwright.checkpoint import BadCheckpointError, snapshots
from meshwright.checkpoint.slots import HEAD_BYTES, Slot
from meshwright.checkpoint.snapshots import Snapshots
from meshwright.comm.control import Control
from meshwright.comm.mesh import Mesh
from meshwright.rank import shared_memory
from meshwright.rank.shared_memory import SharedMemory, new_file
from meshwright.spec import Layout
from meshwright.spec.errors import UserError
from placed_tensors import LAYOUTS, blank, check_equal, full_tensors, placed
from ranks import RANKS, Ranks

PLENTY = 1 << 40


def accept(state: dict[str, Any]) -> None:
    """Accepts every state."""


@pytest.fixture(params=["in memory", "on disk"])
def slots(request: pytest.FixtureRequest) -> Iterator[list[int]]:
    made = [os.memfd_create("slot") if request.param == "in memory" else new_file() for _ in range(2)]
    yield made
    for descriptor in made:
        os.close(descriptor)


def of_one_rank(
    slots: list[int], every: int | None = 1, free: int = PLENTY, warnings: list[str] | None = None
) -> Snapshots:
    return Snapshots([slots], Control(), every, lambda: free, [] if warnings is None else warnings)


def tensors_of(step: int) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(step)
    return {
        "model/a": torch.randn(33, 7, generator=draw),
        "optim/b": torch.randn(5, generator=draw).to(torch.bfloat16),
        "optim/c": torch.tensor(float(step)),
    }


def test_the_newest_comes_back_in_a_new_process_and_is_not_overwritten_next(slots: list[int]) -> None:
    kept = of_one_rank(slots)
    assert kept.newest() is None
    for step in range(3):
        kept.save(step, tensors_of(step), lambda step=step: {"step": step})
    again = of_one_rank(slots)
    assert again.newest() == 2
    loaded = blank(tensors_of(0))
    assert again.load(2, loaded, accept) == {"step": 2}
    check_equal(loaded, tensors_of(2))
    again.save(3, tensors_of(3), lambda: {"step": 3})
    assert {Slot(slot).head().step for slot in slots} == {2, 3}
    again.clear()
    assert of_one_rank(slots).newest() is None


def test_a_rank_that_dies_in_a_copy_leaves_the_snapshot_before(
    slots: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = of_one_rank(slots)
    for step in (1, 2):
        kept.save(step, tensors_of(step), lambda step=step: {"step": step})

    def dies(*_: object) -> str:
        raise KeyboardInterrupt

    monkeypatch.setattr(snapshots, "sum64", dies)
    with pytest.raises(KeyboardInterrupt):
        kept.save(3, tensors_of(3), lambda: {"step": 3})
    monkeypatch.undo()
    again, loaded = of_one_rank(slots), blank(tensors_of(0))
    assert again.newest() == 2
    assert again.load(2, loaded, accept) == {"step": 2}
    check_equal(loaded, tensors_of(2))


@pytest.mark.parametrize("byte", [0, 100, 933, 937, 940, 990])
def test_a_flipped_bit_is_refused_and_changes_nothing(slots: list[int], byte: int) -> None:
    of_one_rank(slots).save(1, tensors_of(1), lambda: {"step": 1})
    place = HEAD_BYTES + byte
    (content,) = os.pread(slots[0], 1, place)
    os.pwrite(slots[0], bytes([content ^ 8]), place)
    again, loaded = of_one_rank(slots), blank(tensors_of(0))
    with pytest.raises(BadCheckpointError, match="is damaged: "):
        again.load(1, loaded, accept)
    check_equal(loaded, blank(tensors_of(0)))


def test_a_state_that_the_run_refuses_changes_nothing(slots: list[int]) -> None:
    of_one_rank(slots).save(1, tensors_of(1), lambda: {"step": 1})

    def refuse(state: dict[str, Any]) -> None:
        raise UserError(f"step {state['step']} is of another run")

    loaded = blank(tensors_of(0))
    with pytest.raises(UserError, match="step 1 is of another run"):
        of_one_rank(slots).load(1, loaded, refuse)
    check_equal(loaded, blank(tensors_of(0)))


def test_without_room_none_is_kept_and_it_is_said_once(
    slots: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    warnings: list[str] = []
    kept = of_one_rank(slots, free=1000, warnings=warnings)
    on_disk = Slot(slots[0]).free_on_disk is not None
    if on_disk:
        monkeypatch.setattr(Slot, "free_on_disk", 1000)
    for step in (1, 2):
        if kept.due(step):
            kept.save(step, tensors_of(step), dict)
    assert kept.newest() is None
    (warning,) = warnings
    assert f"no snapshots are kept {'in temporary files' if on_disk else 'in memory'}" in warning


def test_a_snapshot_of_host_memory_is_not_mapped_nor_copied(
    slots: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It takes pages of the kernel's cache, and none of the process."""
    places = {os.fstat(slot).st_ino for slot in slots}
    kept, tensors = of_one_rank(slots), {"w": torch.randn(1 << 20)}
    monkeypatch.setattr(torch, "empty", lambda *_, **__: pytest.fail("memory was allocated"))
    for step in (1, 2):
        kept.save(step, tensors, dict)
    mapped = [line.split() for line in Path("/proc/self/maps").read_text().splitlines()]
    assert not places & {int(line[4]) for line in mapped}


def test_a_snapshot_that_cannot_be_written_is_told_once_and_the_one_before_stays(
    slots: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    warnings: list[str] = []
    kept = of_one_rank(slots, warnings=warnings)
    for step in (1, 2):
        kept.save(step, tensors_of(step), lambda step=step: {"step": step})
    with monkeypatch.context() as patch:

        def full(*_: object) -> None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        patch.setattr(Slot, "write", full)
        for step in (3, 4):
            kept.save(step, tensors_of(step), dict)
    (warning,) = warnings
    assert "the snapshot of step 3 could not be written (No space left on device)" in warning
    loaded = blank(tensors_of(0))
    assert kept.newest() == 2 and kept.load(2, loaded, accept) == {"step": 2}
    check_equal(loaded, tensors_of(2))
    kept.save(5, tensors_of(5), dict)
    assert {Slot(slot).head().step for slot in slots} == {2, 5}


@pytest.mark.parametrize("where", ["disk", "memory for files", "little room", "GPUs"])
def test_slots_are_on_disk_where_processors_compute_and_the_disk_has_room(
    where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", "/dev/shm" if where == "memory for files" else str(tmp_path))
    monkeypatch.setattr(shared_memory, "free_memory", lambda: PLENTY << 20 if where == "little room" else 0)
    monkeypatch.setattr(shared_memory, "has_gpu_driver", lambda: where == "GPUs")
    with SharedMemory(2, peers=True) as memory:
        slots = [descriptor for of_rank in memory.snapshots for descriptor in of_rank]
        assert len(slots) == 8 and not any(os.fstat(slot).st_nlink for slot in slots)
        assert {Slot(slot).free_on_disk is not None for slot in slots} == {where == "disk"}
    assert not list(tmp_path.iterdir())


def test_an_interval_is_kept(slots: list[int]) -> None:
    assert [step for step in range(1, 10) if of_one_rank(slots, 3).due(step)] == [3, 6, 9]
    assert not of_one_rank(slots, 0).due(1)


def test_the_interval_follows_from_the_cost_of_a_copy_and_a_step(
    slots: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A copy takes 1 s and a step 7 s: at 2% of the time, one copy in 8 steps."""
    clock = (number // 2 * 8.0 + number % 2 for number in count())
    monkeypatch.setattr(snapshots.time, "perf_counter", lambda: next(clock))
    kept = of_one_rank(slots, every=None)
    saved = []
    for step in range(1, 30):
        if kept.due(step):
            saved.append(step)
            kept.save(step, tensors_of(step), dict)
    assert saved == [1, 2, 3, 4, 5, 6, 8, 16, 24]


def test_files_are_written_no_faster_than_a_disk_bears(
    slots: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """At a rate that takes 80 s a snapshot, there is one each 12 steps of 7 s in files, and 8 in memory."""
    clock = (number // 2 * 8.0 + number % 2 for number in count())
    monkeypatch.setattr(snapshots.time, "perf_counter", lambda: next(clock))
    size = sum(tensor.nbytes for tensor in tensors_of(1).values())
    monkeypatch.setattr(snapshots, "DISK_BYTES_PER_SECOND", size / 80)
    kept = of_one_rank(slots, every=None)
    for step in range(1, 7):
        kept.save(step, tensors_of(step), dict)
    every = 8 if Slot(slots[0]).free_on_disk is None else 12
    assert [step for step in range(7, 30) if kept.due(step)] == list(range(every, 30, every))


def layouts_in_and_out(mesh: Mesh, directory: Path) -> None:
    full, rank = full_tensors(), mesh.rank
    meshes = {shape: init_device_mesh("cpu", shape) for shape, _ in LAYOUTS.values()}
    names = [[directory / f"slot-{rank}-{number}" for number in range(2)] for rank in range(RANKS)]
    for name in names[rank]:
        name.touch()
    mesh.control.barrier()
    slots = [[os.open(name, os.O_RDWR) for name in pair] for pair in names]
    for step, (shape, placements) in enumerate(LAYOUTS.values(), start=1):
        kept = Snapshots(slots, mesh.control, 1, lambda: PLENTY, [])
        kept.save(step, placed(full, meshes[shape], placements), lambda step=step: {"step": step})
        mesh.control.barrier()
        for shape_after, placements_after in LAYOUTS.values():
            expected = placed(full, meshes[shape_after], placements_after)
            target = blank(expected)
            again = Snapshots(slots, mesh.control, 1, lambda: PLENTY, [])
            assert again.newest() == step
            assert again.load(step, target, accept) == {"step": step}
            check_equal(target, expected)
        mesh.control.barrier()
    if rank == 0:  # a rank that is a step ahead of the others, or died in a copy
        Snapshots(slots, mesh.control, 1, lambda: PLENTY, []).clear()
    mesh.control.barrier()
    assert Snapshots(slots, mesh.control, 1, lambda: PLENTY, []).newest() is None
    for descriptor in (descriptor for pair in slots for descriptor in pair):
        os.close(descriptor)


def what_a_lost_host_leaves(mesh: Mesh, directory: Path) -> None:
    """Hosts of two ranks: replicas on the first hold all that the second held, shards do not."""
    full, rank, target_mesh = full_tensors(), mesh.rank, init_device_mesh("cpu", (2,))
    own = [
        directory / f"slot-{rank - rank % 2 + local}-{number}" for local in range(2) for number in range(2)
    ]
    first = [directory / f"slot-{local}-{number}" for local in range(2) for number in range(2)]
    for name in own:
        name.touch()
    mesh.control.barrier()
    for step, (layout, survives) in enumerate({"hybrid": True, "rows": False}.items(), start=1):
        shape, placements = LAYOUTS[layout]
        opened = [os.open(name, os.O_RDWR) for name in own]
        kept = Snapshots([opened[:2], opened[2:]], mesh.control, 1, lambda: PLENTY, [])
        tensors = placed(full, init_device_mesh("cpu", shape), placements)
        kept.save(step, tensors, lambda step=step: {"step": step})
        mesh.control.barrier()
        left = [os.open(name, os.O_RDWR) for name in first]
        again = Snapshots([left[:2], left[2:]], mesh.control, 1, lambda: PLENTY, [])
        expected = placed(full, target_mesh, (Shard(0),))
        target = blank(expected)
        if survives:
            again.load(step, target, accept)
            check_equal(target, expected)
        else:
            with pytest.raises(BadCheckpointError, match="does not hold all parts"):
                again.load(step, target, accept)
            check_equal(target, blank(expected))
        for descriptor in (*opened, *left):
            os.close(descriptor)
        mesh.control.barrier()


def test_a_host_that_is_lost_takes_only_what_no_other_held(ranks: Ranks, tmp_path: Path) -> None:
    ranks.run(Layout(dp=RANKS), what_a_lost_host_leaves, tmp_path)


def test_any_layout_loads_what_any_other_kept(ranks: Ranks, tmp_path: Path) -> None:
    ranks.run(Layout(dp=RANKS), layouts_in_and_out, tmp_path)
