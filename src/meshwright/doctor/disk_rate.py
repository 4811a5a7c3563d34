"""The rate at which all ranks write together, against the size of a checkpoint and the time between two."""

from __future__ import annotations

import os
import secrets
import time
from math import ceil
from pathlib import Path
from typing import Any

from meshwright.checkpoint.disk import TEMPORARY, Disk
from meshwright.checkpoint.interval import MOST_LOST_S
from meshwright.doctor.finding import Finding
from meshwright.doctor.shared_folder import unusable
from meshwright.doctor.world import ExaminedWorld
from meshwright.hardware.cluster import Cluster
from meshwright.planner.cost.model import CostModel
from meshwright.planner.explain.candidate import Candidate
from meshwright.planner.memory.states import checkpoint_bytes
from meshwright.spec import RunSpec, UserError
from meshwright.units import counted, gigabytes, seconds

HOST_BYTES = 64 << 20
"""Bytes that the ranks of a host write together, at most."""
LEAST_SHARE = 16
"""They fill no more than one part in so many of what is free."""


def write_rate(world: ExaminedWorld, there: Path) -> tuple[float | None, list[Finding]]:
    """(bytes per second of all ranks together, None where one could not write; findings of this rank).

    The rate is rank 0's alone. As a save does, each rank writes a file and syncs it; of all ranks the slowest
    counts. Every rank calls this, and nothing stays.
    """
    status = os.statvfs(there)
    free = status.f_bavail * status.f_frsize // LEAST_SHARE
    count = min(HOST_BYTES, free) // world.local_ranks
    file = there / f"{TEMPORARY}doctor-{secrets.token_hex(6)}"
    found: list[Finding] = []
    data = memoryview(os.urandom(1 << 20))
    blocks = [data[: min(len(data), count - at)] for at in range(0, count, len(data))]
    world.ranks.barrier()
    begun = time.perf_counter()
    try:
        Disk().write_file(file, blocks)
    except OSError as error:
        found.append(unusable(there, "write a file in", error))
    finally:
        taken = time.perf_counter() - begun
        file.unlink(missing_ok=True)
    rows = world.ranks.gather([0 if found else count, taken])
    if not rows or not all(size for size, _ in rows):
        return None, found
    return sum(size for size, _ in rows) / max(taken for _, taken in rows), found


def saves(spec: RunSpec, rate: float, cluster: Cluster | None) -> tuple[dict[str, Any], list[Finding]]:
    """(bytes and seconds of a save, seconds between two as far as they are known; findings).

    The time of a step is the planner's, on the cluster.
    """
    size, every = checkpoint_bytes(spec), spec.checkpoint.every
    save, step = size / rate, step_seconds(spec, cluster)
    interval = every * step if isinstance(every, int) and every and step is not None else None
    facts = {"checkpoint_bytes": size, "save_seconds": save, "interval_seconds": interval}
    if interval is not None and save > interval:
        assert step is not None
        sentence = f"and one is due every {counted(int(every), 'steps')}, about {seconds(interval)}"
        remedy = (
            f"set checkpoint.every to {ceil(2 * save / step):,} or more, or checkpoint.dir to a faster disk"
        )
    elif every == "auto" and save > MOST_LOST_S:
        sentence = "so that a failure costs at least as much training"
        remedy = "set checkpoint.dir to a faster disk, or one that more hosts write to at once"
    else:
        return facts, []
    written = f"a checkpoint of {gigabytes(size)} takes {seconds(save)} to write at {gigabytes(rate)}/s"
    return facts, [Finding("disk rate", False, f"{written}, {sentence}", remedy)]


def step_seconds(spec: RunSpec, cluster: Cluster | None) -> float | None:
    """Seconds of a step by the plan for a cluster; None without one, or where that does not count the run."""
    if cluster is None:
        return None
    try:
        return Candidate(spec, CostModel(cluster.resized(spec.layout.world_size))).seconds
    except UserError:
        return None
