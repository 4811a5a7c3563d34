"""Findings of several ranks told once, and judgements of limits, disks and times by their numbers."""

from __future__ import annotations

import resource
from pathlib import Path
from typing import Any

import pytest
import torch

from meshwright.comm.control import Control
from meshwright.doctor import limits
from meshwright.doctor.collectives import _row, _slow
from meshwright.doctor.finding import Finding, first_line, merged, of_ranks
from meshwright.doctor.free_space import free_space, kept_at_once
from meshwright.doctor.links import _group
from meshwright.doctor.world import ExaminedWorld
from meshwright.planner.memory.states import checkpoint_bytes
from meshwright.spec import Layout, UserError
from meshwright.spec.load import from_tree


def test_equal_findings_are_one_and_failures_come_first() -> None:
    slow = Finding("clocks", False, "a clock is late", "set it")
    fails = Finding("folder", True, "no room", "make room")
    found = merged([[slow], [slow, fails], [slow], [Finding("clocks", False, "other", "set it", (0, 1))]])
    assert [(each.sentence, each.ranks) for each in found] == [
        ("no room", (1,)), ("a clock is late", (0, 1, 2)), ("other", (0, 1)),
    ]  # fmt: skip
    names = ["a"] * 3 + ["b"] * 3
    assert of_ranks((1, 4), names) == "rank 1 on a, rank 4 on b"
    assert of_ranks(range(6), names) == "all 6 ranks"
    assert of_ranks((0, 1, 2, 3, 4), names) == "5 ranks on a, b"
    assert of_ranks((0,), ["a"]) == ""


def test_an_error_of_a_user_is_a_finding_with_its_remedy() -> None:
    found = Finding.of_error("ports", UserError("MASTER_PORT: 0 is not a port; it is low; give another"))
    assert (found.sentence, found.remedy) == ("MASTER_PORT: 0 is not a port; it is low", "give another")
    assert found.fails and first_line(RuntimeError("no route\nhere")) == "no route"
    assert first_line(TimeoutError()) == "TimeoutError"


def test_locked_memory_counts_where_there_is_infiniband(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _which: (8 << 20, 8 << 20))
    assert limits.locked_memory(tmp_path) == []
    (tmp_path / "mlx5_0").mkdir()
    (found,) = limits.locked_memory(tmp_path)
    assert found.fails and "8.39 MB" in found.sentence and "ulimit -l unlimited" in found.remedy
    monkeypatch.setattr(resource, "getrlimit", lambda _which: (resource.RLIM_INFINITY,) * 2)
    assert limits.locked_memory(tmp_path) == []


def test_ranks_of_large_worlds_need_more_open_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _which: (1024, 1024))
    assert limits.open_files(Layout(dp=128), cuda=False) == []
    (found,) = limits.open_files(Layout(dp=512), cuda=False)  # gloo connects each with all others
    assert found.fails and "as root" in found.remedy
    assert limits.open_files(Layout(dp=4096, tp=8), cuda=True) == []  # NCCL does not


def test_shared_memory_fails_nccl_alone(tmp_path: Path) -> None:
    assert limits.shared_memory(2, cuda=True, folder=tmp_path) == []
    (found,) = limits.shared_memory(1 << 30, cuda=True, folder=tmp_path)
    assert found.fails
    (found,) = limits.shared_memory(1 << 30, cuda=False, folder=tmp_path)
    assert not found.fails
    (found,) = limits.shared_memory(1, cuda=False, folder=tmp_path / "none")
    assert "cannot be used" in found.sentence


def run_of(**checkpoint: Any) -> Any:
    return from_tree({"train": {"steps": 100}, "checkpoint": checkpoint})


def test_checkpoints_that_are_there_give_their_place_to_newer_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = ({}, {"every": 0}, {"every": 50, "keep": 5}, {"every": 10, "keep": 2})
    kept = [kept_at_once(run_of(**each)) for each in (*keys, {"every": 10, "keep": 2, "keep_every": 25})]
    assert kept == [4, 1, 2, 3, 7]
    spec = run_of(every=10, keep=1)
    needed = 2 * checkpoint_bytes(spec)

    class Status:
        f_bavail, f_frsize, f_files, f_favail = needed // 4096, 4096, 0, 0

    monkeypatch.setattr("os.statvfs", lambda _path: Status)
    (found,) = free_space(spec, tmp_path, tmp_path)
    assert found.fails and "2 checkpoints of" in found.sentence
    step = tmp_path / "step-00000010"
    step.mkdir()
    (step / "rank-00000.bin").write_bytes(bytes(4096))
    assert free_space(spec, tmp_path, tmp_path) == []
    Status.f_files, Status.f_favail = 100, 3
    (found,) = free_space(spec, tmp_path, tmp_path)
    assert "3 more files" in found.sentence


def test_a_group_is_compared_with_the_others_of_its_axis() -> None:
    world, cpu = ExaminedWorld(Control(), ["h"] * 8, [*"aabbccdd"]), torch.device("cpu")
    members = [(0, 1), (0, 1), (2, 3), (2, 3), (4, 5), (4, 5), (6, 7), (6, 7)]
    times = [0.1, 0.1, 0.11, 0.1, 0.1, 0.45, 0.09, 0.1]
    (found,) = _slow(world, "tensor", cpu, members, None, times)
    assert found.ranks == (4, 5) and not found.fails and "where 105 ms were expected" in found.sentence
    row = _row("tensor", 1 << 22, members, times, None)
    assert (row["slowest"], row["seconds"], row["groups"]) == ([4, 5], 0.45, 4)
    assert _slow(world, "tensor", cpu, members, 0.2, times) == []
    assert (
        _slow(world, "tensor", cpu, members[:4], None, [0.1, 0.1, 9.0, 9.0]) == []
    )  # which of two is right?
    assert _slow(world, "tensor", cpu, members, None, [each / 100 for each in times]) == []  # 4.5 ms


@pytest.mark.parametrize("hosts", range(2, 9))
def test_no_host_has_two_links_of_a_group(hosts: int) -> None:
    for group in range(3):
        ends = [
            end
            for place in range(hosts)
            if _group(place, hosts) == group
            for end in (place, (place + 1) % hosts)
        ]
        assert len(ends) == len(set(ends))
    assert {_group(place, hosts) for place in range(hosts)} == set(range(2 + hosts % 2))
