"""Seconds of a collective, from where its ranks are: which share a node, and what else uses the links.

A group of n ranks that are `stride` apart has n_local = min(n, d / stride) members in a node of d devices,
and `stride` such groups use the node's links at once. Its ring enters and leaves a node through the
interfaces of all its members there (NCCL's channels), so a message crosses nodes at n_local times the rate of
an interface, and a node at the rate of its link. A ring takes one latency for each of its ranks; an
all-reduce of few bytes goes through a tree (Thakur et al. 2005; Sanders et al. 2009; NVIDIA 2019, NCCL 2.4).
Times measured on the machine itself take precedence.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from math import ceil, log2

from meshwright.hardware.cluster import Cluster, Level
from meshwright.hardware.measurements import collective_seconds
from meshwright.planner.group_shapes import GroupShape
from meshwright.planner.traffic.message import Message


@dataclass(frozen=True)
class GroupLinks:
    """The links that a group's collectives run over."""

    bandwidth: float
    """Bytes per second of a ring around the group."""
    half_all_reduce: float
    """Seconds per byte of half an all-reduce, which crosses each level once for each group inside it."""
    ring_latency: float
    """Seconds of latency around the ring."""
    tree_latency: float
    """Seconds of latency up a tree."""
    level: str
    """Name of the outermost level."""
    all_to_all: float
    """Seconds per byte of an all-to-all, counting one rank's bytes."""
    all_to_all_latency: float
    """Seconds of latency of an all-to-all."""


class CollectiveCosts:
    """Collectives on one cluster, of groups that all communicate at the same time.

    With `flat_rings` a ring crosses each node through one interface.
    """

    def __init__(self, cluster: Cluster, flat_rings: bool = False) -> None:
        self.cluster = cluster
        self._flat = flat_rings
        self.group_links = cache(self._group_links)

    def contention(self, operation: str) -> float:
        """Compute slowdown per second of an overlapped collective, 0 to 1; 1 if not measured."""
        known = self.cluster.measured
        return 1.0 if known is None else known.collective_compute.get(operation, 1.0)

    @property
    def slowed(self) -> float:
        """Slowdown factor of a collective that overlaps compute, at least 1; 1 if not measured."""
        known = self.cluster.measured
        return 1.0 if known is None else known.overlap_collective or 1.0

    def rate(self, level: Level) -> float:
        """Bytes per second that a device sends over a level while all devices of its group do."""
        rates = self.cluster.device.rates
        return level.loaded * (rates.link if level is self.cluster.levels[0] else rates.network)

    def members(self, group: GroupShape) -> Iterator[tuple[Level, int, int]]:
        """(level, ranks of the group inside it, those one level further in) per level that it crosses."""
        inner = 1
        for level in self.cluster.levels:
            last = level is self.cluster.levels[-1]
            here = group.ranks if last else min(group.ranks, max(1, level.devices // group.stride))
            if here > inner:
                yield level, here, inner
                inner = here

    def interfaces(self, inner: int) -> int:
        """Interfaces through which a ring leaves a node that holds `inner` of its members."""
        return 1 if self._flat else inner

    def _group_links(self, group: GroupShape) -> GroupLinks:
        bandwidth, half_all_reduce, all_to_all = float("inf"), 0.0, 0.0
        ring_latency, tree_latency, all_to_all_latency = 0.0, 0.0, 0.0
        level = self.cluster.levels[0]
        for level, here, inner in self.members(group):
            rate = self.rate(level)
            # A rank sends every other as much; what leaves a node goes through the rank's own interface.
            all_to_all = max(all_to_all, (here - inner) / group.ranks / rate)
            all_to_all_latency += level.link.latency * ceil(log2(1 + here / inner))
            if level is not self.cluster.levels[0]:
                rate *= self.interfaces(inner)
            bandwidth = min(bandwidth, rate)
            half_all_reduce = max(half_all_reduce, (1 - inner / here) / rate)
            ring_latency += (ceil(group.ranks / inner) - ceil(group.ranks / here)) * level.link.latency
            tree_latency += ceil(log2(ceil(here / inner))) * level.link.latency
        return GroupLinks(
            bandwidth, half_all_reduce, ring_latency, tree_latency, level.name, all_to_all, all_to_all_latency
        )

    def seconds(self, message: Message) -> float:
        """Seconds of one call, with nothing else on its links."""
        if message.operation in ("send", "shift"):
            return self.to_next(message.operation, message.size, message.group)
        return self.collective(message.operation, message.size, message.group)

    def collective(self, operation: str, size: float, group: GroupShape) -> float:
        """Seconds of one collective on a tensor of `size` bytes; for an all-to-all, those of one rank."""
        n = group.ranks
        if n == 1 or size <= 0:
            return 0.0
        links = self.group_links(group)
        known = collective_seconds(self.cluster.measured, operation, n, links.level, size)
        if known is not None:
            return known
        if operation == "all_to_all":
            return size * links.all_to_all + links.all_to_all_latency
        if operation == "all_reduce":
            return 2 * size * links.half_all_reduce + 2 * min(links.ring_latency, links.tree_latency)
        return size * (n - 1) / n / links.bandwidth + links.ring_latency

    def to_next(self, operation: str, size: float, group: GroupShape) -> float:
        """Seconds of a send of `size` bytes between neighbours of a group, or of the shift of all its ranks.

        They are those of the slowest link between neighbours.
        """
        level = self.outermost(group)
        ranks = 2 if operation == "send" else group.ranks
        known = collective_seconds(self.cluster.measured, operation, ranks, level.name, size)
        return level.link.latency + size / self.rate(level) if known is None else known

    def outermost(self, group: GroupShape) -> Level:
        """The outermost level that a group crosses, although most neighbours may share an inner one."""
        return max((level for level, _, _ in self.members(group)), key=self.cluster.levels.index)
