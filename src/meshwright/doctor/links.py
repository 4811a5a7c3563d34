"""The link from each host to the next: all hosts send at once, around a ring."""

from __future__ import annotations

import time
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from meshwright.doctor.collectives import (
    BYTES,
    BYTES_CUDA,
    LEAST_COMPARED,
    REMEDY,
    REPEATS,
    SHORTEST_S,
    SLOWER,
    GroupError,
)
from meshwright.doctor.finding import Finding
from meshwright.doctor.world import World
from meshwright.hardware.cluster import NETWORKS, Cluster
from meshwright.units import gigabytes


def link_rates(
    world: World, device: torch.device, cluster: Cluster | None
) -> tuple[list[dict[str, Any]], list[Finding]]:
    """On rank 0, a row for each link, and those that are slow. Every rank of the process group calls this.

    A link is compared with the first level of the cluster that leaves a node, or without one with the median
    of three links or more. Raises `GroupError` on all ranks where a message fails.
    """
    if len(world.leaders) == 1:
        return [], []
    size = BYTES if device.type == "cpu" else BYTES_CUDA
    failed: list[Finding] = []
    taken = _received(world, device, size, failed) if world.leads else 0.0
    times = world.ranks.gather(taken)
    if world.ranks.any(bool(failed)):
        raise GroupError(failed)
    if not times:
        return [], []
    expected = None if cluster is None else _of_network(cluster, size)
    if expected is None and len(world.leaders) >= LEAST_COMPARED:
        expected = median(times[rank] for rank in world.leaders)
    rows, found = [], []
    for place, to in enumerate(world.leaders):
        sender, spent = world.leaders[place - 1], times[to]
        row = {"from": sender, "to": to, "bytes": size, "seconds": spent, "expected_seconds": expected}
        rows.append(row)
        if expected is not None and spent > max(SLOWER * expected, SHORTEST_S):
            found.append(
                Finding(
                    "links",
                    False,
                    f"the link from {world.named(sender)} to {world.named(to)} carries "
                    f"{gigabytes(size / spent)}/s, where {gigabytes(size / expected)}/s were expected",
                    REMEDY,
                    (sender, to),
                )
            )
    return rows, found


def _received(world: World, device: torch.device, size: int, failed: list[Finding]) -> float:
    """Seconds in which this host has received from the one before it, while it sends to the next; 0 with a
    finding where that has failed."""
    hosts, at = world.leaders, world.leaders.index(world.rank)
    before, following = hosts[at - 1], hosts[(at + 1) % len(hosts)]
    sent, received = (torch.zeros(size // 4, device=device) for _ in range(2))

    def once() -> float:
        begun = time.perf_counter()
        moves = [dist.P2POp(dist.irecv, received, before), dist.P2POp(dist.isend, sent, following)]
        receiving, *others = dist.batch_isend_irecv(moves)
        receiving.wait()
        if device.type == "cuda":
            torch.cuda.current_stream().synchronize()
        taken = time.perf_counter() - begun
        for each in others:
            each.wait()
        return taken

    try:
        once()  # it connects
        return min(once() for _ in range(REPEATS))
    except RuntimeError as error:  # gloo's and NCCL's
        reason = str(error).strip().splitlines()[0]
        sentence = f"no message comes from {world.named(before)} to {world.named(world.rank)}: {reason}"
        failed.append(Finding("links", True, sentence, REMEDY, (before, world.rank)))
        return 0.0


def _of_network(cluster: Cluster, size: int) -> float | None:
    """Seconds of a message over the cluster's network; None where it has none."""
    for level in cluster.hierarchy:
        if level.kind in NETWORKS:
            return level.link.latency + size / (level.link.bandwidth * cluster.device.rates.network)
    return None
