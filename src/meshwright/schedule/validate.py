"""Validity of a schedule: each action is computed once, on the right rank, and no rank waits forever."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, chain

from meshwright.schedule.actions import Action, DependencyGraph, Kind, Schedule, ScheduleError, steps
from meshwright.schedule.posting import Operation, PostedKind
from meshwright.schedule.replay import replay

_NEXT = {"": "F", "F": "BI", "FI": "W", "FB": "", "FIW": ""}
"""Kinds that a (stage, microbatch) has seen -> the kinds that may follow."""


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
    """True if the lists run even if each send waits for its receive before the rank continues.

    Most schedules do not: in 1F1B two neighbours send to each other at once, so that their sends must be
    asynchronous.
    """


def check(schedule: Schedule) -> Report:
    """Return the requirements of a valid schedule; raise `ScheduleError` for an invalid one.

    Valid means: each rank has v stages; each action is in the list of its stage's rank; each (stage,
    microbatch) has one F, then one B, or one I and then one W; every list ends, with receives that wait and
    sends that do not; and so do the operations that the runtime posts, on communicators that keep their order
    as those of NCCL do (`replay`).
    """
    _check_placement(schedule)
    _check_actions(schedule)
    flow = schedule.flow
    _check_progress(schedule)
    replay(schedule)
    return Report(
        peak=tuple(int(peak(listed)) for listed in schedule.actions),
        messages=sum(flow.crosses),
        in_order=_in_order(flow, [0] * len(flow.rank_of)),
        in_order_by_kind=_in_order(flow, [kind is Kind.F for kind, _, _ in chain(*schedule.actions)]),
        unbuffered=_runs_unbuffered(schedule),
    )


def peak(
    listed: Sequence[Action],
    sizes: Sequence[float] | None = None,
    freed_by_input: Sequence[float] | None = None,
) -> float:
    """Most activations that a list holds at a time, each from the start of F to the end of W or B.

    `sizes` gives the weight of one microbatch's activations by stage, such as their bytes (default 1), and
    `freed_by_input` the share of them, 0 to 1, that the end of I frees (default 0).
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
    computed = [[""] * microbatches for _ in rank_of]
    for rank, listed in enumerate(schedule.actions):
        for action in listed:
            kind, stage, microbatch = action
            if not (0 <= stage < len(computed) and 0 <= microbatch < microbatches):
                raise ScheduleError(f"{schedule.name}: {action} on rank {rank}: no such stage or microbatch")
            if rank_of[stage] != rank:
                raise ScheduleError(
                    f"{schedule.name}: {action} is in the list of rank {rank}, but stage {stage} is on rank "
                    f"{rank_of[stage]}"
                )
            before = computed[stage][microbatch]
            if kind.name not in _NEXT[before]:
                raise ScheduleError(
                    f"{schedule.name}: {action} on rank {rank} comes after {' '.join(before) or 'nothing'} "
                    f"of its stage and microbatch; the order is F B or F I W, each once"
                )
            computed[stage][microbatch] = before + kind.name
    for stage, row in enumerate(computed):
        for microbatch, kinds in enumerate(row):
            if _NEXT[kinds]:
                raise ScheduleError(
                    f"{schedule.name}: stage {stage} has {' '.join(kinds) or 'nothing'} for microbatch "
                    f"{microbatch}; it should have F B or F I W"
                )


def _check_progress(schedule: Schedule) -> None:
    """Run the lists without durations, each rank as far as possible; receives wait, sends do not."""
    flow, done = schedule.flow, set(schedule.flow.order)
    waiting = []
    for rank, listed in enumerate(schedule.actions):
        action = next((action for at, action in enumerate(listed, flow.starts[rank]) if at not in done), None)
        if action is not None:
            kind, stage = ("F", action.stage - 1) if action.kind is Kind.F else ("I or B", action.stage + 1)
            awaited = f"{kind} of stage {stage} on rank {schedule.rank_of[stage]}"
            waiting.append(f"rank {rank} with {action} for {awaited}")
    if waiting:
        raise ScheduleError(f"{schedule.name}: the ranks wait for each other: {'; '.join(waiting)}")


def _in_order(flow: DependencyGraph, channels: Sequence[int]) -> bool:
    """True if messages of one channel (by action) between two ranks arrive in the order of sending."""
    latest: dict[tuple[int, int, int], int] = {}
    for at, target in enumerate(flow.target):
        if flow.crosses[at]:
            link = flow.rank_of[at], flow.rank_of[target], channels[at]
            if latest.get(link, -1) > target:
                return False
            latest[link] = target
    return True


def _runs_unbuffered(schedule: Schedule) -> bool:
    """True if the lists end when every message is waited for where it is posted."""
    posted: list[list[Operation]] = []
    for row in steps(schedule):
        posted.append([])
        for action, source, target in row:
            if source is not None:
                posted[-1] += [
                    Operation(PostedKind.RECEIVE, action, source),
                    Operation(PostedKind.RECEIVED, action),
                ]
            posted[-1].append(Operation(PostedKind.COMPUTE, action))
            if target is not None:
                posted[-1] += [Operation(PostedKind.SEND, action, target), Operation(PostedKind.SENT, action)]
    try:
        replay(schedule, posted=posted)
    except ScheduleError:
        return False
    return True
