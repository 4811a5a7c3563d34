"""Seconds of a collective, from where its ranks are: which share a node, and what else uses the links.

A group of n ranks that are `stride` apart has, in a node of d devices, n_local = min(n, d / stride)
members, and as many groups as there are ranks between two of its members work beside it. Its ring enters a
node and leaves it by the interfaces of all its members there (NCCL's channels), so that a message of the
whole crosses nodes at n_local times an interface's rate, and within a node at the link's. Rings take a
latency for each of their ranks; an all-reduce of few bytes goes through a tree (Thakur et al. 2005; Sanders
et al. 2009; NVIDIA 2019, NCCL 2.4). Where a machine's own collectives were measured, their times count.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from math import ceil, log2

from meshwright.hardware.cluster import Cluster, Level
from meshwright.hardware.measurements import collective_seconds
from meshwright.planner.group_shapes import GroupShape
from meshwright.planner.traffic.messages import Message


@dataclass(frozen=True)
class Path:
    """What a group's ring runs over."""

    bandwidth: float
    """Bytes a second of the whole ring."""
    reduced: float
    """Seconds a byte of half an all-reduce, which crosses each level once for each of its groups."""
    once: float
    """Seconds of latency all around it."""
    tree: float
    """Seconds of latency up a tree."""
    level: str
    """The slowest level's name."""
    exchanged: float
    """Seconds a byte of an all-to-all, each rank's bytes."""
    trip: float
    """Seconds of an all-to-all's latency."""


class CollectiveCosts:
    """Collectives of one cluster, for groups whose neighbours' groups talk at the same time."""

    def __init__(self, cluster: Cluster, network: float = 1.0, flat_rings: bool = False) -> None:
        self.cluster = cluster
        self._network, self._flat = network, flat_rings
        self.path = cache(self._ring)
        self._rate = cluster.device.rates.link

    def contention(self, operation: str) -> float:
        """Seconds that compute loses for each second of a collective beside it, as measured; else all."""
        known = self.cluster.measured
        return 1.0 if known is None else known.collective_compute.get(operation, 1.0)

    @property
    def slowed(self) -> float:
        """How many times as long a collective takes beside compute, as measured; else once."""
        known = self.cluster.measured
        return 1.0 if known is None else known.overlap_collective or 1.0

    def rate(self, level: Level) -> float:
        """Bytes a second that a device's collectives send over a level, while all of its group do."""
        share = self._rate if level is self.cluster.levels[0] else self.cluster.device.rates.network
        return level.link.bandwidth / level.oversubscription * share

    def members(self, group: GroupShape) -> Iterator[tuple[Level, int, int]]:
        """(level, members of a group in one of its groups, the same one level further in) where it grows."""
        inner = 1
        for level in self.cluster.levels:
            last = level is self.cluster.levels[-1]
            here = group.ranks if last else min(group.ranks, max(1, level.devices // group.stride))
            if here > inner:
                yield level, here, inner
                inner = here

    def interfaces(self, inner: int) -> int:
        """How many devices' interfaces a ring uses out of a group in which it has `inner` members."""
        return 1 if self._flat else inner

    def _ring(self, group: GroupShape) -> Path:
        bandwidth, reduced, once, tree, exchanged, trip = float("inf"), 0.0, 0.0, 0.0, 0.0, 0.0
        slowest = self.cluster.levels[0].name
        for level, here, inner in self.members(group):
            rate = self.rate(level)
            # Each rank sends each other the same; what leaves a node goes through the rank's own interface.
            exchanged = max(exchanged, (here - inner) / group.ranks / rate)
            trip += level.link.latency * ceil(log2(1 + here / inner))
            if level is not self.cluster.levels[0]:
                rate *= self._network * self.interfaces(inner)
            if rate < bandwidth:
                bandwidth, slowest = rate, level.name
            reduced = max(reduced, (1 - inner / here) / rate)
            once += (ceil(group.ranks / inner) - ceil(group.ranks / here)) * level.link.latency
            tree += ceil(log2(ceil(here / inner))) * level.link.latency
        return Path(bandwidth, reduced, once, tree, slowest, exchanged, trip)

    def seconds(self, message: Message) -> float:
        """Seconds of one call, with nothing else on its links."""
        if message.operation == "send":
            return self.message(message.size, message.group.stride)
        return self.collective(message.operation, message.size, message.group)

    def collective(self, operation: str, size: float, group: GroupShape) -> float:
        """Seconds of one collective of a whole of `size` bytes; of an all-to-all, of one rank's bytes."""
        n = group.ranks
        if n == 1 or size <= 0:
            return 0.0
        if self.cluster.measured is not None:
            outermost = [level for level, _, _ in self.members(group)][-1]
            known = self._measured(operation, n, outermost, size)
            if known is not None:
                return known
        over = self.path(group)
        if operation == "all_to_all":
            return size * over.exchanged + over.trip
        if operation == "all_reduce":
            return 2 * size * over.reduced + 2 * min(over.once, over.tree)
        return size * (n - 1) / n / over.bandwidth + over.once

    def message(self, size: float, stride: int) -> float:
        """Seconds of `size` bytes from a rank to the one `stride` further on."""
        level = self.between(stride)
        known = self._measured("send", 2, level, size)
        return level.link.latency + size / self.rate(level) if known is None else known

    def _measured(self, operation: str, ranks: int, level: Level, size: float) -> float | None:
        """The time between those that were measured, if the operation was at that level."""
        if self.cluster.measured is None:
            return None
        return collective_seconds(self.cluster.measured, operation, ranks, level.name, size)

    def between(self, stride: int) -> Level:
        """The innermost level whose groups hold neighbours that are `stride` apart."""
        return next(
            (level for level in self.cluster.levels if stride < level.devices), self.cluster.levels[-1]
        )
