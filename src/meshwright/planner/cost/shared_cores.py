"""Pipelines whose ranks share a host's cores: a waiting rank leaves its core to the others.

If each rank has its own device, a pipeline bubble is lost time. If ranks share cores, a step takes about the
longer of its critical path, at the speed of a rank with a core to itself, and the total work over all cores.
Both follow from processor sharing (Kleinrock 1967): the actions of a schedule are simulated event by event,
at a speed that depends on the number of ranks of the host that compute at the time. Durations are those while
all ranks of a host compute, as `meshwright profile` measures them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from statistics import median

from meshwright.hardware.cluster import Cluster
from meshwright.schedule import Schedule, StageCost


@dataclass(frozen=True)
class SharedCores:
    """Speeds of the ranks of a host that share its cores, relative to the speed while all of them compute."""

    ranks: int
    """Ranks of a host."""
    cores: float
    """Cores of a host."""
    alone: float
    """Relative speed of a rank while all others wait."""
    stride: int = 1
    """Consecutive ranks that each pipeline rank stands for."""

    def host(self, rank: int) -> int:
        """Host of the first rank of a pipeline rank."""
        return rank * self.stride // self.ranks

    def speed(self, computing: int) -> float:
        """Relative speed of each of `computing` pipeline ranks of one host, while the others wait."""
        active, full = min(self.ranks, computing * self.stride), min(self.cores, self.ranks)
        if active >= full:
            return max(1.0, self.ranks / active)
        most = max(self.alone, self.ranks / full)
        return most + (self.ranks / full - most) * (active - 1) / (full - 1)


def shared_cores(cluster: Cluster) -> SharedCores | None:
    """Sharing of the hosts of a cluster; None if each rank has its own device."""
    if cluster.device.kind != "cpu" or cluster.sharing == 1:
        return None
    ranks, cores = cluster.sharing, cluster.device.units
    measured, ratios = cluster.measured, [ranks / min(cores, ranks)]
    if measured is not None and measured.ranks == ranks:
        together = {point[:-1]: point.seconds for point in measured.matmul}
        alone = measured.matmul_alone
        ratios = [together[p[:-1]] / p.seconds for p in alone if p[:-1] in together] or ratios
    return SharedCores(ranks, cores, min(float(ranks), median(ratios)))


def makespan(
    schedule: Schedule,
    costs: Sequence[StageCost],
    finals: Sequence[float],
    shared: SharedCores,
    delay: float = 0.0,
) -> float:
    """Seconds of a step: every rank runs its list of actions, and then its `finals` seconds.

    `delay` is the seconds of a message between ranks, which overlaps compute.
    """
    flow = schedule.flow
    table = [(cost.forward, cost.input, cost.weight, cost.input + cost.weight) for cost in costs]
    seconds = [table[stage][kind] for listed in schedule.actions for kind, stage, _ in listed]
    ends: list[float] = [inf] * len(seconds)
    head, stops = list(flow.starts[:-1]), flow.starts[1:]
    left: dict[int, float] = {}
    """Rank -> remaining seconds of its current action."""
    waiting, now = set(range(schedule.ranks)), 0.0
    hosts = [shared.host(rank) for rank in range(schedule.ranks)]
    while waiting or left:
        coming = inf
        for rank in sorted(waiting):
            action = head[rank]
            ready = 0.0
            if action < stops[rank] and flow.source[action] >= 0:
                source = flow.source[action]
                ready = ends[source] + (delay if flow.rank_of[source] != rank else 0.0)
            if ready <= now:
                left[rank] = seconds[action] if action < stops[rank] else finals[rank]
                waiting.discard(rank)
            coming = min(coming, max(ready, now))
        active = [hosts[rank] for rank in left]
        speeds = {rank: shared.speed(active.count(hosts[rank])) for rank in left}
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
