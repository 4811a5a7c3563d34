"""The operations that a rank posts, in order, as data: the runtime executes them, and `replay` checks them.

A list of actions says what a rank computes. Its posting adds the operations of each message: a receive is
posted one action before it is needed, so that it overlaps the computation; a send is posted when its result
is computed, and waited for once a message has come back that proves that it arrived.
"""

from __future__ import annotations

from bisect import insort
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from enum import IntEnum
from typing import NamedTuple

from meshwright.schedule.actions import Action, DependencyGraph, Kind, Schedule, Step, steps


class PostedKind(IntEnum):
    """Kind of operation in a rank's posting."""

    RECEIVE = 0
    """Post the receive of what the action needs."""
    RECEIVED = 1
    """Wait until it has come."""
    COMPUTE = 2
    SEND = 3
    """Post the send of the action's result."""
    SENT = 4
    """Wait until that send is done, so that its buffer may go."""


class Operation(NamedTuple):
    """One operation of a rank; `peer` is the rank at the other end of a RECEIVE or SEND, else -1."""

    verb: PostedKind
    action: Action
    peer: int = -1

    def __str__(self) -> str:
        forms = ("receive for {} from {}", "wait for what {} needs", "compute {}", "send of {} to {}")
        return (*forms, "wait for the send of {}")[self.verb].format(self.action, self.peer)


Posting = tuple[Operation, ...]


def posting(schedule: Schedule, rank: int) -> Posting:
    """Everything that a rank computes, posts and waits for in one step, in order."""
    return postings(schedule)[rank]


def postings(schedule: Schedule) -> tuple[Posting, ...]:
    """Rank -> its posting."""
    rows = enumerate(steps(schedule))
    return tuple(tuple(_operations(row, proofs(schedule.flow, rank))) for rank, row in rows)


def forward_only(schedule: Schedule) -> Schedule:
    """The forwards of a schedule without its backwards, stage by stage with all microbatches in each.

    It is what an evaluation runs.
    """
    numbers = range(schedule.microbatches)
    return replace(
        schedule,
        name=f"forward of {schedule.name}",
        actions=tuple(
            tuple(Action(Kind.F, stage, number) for stage in schedule.stages_of(rank) for number in numbers)
            for rank in range(schedule.ranks)
        ),
    )


def _operations(row: Sequence[Step], proven: dict[int, list[int]]) -> Iterator[Operation]:
    unproven = {at for at, step in enumerate(row) if step.target is not None}
    receives = [
        [] if source is None else [Operation(PostedKind.RECEIVE, action, source)] for action, source, _ in row
    ]
    yield from receives[0]
    for at, (action, source, target) in enumerate(row):
        if source is not None:
            yield Operation(PostedKind.RECEIVED, action)
        yield from receives[at + 1] if at + 1 < len(row) else ()
        for sent in proven.get(at, ()):
            unproven.remove(sent)
            yield Operation(PostedKind.SENT, row[sent].action)
        yield Operation(PostedKind.COMPUTE, action)
        if target is not None:
            yield Operation(PostedKind.SEND, action, target)
    yield from (Operation(PostedKind.SENT, row[sent].action) for sent in sorted(unproven))


def proofs(flow: DependencyGraph, rank: int) -> dict[int, list[int]]:
    """Position in a rank's list -> positions of the sends that have arrived once this action has its input.

    A message that a rank sent after it had received ours proves that ours arrived. Sends without a proof are
    in no list.
    """
    first, end = flow.starts[rank], flow.starts[rank + 1]
    under_way: dict[int, list[tuple[int, int]]] = defaultdict(list)
    found: dict[int, list[int]] = {}
    for at in range(first, end):
        source = flow.source[at]
        if source >= 0 and flow.crosses[source]:
            waiting, proven = under_way[flow.rank_of[source]], []
            while waiting and waiting[0][0] < source:
                proven.append(waiting.pop(0)[1] - first)
            if proven:
                found[at - first] = sorted(proven)
        if flow.crosses[at]:
            insort(under_way[flow.rank_of[flow.target[at]]], (flow.target[at], at))
    return found
