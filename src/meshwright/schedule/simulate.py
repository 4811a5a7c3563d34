"""Simulation of a step: the times of all actions of a schedule, with durations and links."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from meshwright.schedule.actions import Schedule, ScheduleError
from meshwright.schedule.validate import peak


@dataclass(frozen=True)
class StageCost:
    """Costs of one microbatch in one stage. Raises `ScheduleError` if one is negative."""

    forward: float
    """Seconds of F."""
    input: float
    """Seconds of I."""
    weight: float
    """Seconds of W; a whole backward B takes input + weight."""
    activations: float = 0.0
    """Bytes held from F to W or B."""
    output: float = 0.0
    """Bytes that F sends on, and that the next stage's I or B sends back as a gradient."""
    freed_by_input: float = 0.0
    """Share of the activations, 0 to 1, that are freed by the end of I rather than of W."""

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not 0 <= value < math.inf:
                raise ScheduleError(f"StageCost.{name} is {value}; it should be at least 0, and finite")
        if self.freed_by_input > 1:
            raise ScheduleError(f"StageCost.freed_by_input is {self.freed_by_input}; a share is at most 1")


@dataclass(frozen=True)
class StageLink:
    """A one-way link between two ranks: a message of S bytes arrives latency + S / bandwidth seconds later.

    The messages of a link follow each other: the next leaves when the last byte of the previous one has left.
    Raises `ScheduleError` for a latency below 0, and for a bandwidth of 0 or less.
    """

    latency: float = 0.0
    """Seconds."""
    bandwidth: float = math.inf
    """Bytes per second."""

    def __post_init__(self) -> None:
        if not 0 <= self.latency < math.inf:
            raise ScheduleError(f"StageLink.latency is {self.latency}; it should be at least 0 s, and finite")
        if not self.bandwidth > 0:
            raise ScheduleError(
                f"StageLink.bandwidth is {self.bandwidth}; it should be above 0 bytes per second"
            )


Links = StageLink | Callable[[int, int], StageLink]
"""One link for all pairs of ranks, or a function of (sender, receiver)."""


@dataclass(frozen=True)
class Idle:
    """Seconds in which a rank computes nothing, by cause."""

    fill: float
    """Before its first action."""
    compute: float
    """While the input of its next action is still being computed elsewhere."""
    link: float
    """While the input of its next action is on a link."""
    drain: float
    """After its last action (and final step), until all ranks are done."""

    @property
    def total(self) -> float:
        return self.fill + self.compute + self.link + self.drain


@dataclass(frozen=True)
class Simulation:
    """A timed step. Times are in seconds since the first of all actions; the first index is the rank."""

    schedule: Schedule
    start: tuple[tuple[float, ...], ...]
    """Beginning of each action of `schedule.actions`."""
    end: tuple[tuple[float, ...], ...]
    final: tuple[tuple[float, float], ...]
    """Beginning and end of the final step of each rank, right after its last action."""
    idle: tuple[Idle, ...]
    peak: tuple[int, ...]
    """Most activations (of one microbatch in one stage) held at a time."""
    peak_bytes: tuple[float, ...]
    """Most bytes of activations held at a time."""

    @property
    def makespan(self) -> float:
        """Seconds until all ranks are done."""
        return max(end for _, end in self.final)

    @property
    def busy(self) -> tuple[float, ...]:
        """Seconds that each rank computes."""
        return tuple(self.makespan - idle.total for idle in self.idle)

    @property
    def bubbles(self) -> tuple[float, ...]:
        """Share of the makespan in which each rank is idle."""
        return tuple(idle.total / self.makespan for idle in self.idle)

    @property
    def bubble(self) -> float:
        """Share of the time of all ranks that is idle if all begin and end a step together."""
        return sum(self.bubbles) / len(self.idle)

    @property
    def span(self) -> float:
        """Seconds of the longest rank from its own first action to the end of its own final step."""
        return max(end - starts[0] for (_, end), starts in zip(self.final, self.start, strict=True))

    @property
    def bubble_without_sync(self) -> float:
        """Idle share of `span`, for the mean of the work of the ranks (Qi et al. 2023, §5).

        This is the bubble of consecutive steps without a point where all ranks wait, as when each rank steps
        its optimiser independently: a rank that begins late also ends late, and the time that it loses while
        one step fills is regained while it drains.
        """
        return 1 - sum(self.busy) / len(self.busy) / self.span


