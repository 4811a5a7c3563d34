"""The first collective of each group, and its rate against that of the hardware file."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass
from datetime import timedelta
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from meshwright.comm import collectives
from meshwright.comm.mesh import Axis, build_mesh
from meshwright.comm.process_groups import Groups
from meshwright.doctor.finding import Finding, of_ranks
from meshwright.doctor.world import World
from meshwright.hardware.cluster import Cluster
from meshwright.planner.cost.collectives import CollectiveCosts
from meshwright.planner.group_shapes import axes
from meshwright.spec.layout import Layout
from meshwright.units import gigabytes, seconds

BYTES, BYTES_CUDA = 4 << 20, 64 << 20
"""Bytes of an all-reduce whose rate counts."""
REPEATS = 2
"""Messages after the first, of which the fastest counts: other work only ever adds to a time."""
SLOWER = 4.0
"""Times as long as expected that a message may take: machines that others use, too, vary by two."""
SHORTEST_S = 5e-3
"""A message that takes no longer than this is not called slow: on processors a rank may wait for a core."""
LEAST_COMPARED = 3
"""Groups, or links, of which the median is what each of them is compared with."""
REMEDY = (
    "look at these hosts' interfaces and cables (ethtool, ibstat), at what else uses them, and at "
    "GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME, or leave the hosts out"
)


@dataclass(frozen=True)
class Timed:
    """What one rank has measured of its group: seconds of the first all-reduce, and of the fastest.

    `error` says why there are none.
    """

    members: tuple[int, ...]
    first: float
    best: float
    error: str | None = None


class GroupError(Exception):
    """A group in which a collective has failed: no other is tried."""

    def __init__(self, found: Sequence[Finding]) -> None:
        super().__init__("a collective has failed")
        self.found = found


def group_rates(
    world: World,
    layout: Layout,
    experts: bool,
    device: torch.device,
    cluster: Cluster | None,
    limit: timedelta,
) -> tuple[list[dict[str, Any]], list[Finding]]:
    """On rank 0, a row for each axis of several ranks, with its slowest group, and what is found.

    Every rank of the process group calls this. `experts` tells whether the model has any;
    `cluster` has the hardware that is expected. Raises
    `GroupError` on all ranks where a collective fails, or does not end within the limit.
    """
    mesh = build_mesh(layout, device, groups=Groups(device.type, limit), experts=experts)
    assert mesh is not None  # the layout has as many ranks as the world
    costs = None if cluster is None else CollectiveCosts(cluster.resized(layout.world_size))
    size = BYTES if device.type == "cpu" else BYTES_CUDA
    rows: list[dict[str, Any]] = []
    found: list[Finding] = []
    seen: set[dist.ProcessGroup | None] = {None}
    for name, shape in axes(layout)._asdict().items():
        axis = getattr(mesh, name)
        if axis.group in seen:  # such as that of the experts' data ranks and of all data ranks
            continue
        seen.add(axis.group)
        own = _timed(axis, size)
        timed = [Timed(*each) for each in world.ranks.gather(astuple(own))]
        failed = [_failed(name, own)] if own.error is not None else []
        if world.ranks.any(bool(failed)):
            raise GroupError(found + failed)
        if timed:
            expected = None if costs is None else costs.collective("all_reduce", size, shape)
            groups = {tuple(each.members): each for each in sorted(timed, key=lambda each: each.best)}
            rows.append(_row(name, size, list(groups.values()), expected))
            found += _slow(world, rows[-1], groups.values())
    return rows, found


def _timed(axis: Axis, size: int) -> Timed:
    """Sum `size` bytes over an axis, a first time and then some more."""
    assert axis.group is not None  # it has several ranks
    members = tuple(dist.get_process_group_ranks(axis.group))
    tensor = torch.zeros(size // 4, device=axis.device)

    def once() -> float:
        begun = time.perf_counter()
        collectives.start_all_reduce(tensor, axis).wait()
        if axis.device.type == "cuda":
            torch.cuda.current_stream().synchronize()
        return time.perf_counter() - begun

    try:
        return Timed(members, once(), min(once() for _ in range(REPEATS)))
    except RuntimeError as error:  # gloo's and NCCL's
        return Timed(members, 0.0, 0.0, str(error).strip().splitlines()[0])


def _failed(name: str, own: Timed) -> Finding:
    """The finding of a group whose first collective has failed on this rank."""
    return Finding(
        "collectives",
        True,
        f"the first all-reduce of the {name} axis, over ranks {', '.join(map(str, own.members))}, has "
        f"failed: {own.error}",
        "see that their hosts reach each other, on the interfaces that GLOO_SOCKET_IFNAME and "
        "NCCL_SOCKET_IFNAME name; NCCL_DEBUG=INFO says which NCCL takes",
    )


def _row(name: str, size: int, groups: Sequence[Timed], expected: float | None) -> dict[str, Any]:
    """What was measured of an axis: its groups by their fastest all-reduce, of which the last is the slowest.

    Without a hardware file the median of three groups or more is what is expected.
    """
    slowest = groups[-1]
    if expected is None and len(groups) >= LEAST_COMPARED:
        expected = median(each.best for each in groups)
    return {
        "axis": name,
        "ranks": len(slowest.members),
        "groups": len(groups),
        "slowest": list(slowest.members),
        "first_seconds": max(each.first for each in groups),
        "bytes": size,
        "seconds": slowest.best,
        "expected_seconds": expected,
    }


def _slow(world: World, row: Mapping[str, Any], groups: Iterable[Timed]) -> list[Finding]:
    """The groups of an axis that take several times as long as expected."""
    expected, size = row["expected_seconds"], row["bytes"]
    if expected is None:
        return []
    return [
        Finding(
            "collectives",
            False,
            f"an all-reduce of {gigabytes(size)} over the {row['axis']} axis, "
            f"{of_ranks(group.members, world.names)}, takes {seconds(group.best)} "
            f"({gigabytes(size / group.best)}/s), where {seconds(expected)} were expected",
            REMEDY,
            group.members,
        )
        for group in groups
        if group.best > max(SLOWER * expected, SHORTEST_S)
    ]
