"""The link from each host to the next, around a ring.

A host sends or receives, and never both: what confirms messages one way would wait behind messages the other
way on a slow link, and make the link before it look slow, too. So links take turns, in two or three groups.
"""

from __future__ import annotations

from functools import partial
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from meshwright.doctor.finding import Finding, first_line
from meshwright.doctor.timing import LEAST_COMPARED, REMEDY, is_slow, message_bytes, settled, timed
from meshwright.doctor.world import ExaminedWorld
from meshwright.hardware.cluster import NETWORKS, Cluster
from meshwright.units import gigabytes

GROUPS = 3
"""Groups of links of a ring, in each of which no host has two links."""


def link_rates(
    world: ExaminedWorld, device: torch.device, cluster: Cluster | None
) -> tuple[list[dict[str, Any]], list[Finding]]:
    """On rank 0, a row for each link, and those that are slow. Every rank of the process group calls this.

    A link is compared with the first level of the cluster that leaves a node, or without one with the median
    of three links or more. Raises `MessageError` on all ranks where a message fails.
    """
    if len(world.leaders) == 1:
        return [], []
    size = message_bytes(device)
    known = None if cluster is None else _of_network(cluster, size)
    judge = partial(_slow, world, device, known)
    times, found = settled(world, partial(_turn, world, device), judge)
    return _rows(world, size, known, times) if times else [], found


def _rows(world: ExaminedWorld, size: int, known: float | None, times: list[float]) -> list[dict[str, Any]]:
    """A row for each link: what it took, by the rank that has received, and what was expected."""
    expected = known
    if expected is None and len(world.leaders) >= LEAST_COMPARED:
        expected = median(times[rank] for rank in world.leaders)
    return [
        {
            "from": world.leaders[place - 1],
            "to": to,
            "bytes": size,
            "seconds": times[to],
            "expected_seconds": expected,
        }
        for place, to in enumerate(world.leaders)
    ]


def _slow(
    world: ExaminedWorld, device: torch.device, known: float | None, times: list[float]
) -> list[Finding]:
    """The links that take several times as long as expected."""
    size = message_bytes(device)
    return [
        Finding(
            "links",
            False,
            f"the link from {world.named(row['from'])} to {world.named(row['to'])} carries "
            f"{gigabytes(size / row['seconds'])}/s, where {gigabytes(size / row['expected_seconds'])}/s were "
            f"expected",
            REMEDY,
            (row["from"], row["to"]),
        )
        for row in _rows(world, size, known, times)
        if is_slow(row["seconds"], row["expected_seconds"], device)
    ]


def _turn(world: ExaminedWorld, device: torch.device, count: int, failed: list[Finding]) -> float:
    """Seconds in which this host has received from the one before it; 0 on ranks that do not lead."""
    hosts = world.leaders
    at = hosts.index(world.rank) if world.leads else None
    tensor, taken = torch.zeros(message_bytes(device) // 4, device=device), 0.0
    for group in range(GROUPS):
        world.ranks.barrier()
        if at is None or failed:
            continue
        if _group(at, len(hosts)) == group:
            _send(world, tensor, count, hosts[(at + 1) % len(hosts)], True, failed)
        elif _group((at - 1) % len(hosts), len(hosts)) == group:
            taken = _send(world, tensor, count, hosts[at - 1], False, failed)
    return taken


def _send(
    world: ExaminedWorld, tensor: torch.Tensor, count: int, peer: int, sends: bool, failed: list[Finding]
) -> float:
    """Seconds of the shortest of some messages to a rank, or from it."""

    def call() -> None:
        for each in dist.batch_isend_irecv([dist.P2POp(dist.isend if sends else dist.irecv, tensor, peer)]):
            each.wait()

    try:
        return timed(call, count, tensor.device)
    except RuntimeError as error:  # gloo's and NCCL's
        pair = (world.rank, peer) if sends else (peer, world.rank)
        reason = first_line(error)
        sentence = f"no message comes from {world.named(pair[0])} to {world.named(pair[1])}: {reason}"
        failed.append(Finding("links", True, sentence, REMEDY, pair))
        return 0.0


def _group(place: int, hosts: int) -> int:
    """The group of links of which that from host `place` to the next is one."""
    return 2 if hosts % 2 and place == hosts - 1 else place % 2


def _of_network(cluster: Cluster, size: int) -> float | None:
    """Seconds of a message over the cluster's network; None where it has none."""
    for level in cluster.hierarchy:
        if level.kind in NETWORKS:
            return level.link.latency + size / (level.link.bandwidth * cluster.device.rates.network)
    return None
