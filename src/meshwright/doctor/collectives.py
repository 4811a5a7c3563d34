"""The first collective of each group, and its rate against that of the hardware file."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from functools import partial
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from meshwright.comm import collectives
from meshwright.comm.mesh import Axis, build_mesh
from meshwright.comm.process_groups import Groups
from meshwright.doctor.finding import Finding, first_line, of_ranks
from meshwright.doctor.timing import LEAST_COMPARED, REMEDY, is_slow, message_bytes, settled, timed
from meshwright.doctor.world import ExaminedWorld
from meshwright.hardware.cluster import Cluster
from meshwright.planner.cost.collectives import CollectiveCosts
from meshwright.planner.group_shapes import axes
from meshwright.spec.layout import Layout
from meshwright.units import gigabytes, seconds

Members = tuple[int, ...]
"""The ranks of a group."""


def group_rates(
    world: ExaminedWorld,
    layout: Layout,
    experts: bool,
    device: torch.device,
    cluster: Cluster | None,
    limit: timedelta,
) -> tuple[list[dict[str, Any]], list[Finding]]:
    """On rank 0, a row for each axis of several ranks, with its slowest group, and what is found.

    Every rank of the process group calls this. `experts` tells whether the model has any; `cluster` has the
    hardware that is expected. Raises `MessageError` on all ranks where a collective fails, or does not end
    within the limit.
    """
    mesh = build_mesh(layout, device, groups=Groups(device.type, limit), experts=experts)
    assert mesh is not None  # the layout has as many ranks as the world
    costs = None if cluster is None else CollectiveCosts(cluster.resized(layout.world_size))
    size = message_bytes(device)
    rows: list[dict[str, Any]] = []
    found: list[Finding] = []
    seen: set[dist.ProcessGroup | None] = {None}
    for name, shape in axes(layout)._asdict().items():
        axis = getattr(mesh, name)
        if axis.group in seen:  # such as that of the experts' data ranks and of all data ranks
            continue
        seen.add(axis.group)
        known = None if costs is None else costs.collective("all_reduce", size, shape)
        row, slow = _axis(world, axis, name, size, known)
        rows += row
        found += slow
    return rows, found


def _axis(
    world: ExaminedWorld, axis: Axis, name: str, size: int, known: float | None
) -> tuple[list[dict[str, Any]], list[Finding]]:
    """On rank 0, the row of one axis, and its slow groups."""
    assert axis.group is not None  # it has several ranks
    own, taken = tuple(dist.get_process_group_ranks(axis.group)), list[float]()
    tensor = torch.zeros(size // 4, device=axis.device)

    def send(count: int, failed: list[Finding]) -> float:
        try:
            taken.append(timed(lambda: collectives.start_all_reduce(tensor, axis).wait(), count, axis.device))
        except RuntimeError as error:  # gloo's and NCCL's
            failed.append(_failed(name, own, error))
            return 0.0
        return taken[-1]

    members = [tuple(each) for each in world.ranks.broadcast(world.ranks.gather(own))]
    judge = partial(_slow, world, name, axis.device, members, known)
    times, found = settled(world, send, judge)
    first = max([0.0, *world.ranks.gather(taken[0])])
    return [_row(name, size, members, times, known) | {"first_seconds": first}] if times else [], found


def _failed(name: str, members: Members, error: RuntimeError) -> Finding:
    """The finding of a group whose collective has failed on this rank."""
    return Finding(
        "collectives",
        True,
        f"an all-reduce of the {name} axis, over ranks {', '.join(map(str, members))}, has failed: "
        f"{first_line(error)}",
        "see that their hosts reach each other, on the interfaces that GLOO_SOCKET_IFNAME and "
        "NCCL_SOCKET_IFNAME name; NCCL_DEBUG=INFO says which NCCL takes",
    )


def _by_group(members: Sequence[Members], times: Sequence[float]) -> dict[Members, float]:
    """The time of each group, that of its slowest rank, the shortest first."""
    found: dict[Members, float] = {}
    for group, taken in zip(members, times, strict=True):
        found[group] = max(taken, found.get(group, 0.0))
    return dict(sorted(found.items(), key=lambda pair: pair[1]))


def _expected(groups: dict[Members, float], known: float | None) -> float | None:
    """The seconds that are known of the hardware, or else the median of three groups or more."""
    return median(groups.values()) if known is None and len(groups) >= LEAST_COMPARED else known


def _row(
    name: str, size: int, members: Sequence[Members], times: Sequence[float], known: float | None
) -> dict[str, Any]:
    groups = _by_group(members, times)
    slowest, taken = list(groups.items())[-1]
    return {
        "axis": name,
        "ranks": len(slowest),
        "groups": len(groups),
        "slowest": list(slowest),
        "bytes": size,
        "seconds": taken,
        "expected_seconds": _expected(groups, known),
    }


def _slow(
    world: ExaminedWorld,
    name: str,
    device: torch.device,
    members: Sequence[Members],
    known: float | None,
    times: list[float],
) -> list[Finding]:
    """The groups of an axis that take several times as long as expected."""
    size = message_bytes(device)
    groups = _by_group(members, times)
    expected = _expected(groups, known)
    return [
        Finding(
            "collectives",
            False,
            f"an all-reduce of {gigabytes(size)} over the {name} axis, {of_ranks(group, world.names)}, takes "
            f"{seconds(taken)} ({gigabytes(size / taken)}/s), where {seconds(expected)} were expected",
            REMEDY,
            group,
        )
        for group, taken in groups.items()
        if expected is not None and is_slow(taken, expected, device)
    ]
