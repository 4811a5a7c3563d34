"""Snapshots on a peer: hosts that are lost, replaced or added, and damage, under any layout."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from torch import Tensor
from torch.distributed.tensor import Placement, Replicate, Shard

from meshwright.checkpoint import BadCheckpointError, peer_snapshots
from meshwright.checkpoint.slots import HEAD_BYTES
from meshwright.checkpoint.snapshots import Snapshots
from meshwright.comm.mesh import Mesh
from meshwright.spec import Layout
from placed_tensors import blank, check_equal, full_tensors, placed
from ranks import Ranks

PLENTY = 1 << 40


def opened(mesh: Mesh, folder: Path, hosts: str, slots: int = 4) -> list[list[int]]:
    """Descriptors of the slots of this rank's host, of which `hosts` has a letter each."""
    per = mesh.layout.world_size // len(hosts)
    name, flags = hosts[mesh.rank // per], os.O_RDWR | os.O_CREAT
    return [[os.open(folder / f"{name}-{local}-{n}", flags) for n in range(slots)] for local in range(per)]


def tensors_of(step: int, mesh: Mesh, placements: Sequence[Placement]) -> dict[str, Tensor]:
    full = {name: tensor + step for name, tensor in full_tensors().items()}
    return placed(full, mesh.storage, tuple(placements))


def keep(mesh: Mesh, folder: Path, hosts: str, placements: Sequence[Placement], steps: Sequence[int]) -> None:
    kept = Snapshots(opened(mesh, folder, hosts), mesh.control, 1, lambda: PLENTY, [], mesh.world)
    for step in steps:
        kept.save(step, tensors_of(step, mesh, placements), lambda step=step: {"step": step})


def go_on(
    mesh: Mesh, folder: Path, hosts: str, placements: Sequence[Placement], step: int | None, slots: int = 4
) -> None:
    """Load the newest snapshot, which is that of `step`, and keep the next one."""
    world = mesh.world
    kept = Snapshots(opened(mesh, folder, hosts, slots), mesh.control, 1, lambda: PLENTY, [], world)
    assert kept.newest() == step
    if step is None:
        return
    expected = tensors_of(step, mesh, placements)
    target = blank(expected)
    assert kept.load(step, target, lambda state: None) == {"step": step}
    check_equal(target, expected)
    following = tensors_of(step + 1, mesh, placements)
    kept.save(step + 1, following, lambda: {"step": step + 1})
    assert kept.newest() == step + 1


def refuse(mesh: Mesh, folder: Path, hosts: str, step: int) -> None:
    kept = Snapshots(opened(mesh, folder, hosts), mesh.control, 1, lambda: PLENTY, [], mesh.world)
    target = blank(tensors_of(step, mesh, (Shard(0),)))
    with pytest.raises(BadCheckpointError, match="is damaged"):
        kept.load(step, target, lambda state: None)
    check_equal(target, blank(target))


ROWS, COLUMNS = (Shard(0),), (Shard(1),)
CHANGES = {
    "one of two is lost": (4, "ab", 2, "b", ROWS),
    "the first is lost, a spare comes": (4, "ab", 4, "bx", ROWS),
    "a spare comes first": (4, "ab", 4, "xb", COLUMNS),
    "one of four is lost": (4, "abcd", 3, "acd", ROWS),
    "two of four, no neighbours": (8, "abcd", 4, "ac", COLUMNS),
    "one is added": (4, "ab", 6, "abx", ROWS),
    "none is lost": (8, "abcd", 8, "abcd", ROWS),
    "another order and layout": (4, "ab", 4, "ba", COLUMNS),
}


@pytest.mark.parametrize(
    ("change", "rules"),
    [
        pytest.param(change, rules, marks=pytest.mark.full if number % 2 == place else ())
        for number, change in enumerate(CHANGES)
        for place, rules in enumerate(("gloo", "nccl"))
    ],
)
def test_a_run_goes_on_from_memory_with_other_hosts(
    ranks: Ranks, tmp_path: Path, change: str, rules: str
) -> None:
    before, hosts, after, left, placements = CHANGES[change]
    ranks.run(Layout(dp=before), keep, tmp_path, hosts, ROWS, (1, 2), rules=rules)
    ranks.run(Layout(dp=after), go_on, tmp_path, left, placements, 2, rules=rules)


def test_neighbours_that_are_lost_together_take_their_part_along(ranks: Ranks, tmp_path: Path) -> None:
    ranks.run(Layout(dp=8), keep, tmp_path, "abcd", ROWS, (1,))
    ranks.run(Layout(dp=4), go_on, tmp_path, "ad", ROWS, None)


def test_replicas_on_another_host_are_enough(ranks: Ranks, tmp_path: Path) -> None:
    both = (Replicate(), Shard(0))
    ranks.run(Layout(replicate=2, dp=2), keep, tmp_path, "ab", both, (1,))
    assert not any(file.stat().st_size for file in tmp_path.iterdir() if file.name[-1] in "23")
    ranks.run(Layout(dp=2), go_on, tmp_path, "b", ROWS, 1)


def keep_and_die(mesh: Mesh, folder: Path, hosts: str, step: int) -> None:
    """Keep the snapshots of two steps, and begin to copy that of `step`, up to its image."""
    shift = peer_snapshots._shift
    calls = 0

    def dies(*arguments: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == 3 * 2 + 3:
            raise KeyboardInterrupt
        shift(*arguments)

    with patch.object(peer_snapshots, "_shift", dies), pytest.raises(KeyboardInterrupt):
        keep(mesh, folder, hosts, ROWS, (step - 2, step - 1, step))


def test_ranks_that_die_in_a_copy_leave_the_snapshot_before(ranks: Ranks, tmp_path: Path) -> None:
    ranks.run(Layout(dp=4), keep_and_die, tmp_path, "ab", 3)
    for hosts, dp in (("a", 2), ("b", 2), ("ab", 4)):
        left = tmp_path / hosts
        left.mkdir()
        for file in tmp_path.glob(f"[{hosts}]-*"):
            shutil.copy(file, left)
        ranks.run(Layout(dp=dp), go_on, left, hosts, ROWS, 2 if len(hosts) == 1 else 3)


@pytest.mark.parametrize("place", [HEAD_BYTES + 5, -20])
def test_a_flipped_bit_in_a_peer_s_image_is_refused_on_all_ranks(
    ranks: Ranks, tmp_path: Path, place: int
) -> None:
    ranks.run(Layout(dp=4), keep, tmp_path, "abcd", ROWS, (1,))
    file = tmp_path / "c-0-2"  # what the lost host b kept
    content = bytearray(file.read_bytes())
    content[place] ^= 8
    file.write_bytes(content)
    ranks.run(Layout(dp=3), refuse, tmp_path, "acd", 1)
