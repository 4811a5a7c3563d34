"""Validity of a schedule: every action is computed once, on its rank, and no rank waits for ever."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, chain

from meshwright.schedule.actions import Action, Kind, Schedule, ScheduleError, source_of
from meshwright.schedule.dependency_graph import DependencyGraph, flow_of
from meshwright.schedule.replay import replay

# The kinds that a (stage, microbatch) has seen, as bits: those that each kind needs, and those that bar it.
_NEEDS = (0b0000, 0b0001, 0b0011, 0b0001)  # by kind: F, I, W, B
_BARS = (0b1111, 0b1010, 0b1100, 0b1110)
_WHOLE = (0b0111, 0b1001)  # F I W, or F B


@dataclass(frozen=True)
class Report:
    """Requirements of a valid schedule on ranks and links."""

    peak: tuple[int, ...]
    """Rank -> most activations (of one microbatch in one stage) that it holds at a time."""
    messages: int
    """Activations and gradients that cross from rank to rank in a step."""
    in_order: bool
    """True if each rank receives another's messages in the order of sending; else messages need tags."""
    in_order_by_kind: bool
    """`in_order` for activations and gradients taken separately; it is what lanes rely on."""
    unbuffered: bool
    """True if it runs even if a send waits for its receive, each at its place in the lists.

    Most schedules do not: in 1F1B two neighbours send to each other at once. Their sends must be
    asynchronous.
    """


def check(schedule: Schedule) -> Report:
    """Raise `ScheduleError` where the lists are not a schedule; otherwise say what they ask for.

    Checked: the placement gives every rank v stages; every action is on its stage's rank; every (stage,
    microbatch) has one F, then one B, or one I and then one W; with receives that wait and sends that don't,
    every list comes to its end; and so do the operations that the runtime posts, on communicators that keep
    their order as NCCL's do (`replay`).
    """
    _check_placement(schedule)
    _check_actions(schedule)
    flow = flow_of(schedule)
    _check_progress(schedule, flow)
    replay(schedule)
    return Report(
        peak=tuple(int(peak(listed)) for listed in schedule.actions),
        messages=sum(flow.crosses),
        in_order=_in_order(flow, [0] * flow.actions),
        in_order_by_kind=_in_order(flow, [kind is Kind.F for kind, _, _ in chain(*schedule.actions)]),
        unbuffered=_runs_unbuffered(flow),
    )


def peak(
    listed: Sequence[Action],
    sizes: Sequence[float] | None = None,
    freed_by_input: Sequence[float] | None = None,
) -> float:
    """Most activations that a rank's list holds at a time: from the start of F to the end of W or B.

    By stage, `sizes` gives what one microbatch's activations count (e.g. their bytes; 1 each without), and
    `freed_by_input` the share of them, 0 to 1, that the end of I frees already (none without).
    """
    sizes = sizes or [1.0] * (1 + max(action.stage for action in listed))
    freed = freed_by_input or [0.0] * len(sizes)
    change = [
        (size, -size * share, -size * (1 - share), -size) for size, share in zip(sizes, freed, strict=True)
    ]
    return max(accumulate(change[stage][kind] for kind, stage, _ in listed))


def _check_placement(schedule: Schedule) -> None:
    ranks, virtual = schedule.ranks, schedule.virtual
    if len(schedule.actions) != ranks:
        raise ScheduleError(f"{schedule.name}: there are {len(schedule.actions)} lists for {ranks} ranks")
    for rank in range(ranks):
        if (own := schedule.rank_of.count(rank)) != virtual:
            raise ScheduleError(f"{schedule.name}: rank {rank} has {own} stages and should have {virtual}")
    if schedule.stages != ranks * virtual:
        raise ScheduleError(f"{schedule.name}: {schedule.stages} stages are placed on {ranks} x {virtual}")