def simulate(
    schedule: Schedule,
    costs: StageCost | Sequence[StageCost],
    links: Links = StageLink(),
    final: float | Sequence[float] = 0.0,
) -> Simulation:
    """Time the lists of a schedule that `check` accepts.

    `costs` is one for all stages or one per stage; `final` is the seconds of a step that each rank does at
    its end (the optimiser's), one for all or one per rank. An action begins when the previous action of the
    rank has ended and its input has arrived. A message leaves when its action has ended, and overlaps what
    the rank computes next. Raises `ScheduleError` if the numbers of costs or final steps are not those of
    stages or ranks, if nothing takes time, and if the lists do not end.
    """
    by_stage = [costs] * schedule.stages if isinstance(costs, StageCost) else list(costs)
    finals = [float(final)] * schedule.ranks if isinstance(final, int | float) else list(final)
    if len(by_stage) != schedule.stages:
        raise ScheduleError(f"there are costs for {len(by_stage)} stages, but {schedule.stages} stages")
    if len(finals) != schedule.ranks:
        raise ScheduleError(f"there are {len(finals)} final steps, but {schedule.ranks} ranks")
    if min(finals) < 0 or not any(cost.forward + cost.input + cost.weight for cost in by_stage):
        raise ScheduleError("a step needs final steps of at least 0 s, and a stage that takes time")
    times = start, end, _ = _run(schedule, by_stage, links)
    bounds = list(pairwise(schedule.flow.starts))
    done = [(end[b - 1], end[b - 1] + seconds) for (_, b), seconds in zip(bounds, finals, strict=True)]
    makespan = max(stop for _, stop in done)
    sizes = [cost.activations for cost in by_stage]
    freed = [cost.freed_by_input for cost in by_stage]
    return Simulation(
        schedule=schedule,
        start=tuple(tuple(start[a:b]) for a, b in bounds),
        end=tuple(tuple(end[a:b]) for a, b in bounds),
        final=tuple(done),
        idle=tuple(_idle(schedule, rank, makespan - done[rank][1], times) for rank in range(schedule.ranks)),
        peak=tuple(int(peak(listed)) for listed in schedule.actions),
        peak_bytes=tuple(peak(listed, sizes, freed) for listed in schedule.actions),
    )


class Path(NamedTuple):
    """Actions that each wait for the previous one: no step is shorter than the actions of a path together."""

    rank: int
    """The rank of its last action."""
    actions: tuple[tuple[int, int, int, int], ...]
    """Stage -> how many F, I, W and B of it are on the path."""
    messages: int

    def seconds(self, costs: Sequence[StageCost], message: float) -> float:
        """Return the seconds of the path for these costs of the stages and `message` seconds per message."""
        seconds = self.messages * message
        for cost, (forward, input, weight, whole) in zip(costs, self.actions, strict=True):
            seconds += forward * cost.forward + (input + whole) * cost.input + (weight + whole) * cost.weight
        return seconds


def ends(
    schedule: Schedule, costs: Sequence[StageCost], link: StageLink = StageLink()
) -> tuple[tuple[float, ...], Path]:
    """Return the end of each rank's last action, as in `simulate`, and the path that the last waited for."""
    start, end, _ = _run(schedule, costs, link)
    done = tuple(end[stop - 1] for stop in schedule.flow.starts[1:])
    return done, _path(schedule, start, end, max(range(schedule.ranks), key=done.__getitem__))


