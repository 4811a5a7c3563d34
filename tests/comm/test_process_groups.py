"""Groups of several meshes in one world."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from meshwright.comm.mesh import build_mesh
from meshwright.comm.process_groups import Groups
from meshwright.spec import Layout
from ranks import forks

RANKS = 4
LIMIT = timedelta(seconds=60)
LAYOUTS = (
    {"pp": 4},
    {"pp": 2, "dp": 2, "zero": 1},
    {"pp": 2},
    {"pp": 4, "schedule": "zb-v"},
    {"tp": 2, "dp": 2},
)


def sum_over_groups(rank: int, store: str) -> None:
    """Build meshes one after another, each with groups of its own, and add up ranks in their groups."""
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS, timeout=LIMIT)
    for given in LAYOUTS:
        layout = Layout.model_validate(given)
        mesh = build_mesh(layout, torch.device("cpu"), groups=Groups("cpu", LIMIT))
        assert (mesh is None) == (rank >= layout.world_size)
        for axis in [] if mesh is None else [mesh.pipeline, mesh.ends, mesh.shard, mesh.tensor]:
            if axis is not None and axis.group is not None:
                found = torch.tensor([float(rank)])
                dist.all_reduce(found, group=axis.group)
                assert float(found) == sum(dist.get_process_group_ranks(axis.group)), (given, axis.name)
    dist.destroy_process_group()


def test_meshes_may_follow_each_other(tmp_path: Path) -> None:
    """A second mesh hung where the first left a rank without a group, since torch names groups by count."""
    store = str(tmp_path / "store")
    forks()
    mp.start_processes(sum_over_groups, args=(store,), nprocs=RANKS, start_method="forkserver")