def _check_actions(schedule: Schedule) -> None:
    """Each action where it belongs, once, and after what it continues."""
    microbatches, rank_of = schedule.microbatches, schedule.rank_of
    seen = [[0] * microbatches for _ in rank_of]
    for rank, listed in enumerate(schedule.actions):
        for action in listed:
            kind, stage, microbatch = action
            if not (0 <= stage < len(seen) and 0 <= microbatch < microbatches):
                raise ScheduleError(f"{schedule.name}: {action} on rank {rank}: no such stage or microbatch")
            if rank_of[stage] != rank:
                raise ScheduleError(
                    f"{schedule.name}: {action} is in the list of rank {rank}, but stage {stage} is on rank "
                    f"{rank_of[stage]}"
                )
            before = seen[stage][microbatch]
            if before & _BARS[kind] or before & _NEEDS[kind] != _NEEDS[kind]:
                raise ScheduleError(
                    f"{schedule.name}: {action} on rank {rank} comes after {_kinds(before)} of its stage "
                    f"and microbatch; the order is F B or F I W, each once"
                )
            seen[stage][microbatch] = before | 1 << kind
    for stage, row in enumerate(seen):
        for microbatch, kinds in enumerate(row):
            if kinds not in _WHOLE:
                raise ScheduleError(
                    f"{schedule.name}: stage {stage} has {_kinds(kinds)} for microbatch {microbatch}; "
                    f"it should have F B or F I W"
                )


def _kinds(bits: int) -> str:
    return " ".join(kind.name for kind in Kind if bits >> kind & 1) or "nothing"


def _check_progress(schedule: Schedule, flow: DependencyGraph) -> None:
    """Run the lists without durations, each rank as far as it comes; receives wait, sends do not."""
    head = flow.starts[:-1]
    stops = flow.starts[1:]
    done = bytearray(flow.actions)
    work = list(range(flow.ranks))
    while work:
        rank = work.pop()
        at = head[rank]
        while at < stops[rank] and (flow.source[at] < 0 or done[flow.source[at]]):
            done[at] = 1
            target = flow.target[at]
            if target >= 0 and head[flow.rank_of[target]] == target:
                work.append(flow.rank_of[target])
            at += 1
        head[rank] = at
    waiting = [
        f"rank {rank} with {action} for {_awaited(schedule, action)}"
        for rank in range(flow.ranks)
        if head[rank] < stops[rank]
        for action in [schedule.actions[rank][head[rank] - flow.starts[rank]]]
    ]
    if waiting:
        raise ScheduleError(f"{schedule.name}: the ranks wait for each other: {'; '.join(waiting)}")


def _awaited(schedule: Schedule, action: Action) -> str:
    stage = source_of(action, schedule.stages)
    assert stage is not None, "what waits has a source"
    kind = "F" if action.kind is Kind.F else "I or B"
    return f"{kind} of stage {stage} on rank {schedule.rank_of[stage]}"


def _in_order(flow: DependencyGraph, channels: Sequence[int]) -> bool:
    """True if messages of one channel (by action) between two ranks arrive in the order of sending."""
    latest: dict[tuple[int, int, int], int] = {}
    for rank in range(flow.ranks):
        for at in range(flow.starts[rank], flow.starts[rank + 1]):
            if flow.crosses[at]:
                target = flow.target[at]
                link = (rank, flow.rank_of[target], channels[at])
                if latest.get(link, -1) > target:
                    return False
                latest[link] = target
    return True


def _runs_unbuffered(flow: DependencyGraph) -> bool:
    """Each rank's messages in a row, sent and received; one passes when both its ranks have come to it."""
    queues: list[list[int]] = []
    for rank in range(flow.ranks):
        queue = []
        for at in range(flow.starts[rank], flow.starts[rank + 1]):
            if flow.source[at] >= 0 and flow.crosses[flow.source[at]]:
                queue.append(at)  # a message is named by the action that receives it
            if flow.crosses[at]:
                queue.append(flow.target[at])
        queues.append(queue[::-1])
    waiting: dict[int, int] = {}
    work = list(range(flow.ranks))
    while work:
        rank = work.pop()
        while queues[rank]:
            other = waiting.pop(queues[rank][-1], None)
            if other is None:
                waiting[queues[rank][-1]] = rank
                break
            queues[rank].pop()
            queues[other].pop()
            work.append(other)
    return not any(queues)
