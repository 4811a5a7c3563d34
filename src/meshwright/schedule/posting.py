"""The order in which a rank posts its messages, as data: what the runtime executes and what is replayed.

A list of actions says what a rank computes. Its posting adds each message's operations: a receive is posted
one action before it is needed, so that it runs beside the computation; a send is posted when its result is
there, and waited for when something has come back that proves that it arrived.
"""

from __future__ import annotations

from bisect import insort
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from enum import IntEnum
from typing import NamedTuple

from meshwright.schedule.actions import Action, Kind, Schedule
from meshwright.schedule.dependency_graph import DependencyGraph, flow_of


class Verb(IntEnum):
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

    verb: Verb
    action: Action
    peer: int = -1

    def __str__(self) -> str:
        words = ("receive for", "wait for what", "compute", "send of", "wait for the send of")
        text = f"{words[self.verb]} {self.action}"
        if self.verb is Verb.RECEIVED:
            return f"{text} needs"
        return (
            text if self.peer < 0 else f"{text} {'from' if self.verb is Verb.RECEIVE else 'to'} {self.peer}"
        )


Posting = tuple[Operation, ...]


def posting(schedule: Schedule, rank: int) -> Posting:
    """Everything that a rank computes, posts and waits for in one step, in order."""
    return tuple(_operations(schedule, flow_of(schedule), rank))


def postings(schedule: Schedule) -> tuple[Posting, ...]:
    """Rank -> its posting."""
    flow = flow_of(schedule)
    return tuple(tuple(_operations(schedule, flow, rank)) for rank in range(schedule.ranks))


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


def _operations(schedule: Schedule, flow: DependencyGraph, rank: int) -> Iterator[Operation]:
    listed = schedule.actions[rank]
    first = flow.starts[rank]
    proven = proofs(flow, rank)
    unproven = {at for at in range(len(listed)) if flow.crosses[first + at]}
    if listed:
        yield from _receive(flow, first, listed[0])
    for at, action in enumerate(listed):
        if _sender(flow, first + at) >= 0:
            yield Operation(Verb.RECEIVED, action)
        if at + 1 < len(listed):
            yield from _receive(flow, first + at + 1, listed[at + 1])
        for sent in proven.get(at, ()):
            unproven.remove(sent)
            yield Operation(Verb.SENT, listed[sent])
        yield Operation(Verb.COMPUTE, action)
        if flow.crosses[first + at]:
            yield Operation(Verb.SEND, action, flow.rank_of[flow.target[first + at]])
    yield from (Operation(Verb.SENT, listed[sent]) for sent in sorted(unproven))


def _receive(flow: DependencyGraph, at: int, action: Action) -> Iterator[Operation]:
    sender = _sender(flow, at)
    if sender >= 0:
        yield Operation(Verb.RECEIVE, action, sender)


def _sender(flow: DependencyGraph, at: int) -> int:
    """The rank whose message an action needs; -1 where it needs none."""
    source = flow.source[at]
    return flow.rank_of[source] if source >= 0 and flow.crosses[source] else -1


def proofs(flow: DependencyGraph, rank: int) -> dict[int, list[int]]:
    """Position in a rank's list -> positions of the sends that have arrived once this action has its input.

    A message that a rank sent after it had taken ours proves that ours arrived. Sends that nothing proves are
    in no list.
    """
    first, end = flow.starts[rank], flow.starts[rank + 1]
    under_way: dict[int, list[tuple[int, int]]] = defaultdict(list)
    found: dict[int, list[int]] = {}
    for at in range(first, end):
        sender = _sender(flow, at)
        if sender >= 0:
            waiting, proven = under_way[sender], []
            while waiting and waiting[0][0] < flow.source[at]:
                proven.append(waiting.pop(0)[1] - first)
            if proven:
                found[at - first] = sorted(proven)
        if flow.crosses[at]:
            insort(under_way[flow.rank_of[flow.target[at]]], (flow.target[at], at))
    return found
