"""When every rank does what: the lists of a schedule with durations and links."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from meshwright.schedule.actions import Schedule, ScheduleError
from meshwright.schedule.dependency_graph import DependencyGraph, flow_of
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
    """Bytes that are held from F to W or B."""
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
class Link:
    """From one rank to another, one way: a message of S bytes arrives latency + S / bandwidth seconds later.

    Messages of a link follow each other: the next leaves when the last byte of the one before has left.
    Raises `ScheduleError` for a latency below 0, and for a bandwidth that is not above it.
    """

    latency: float = 0.0
    """Seconds."""
    bandwidth: float = math.inf
    """Bytes per second."""

    def __post_init__(self) -> None:
        if not 0 <= self.latency < math.inf:
            raise ScheduleError(f"Link.latency is {self.latency}; it should be at least 0 s, and finite")
        if not self.bandwidth > 0:
            raise ScheduleError(f"Link.bandwidth is {self.bandwidth}; it should be above 0 bytes per second")


Links = Link | Callable[[int, int], Link]
"""One link for all, or a function of (from rank, to rank)."""


@dataclass(frozen=True)
class Idle:
    """Seconds in which a rank computes nothing, by cause."""

    fill: float
    """Before its first action."""
    compute: float
    """While what it waits for is still being computed elsewhere."""
    link: float
    """While what it waits for is on its way."""
    drain: float
    """After its last action (and final step), until all ranks are done."""

    @property
    def total(self) -> float:
        return self.fill + self.compute + self.link + self.drain


@dataclass(frozen=True)
class Simulation:
    """A step, timed. Times are seconds since the first action of all; the outer index is the rank."""

    schedule: Schedule
    start: tuple[tuple[float, ...], ...]
    """When each action of `schedule.actions` begins."""
    end: tuple[tuple[float, ...], ...]
    final: tuple[tuple[float, float], ...]
    """When the rank's final step begins and ends: right after its last action."""
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
        """The share of the makespan that each rank does not compute."""
        return tuple(idle.total / self.makespan for idle in self.idle)

    @property
    def bubble(self) -> float:
        """The share of all ranks' time that is idle where all begin and end a step together."""
        return sum(self.bubbles) / len(self.idle)

    @property
    def span(self) -> float:
        """Seconds of the longest rank from its own first action to the end of its own final step."""
        return max(end - starts[0] for (_, end), starts in zip(self.final, self.start, strict=True))

    @property
    def bubble_without_sync(self) -> float:
        """The idle share of `span`, for the mean of the ranks' work (Qi et al. 2023, §5).

        This is the bubble of steps that follow each other with no point where all ranks wait, as where each
        rank steps its optimiser by itself: a rank that begins late also ends late, and what it loses in one
        step's fill is what the next step's drain gives back.
        """
        return 1 - sum(self.busy) / len(self.busy) / self.span


def simulate(
    schedule: Schedule,
    costs: StageCost | Sequence[StageCost],
    links: Links = Link(),
    final: float | Sequence[float] = 0.0,
) -> Simulation:
    """Time the lists of a schedule that `check` accepts.

    `costs` is one for all stages or one a stage; `final` is the seconds of a step that each rank does at its
    end (the optimiser's), one for all or one a rank. An action begins when the rank's action before has ended
    and what it needs has arrived. A message leaves when its action has ended, beside whatever the rank
    computes next. Raises `ScheduleError` where there are not as many costs or final steps as stages or ranks,
    where nothing takes time, and where the lists do not come to their end.
    """
    by_stage = [costs] * schedule.stages if isinstance(costs, StageCost) else list(costs)
    finals = [float(final)] * schedule.ranks if isinstance(final, int | float) else list(final)
    if len(by_stage) != schedule.stages:
        raise ScheduleError(f"there are costs for {len(by_stage)} stages, but {schedule.stages} stages")
    if len(finals) != schedule.ranks:
        raise ScheduleError(f"there are {len(finals)} final steps, but {schedule.ranks} ranks")
    if min(finals) < 0 or not any(cost.forward + cost.input + cost.weight for cost in by_stage):
        raise ScheduleError("a step needs final steps of at least 0 s, and a stage that takes time")
    flow = flow_of(schedule)
    start, end, arrival = _run(flow, _durations(schedule, by_stage), _lanes(schedule, by_stage, links))
    return _result(schedule, flow, by_stage, finals, (start, end, arrival))


class Path(NamedTuple):
    """Actions of which each waits for the one before: no step is shorter than a path's actions together."""

    rank: int
    """The rank of its last action."""
    actions: tuple[tuple[int, int, int, int], ...]
    """Stage -> how many F, I, W and B of it are on the path."""
    messages: int

    def seconds(self, costs: Sequence[StageCost], message: float) -> float:
        """Length of the path for these costs of the stages, and `message` seconds for each message."""
        found = self.messages * message
        for cost, (forward, input, weight, whole) in zip(costs, self.actions, strict=True):
            found += forward * cost.forward + (input + whole) * cost.input + (weight + whole) * cost.weight
        return found


def ends(
    schedule: Schedule, costs: Sequence[StageCost], link: Link = Link(), flow: DependencyGraph | None = None
) -> tuple[tuple[float, ...], Path]:
    """When each rank's last action ends, as in `simulate`, and the path that the last of all waited for.

    `flow` is the schedule's, where it is known already.
    """
    flow = flow or flow_of(schedule)
    start, end, _ = _run(flow, _durations(schedule, costs), _lanes(schedule, costs, link))
    done = tuple(end[stop - 1] for stop in flow.starts[1:])
    last = max(range(flow.ranks), key=done.__getitem__)
    return done, _path(schedule, flow, start, end, last)