def _path(schedule: Schedule, start: Sequence[float], end: Sequence[float], rank: int) -> Path:
    """Follow the action that each one waited for back from the last action of `rank`."""
    flow = schedule.flow
    counts = [[0, 0, 0, 0] for _ in range(schedule.stages)]
    at, messages = flow.starts[rank + 1] - 1, 0
    while at >= 0:
        first = flow.starts[flow.rank_of[at]]
        kind, stage, _ = schedule.actions[flow.rank_of[at]][at - first]
        counts[stage][kind] += 1
        before = at - 1 if at > first else -1
        if before < 0 or end[before] < start[at]:
            before = flow.source[at]
            messages += before >= 0 and flow.crosses[before]
        at = before
    return Path(rank, tuple((f, i, w, b) for f, i, w, b in counts), messages)


Transfer = tuple[tuple[int, int], float, float]
"""(sender, receiver) of a message, its latency, and the seconds that it occupies the link."""


def _transfers(schedule: Schedule, costs: Sequence[StageCost], links: Links) -> list[Transfer | None]:
    """Action -> the transfer of its result; None if that stays on the rank or takes no time."""
    rank_of, stages = schedule.rank_of, schedule.stages

    def transfer(stage: int, to: int, size: float) -> Transfer | None:
        if not 0 <= to < stages or rank_of[stage] == rank_of[to]:
            return None
        pair = rank_of[stage], rank_of[to]
        link = links if isinstance(links, StageLink) else links(*pair)
        seconds = size / link.bandwidth
        return (pair, link.latency, seconds) if link.latency or seconds else None

    nowhere: list[Transfer | None] = [None] * stages
    down = [transfer(stage, stage + 1, costs[stage].output) for stage in range(stages)]
    up = [transfer(stage, stage - 1, costs[stage - 1].output) for stage in range(stages)]
    table = (down, up, nowhere, up)  # by kind: F, I, W, B
    return [table[kind][stage] for listed in schedule.actions for kind, stage, _ in listed]


Times = tuple[list[float], list[float], list[float]]
"""Start and end of each action, and the arrival of its input, in seconds."""


def _run(schedule: Schedule, costs: Sequence[StageCost], links: Links) -> Times:
    flow, transfers = schedule.flow, _transfers(schedule, costs, links)
    rank_of, target = flow.rank_of, flow.target
    table = [(cost.forward, cost.input, cost.weight, cost.input + cost.weight) for cost in costs]
    durations = [table[stage][kind] for listed in schedule.actions for kind, stage, _ in listed]
    if len(flow.order) < len(durations):
        raise ScheduleError(
            "the ranks wait for each other, so the lists do not come to their end (see check)"
        )
    start, end, arrival = ([0.0] * len(durations) for _ in range(3))
    clock = [0.0] * schedule.ranks
    link_free: dict[tuple[int, int], float] = defaultdict(float)
    for at in flow.order:  # without calls: long schedules have millions of actions
        rank = rank_of[at]
        now, came = clock[rank], arrival[at]
        if came > now:
            now = came
        start[at] = now
        now += durations[at]
        end[at] = clock[rank] = now
        transfer = transfers[at]
        if transfer is not None:
            pair, latency, seconds = transfer
            free = link_free[pair]
            if free > now:
                now = free
            now += seconds
            link_free[pair] = now
            now += latency
        to = target[at]
        if to >= 0:
            arrival[to] = now
    return start, end, arrival


def _idle(schedule: Schedule, rank: int, drain: float, times: Times) -> Idle:
    """Return the idle time of a rank, with each gap split at the time when its input was sent."""
    start, end, arrival = times
    first, stop = schedule.flow.starts[rank : rank + 2]
    compute = link = 0.0
    for at in range(first + 1, stop):
        gap = start[at] - end[at - 1]
        if gap > 0:
            travelled = min(gap, arrival[at] - end[schedule.flow.source[at]])
            link += travelled
            compute += gap - travelled
    return Idle(start[first], compute, link, drain)
