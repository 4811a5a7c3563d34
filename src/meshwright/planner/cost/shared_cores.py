"""Pipelines whose ranks share a host's cores: who waits leaves its core to the others.

Where each rank has a device of its own, a bubble is lost time. Where ranks share cores, a step takes about
the longer of its critical path, at the speed of a rank that has a core to itself, and all ranks' work over
all cores. Both follow from processor sharing (Kleinrock 1967): here the actions of a schedule are run event
by event, at a speed that depends on how many ranks of the host compute at that moment. Durations are those
while all ranks of a host compute, as `meshwright profile` takes them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from statistics import median

from meshwright.hardware.cluster import Cluster
from meshwright.schedule import Schedule, StageCost
from meshwright.schedule.dependency_graph import flow_of


@dataclass(frozen=True)
class SharedCores:
    """What ranks of a host get of its cores: the speed of each over that at which all compute."""

    ranks: int
    """On a host."""
    cores: float
    alone: float
    """Speed of a rank while the others wait, over that while all compute."""

    def speed(self, active: int) -> float:
        """Of each of so many ranks, while the others wait."""
        full = min(self.cores, self.ranks)
        if active >= full:
            return max(1.0, self.ranks / active)
        most = max(self.alone, self.ranks / full)
        return most + (self.ranks / full - most) * (active - 1) / (full - 1)


def shared_cores(cluster: Cluster) -> SharedCores | None:
    """How the hosts of a cluster are shared; None where each rank has its device."""
    if cluster.device.kind != "cpu" or cluster.sharing == 1:
        return None
    ranks, cores = cluster.sharing, cluster.device.units
    known, ratios = cluster.measured, [ranks / min(cores, ranks)]
    if known is not None and known.ranks == ranks:
        together = {point[:-1]: point.seconds for point in known.matmul}
        alone = known.matmul_alone
        ratios = [together[p[:-1]] / p.seconds for p in alone if p[:-1] in together] or ratios
    return SharedCores(ranks, cores, min(float(ranks), median(ratios)))


@dataclass(frozen=True)
class Places:
    """Where a pipeline's ranks are: each stands for `stride` ranks beside each other."""

    shared: SharedCores
    stride: int

    def host(self, rank: int) -> int:
        """The first host of a pipeline rank."""
        return rank * self.stride // self.shared.ranks

    def speed(self, computing: int) -> float:
        """Of each of so many pipeline ranks that compute on one host."""
        return self.shared.speed(min(self.shared.ranks, computing * self.stride))


def makespan(
    schedule: Schedule,
    costs: Sequence[StageCost],
    finals: Sequence[float],
    places: Places,
    delay: float = 0.0,
) -> float:
    """Seconds of a step: every rank's list, and then its final seconds.

    `delay` is for how long a message between ranks is under way beside compute.
    """
    flow = flow_of(schedule)
    table = [(cost.forward, cost.input, cost.weight, cost.input + cost.weight) for cost in costs]
    seconds = [table[stage][kind] for listed in schedule.actions for kind, stage, _ in listed]
    ends: list[float] = [inf] * len(seconds)
    head, stops = list(flow.starts[:-1]), flow.starts[1:]
    left: dict[int, float] = {}
    """Rank -> what is left of what it computes."""
    waiting, now = set(range(schedule.ranks)), 0.0
    hosts = [places.host(rank) for rank in range(schedule.ranks)]
    while waiting or left:
        coming = inf
        for rank in sorted(waiting):
            at = head[rank]
            ready = 0.0
            if at < stops[rank] and flow.source[at] >= 0:
                source = flow.source[at]
                ready = ends[source] + (delay if flow.rank_of[source] != rank else 0.0)
            if ready <= now:
                left[rank] = seconds[at] if at < stops[rank] else finals[rank]
                waiting.discard(rank)
            coming = min(coming, max(ready, now))
        active = [hosts[rank] for rank in left]
        speeds = {rank: places.speed(active.count(hosts[rank])) for rank in left}
        step = min((left[rank] / speeds[rank] for rank in left), default=inf)
        if waiting and now < coming < now + step:
            step = coming - now
        now += step
        for rank, speed in speeds.items():
            left[rank] -= step * speed
            if left[rank] <= 1e-12:
                del left[rank]
                if head[rank] < stops[rank]:
                    ends[head[rank]] = now
                    head[rank] += 1
                    waiting.add(rank)
    return now


def period(work: Sequence[float], places: Places) -> float:
    """Seconds of a microbatch in a full pipeline, whose ranks have so much work each."""
    hosts = [places.host(rank) for rank in range(len(work))]
    shares = []
    for host in set(hosts):
        own = [each for each, at in zip(work, hosts, strict=True) if at == host]
        shares += [max(own) / places.speed(1), sum(own) / len(own) / places.speed(len(own))]
    return max(shares)