def _path(
    schedule: Schedule, flow: DependencyGraph, start: Sequence[float], end: Sequence[float], rank: int
) -> Path:
    """Back from the last action of `rank` to what each one waited for."""
    counts = [[0, 0, 0, 0] for _ in range(schedule.stages)]
    at, messages = flow.starts[rank + 1] - 1, 0
    while at >= 0:
        on = flow.rank_of[at]
        kind, stage, _ = schedule.actions[on][at - flow.starts[on]]
        counts[stage][kind] += 1
        before = at - 1 if at > flow.starts[on] else -1
        if before < 0 or end[before] < start[at]:
            before = flow.source[at]
            messages += before >= 0 and flow.crosses[before]
        at = before
    return Path(rank, tuple((f, i, w, b) for f, i, w, b in counts), messages)


def _durations(schedule: Schedule, costs: Sequence[StageCost]) -> list[float]:
    """Action -> seconds."""
    table = [(cost.forward, cost.input, cost.weight, cost.input + cost.weight) for cost in costs]
    return [table[stage][kind] for listed in schedule.actions for kind, stage, _ in listed]


Lane = tuple[int, float, float]
"""The number of a link, its latency, and the seconds that a message of this stage occupies it."""


def _lanes(schedule: Schedule, costs: Sequence[StageCost], links: Links) -> list[Lane | None]:
    """Action -> how its result travels; None where it stays on the rank or takes no time."""
    rank_of, stages = schedule.rank_of, schedule.stages
    numbers: dict[tuple[int, int], int] = {}

    def lane(stage: int, to: int, size: float) -> Lane | None:
        if not 0 <= to < stages or rank_of[stage] == rank_of[to]:
            return None
        pair = rank_of[stage], rank_of[to]
        link = links if isinstance(links, Link) else links(*pair)
        if link.latency == 0 and size / link.bandwidth == 0:
            return None
        return numbers.setdefault(pair, len(numbers)), link.latency, size / link.bandwidth

    nowhere: list[Lane | None] = [None] * stages
    down = [lane(stage, stage + 1, costs[stage].output) for stage in range(stages)]
    up = [lane(stage, stage - 1, costs[stage - 1].output) for stage in range(stages)]
    table = (down, up, nowhere, up)  # by kind: F, I, W, B
    return [table[kind][stage] for listed in schedule.actions for kind, stage, _ in listed]


def _run(
    flow: DependencyGraph, durations: list[float], lanes: list[Lane | None]
) -> tuple[list[float], list[float], list[float]]:
    """Start and end of each action, and when what it needs arrived.

    Each rank runs as far as it comes. Where it lacks something it stops, and whoever computes that puts it
    back to work; so each action is looked at once, and once more where it stopped its rank.
    """
    rank_of, target = flow.rank_of, flow.target
    head, stops = flow.starts[:-1], flow.starts[1:]
    arrival = [-1.0 if source >= 0 else 0.0 for source in flow.source]  # below 0: not yet
    start, end = arrival.copy(), arrival.copy()
    link_free = [0.0] * (2 * flow.ranks * flow.ranks)
    clock = [0.0] * flow.ranks
    work = list(range(flow.ranks))
    while work:
        rank = work.pop()
        now = clock[rank]
        at = head[rank]
        stop = stops[rank]
        while at < stop:
            ready = arrival[at]
            if ready < 0:
                break
            if ready > now:
                now = ready
            start[at] = now
            now += durations[at]
            end[at] = now
            to = target[at]
            if to >= 0:
                there = now
                lane = lanes[at]
                if lane is not None:
                    number, latency, seconds = lane
                    there = link_free[number] = max(now, link_free[number]) + seconds
                    there += latency
                arrival[to] = there
                if head[rank_of[to]] == to:
                    work.append(rank_of[to])
            at += 1
        head[rank] = at
        clock[rank] = now
    if head != stops:
        raise ScheduleError(
            "the ranks wait for each other, so the lists do not come to their end (see check)"
        )
    return start, end, arrival


def _result(
    schedule: Schedule,
    flow: DependencyGraph,
    costs: Sequence[StageCost],
    finals: Sequence[float],
    times: tuple[list[float], list[float], list[float]],
) -> Simulation:
    start, end, _ = times
    bounds = list(zip(flow.starts, flow.starts[1:], strict=False))
    final = [(end[b - 1], end[b - 1] + seconds) for (_, b), seconds in zip(bounds, finals, strict=True)]
    makespan = max(stop for _, stop in final)
    sizes = [cost.activations for cost in costs]
    freed = [cost.freed_by_input for cost in costs]
    return Simulation(
        schedule=schedule,
        start=tuple(tuple(start[a:b]) for a, b in bounds),
        end=tuple(tuple(end[a:b]) for a, b in bounds),
        final=tuple(final),
        idle=tuple(_idle(flow, rank, makespan - final[rank][1], times) for rank in range(flow.ranks)),
        peak=tuple(int(peak(listed)) for listed in schedule.actions),
        peak_bytes=tuple(peak(listed, sizes, freed) for listed in schedule.actions),
    )


def _idle(
    flow: DependencyGraph, rank: int, drain: float, times: tuple[list[float], list[float], list[float]]
) -> Idle:
    """The gaps of a rank, each split where what it waited for was sent."""
    start, end, arrival = times
    first, stop = flow.starts[rank], flow.starts[rank + 1]
    compute = link = 0.0
    for at in range(first + 1, stop):
        gap = start[at] - end[at - 1]
        if gap > 0:
            travelled = min(gap, arrival[at] - end[flow.source[at]])
            link += travelled
            compute += gap - travelled
    return Idle(start[first], compute, link, drain)
