"""Replays what all ranks post under NCCL's rules, and finds the ranks that would wait for each other.

- The operations of one communicator (lane) of a rank run one after the other, in the order of posting.
- A receive blocks its lane until it is matched; a send completes with its receive (NCCL may buffer small
  messages, which hides a hang at small sizes).
- The host posts without waiting. A wait is one of the device's stream: what is computed after it, and what
  is posted after it, starts when the awaited operation is done.

Since what is posted after a wait can't start before it, no operation beyond a rank's first wait that is not
over can matter to anybody; so each rank is run up to that wait, again and again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Sequence

from meshwright.schedule.actions import Action, Kind, Schedule, ScheduleError, target_of
from meshwright.schedule.lanes import LaneOf, lane_rule
from meshwright.schedule.posting import Operation, Verb, postings


def replay(
    schedule: Schedule, lane_of: LaneOf | None = None, posted: Sequence[Sequence[Operation]] | None = None
) -> None:
    """Raise `ScheduleError` where ranks wait for each other for ever, or take another message than was sent.

    `lane_of` says which messages share a communicator, by default `lane_rule`; `posted` are the operations by
    rank, by default `postings(schedule)`.
    """
    posted = postings(schedule) if posted is None else posted
    ranks = [_Rank(listed) for listed in posted]
    lane_of = lane_of or lane_rule(schedule.ranks)
    work = list(range(len(ranks)))
    while work:
        number = work.pop()
        for lane in _advance(schedule, ranks[number], number, lane_of):
            work += _match(schedule, ranks, number, lane)
    waiting = [_waits(rank, number) for number, rank in enumerate(ranks) if not rank.ended]
    if waiting:
        raise ScheduleError(
            f"{schedule.name}: on communicators that keep their order the ranks wait for each other: "
            + "; ".join(waiting)
        )


class _Rank:
    """How far a rank has come."""

    def __init__(self, posted: Sequence[Operation]) -> None:
        self.posted, self.at = posted, 0
        self.lanes: dict[Hashable, deque[Operation]] = {}
        self.under_way: set[tuple[Verb, Action]] = set()
        self.latest: dict[Action, Verb] = {}
        """The last operation of each action."""

    @property
    def ended(self) -> bool:
        return self.at == len(self.posted) and not self.under_way


_AWAITED = {Verb.RECEIVED: Verb.RECEIVE, Verb.SENT: Verb.SEND}
_AFTER: dict[Verb, tuple[Verb | None, ...]] = {
    Verb.RECEIVE: (None,),
    Verb.RECEIVED: (Verb.RECEIVE,),
    Verb.COMPUTE: (None, Verb.RECEIVED),
    Verb.SEND: (Verb.COMPUTE,),
    Verb.SENT: (Verb.SEND,),
}
"""Each operation -> the operation of its action that comes before it."""


def _advance(schedule: Schedule, rank: _Rank, number: int, lane_of: LaneOf) -> list[Hashable]:
    """Run a rank up to a wait that is not over; the lanes on which it posted something at the front."""
    fronts: list[Hashable] = []
    while rank.at < len(rank.posted):
        operation = rank.posted[rank.at]
        verb, action, peer = operation
        if verb in _AWAITED and (_AWAITED[verb], action) in rank.under_way:
            break
        if rank.latest.get(action) not in _AFTER[verb]:
            raise ScheduleError(
                f"{schedule.name}: rank {number} posts '{operation}' out of order; an action's operations "
                f"are receive, wait for it, compute, send, wait for it, each once"
            )
        rank.latest[action] = verb
        if peer >= 0:
            sender, receiver = (number, peer) if verb is Verb.SEND else (peer, number)
            lane = lane_of(action.kind is not Kind.F, sender, receiver)
            queue = rank.lanes.setdefault(lane, deque())
            queue.append(operation)
            rank.under_way.add((verb, action))
            if len(queue) == 1:
                fronts.append(lane)
        rank.at += 1
    return fronts


def _match(schedule: Schedule, ranks: list[_Rank], number: int, lane: Hashable) -> set[int]:
    """Let messages of a lane pass, from the front of this rank's queue on; the ranks that may go on."""
    moved: set[int] = set()
    fronts = [number]
    while fronts:
        own = fronts.pop()
        queue = ranks[own].lanes.get(lane)
        if not queue:
            continue
        other = queue[0].peer
        theirs = ranks[other].lanes.get(lane)
        if not theirs or theirs[0].peer != own or theirs[0].verb is queue[0].verb:
            continue
        _same_message(schedule, (own, queue[0]), (other, theirs[0]))
        for rank in (own, other):
            operation = ranks[rank].lanes[lane].popleft()
            ranks[rank].under_way.discard((operation.verb, operation.action))
        moved |= {own, other}
        fronts += [own, other]
    return moved


def _same_message(schedule: Schedule, *ends: tuple[int, Operation]) -> None:
    """A receive takes what was sent first, whatever it was meant for."""
    (_, sent), (_, taken) = sorted(ends, key=lambda end: end[1].verb is Verb.RECEIVE)
    wanted = taken.action
    stage = target_of(sent.action, schedule.stages)
    forward = (sent.action.kind is Kind.F, wanted.kind is Kind.F)
    if forward[0] != forward[1] or (stage, sent.action.microbatch) != (wanted.stage, wanted.microbatch):
        raise ScheduleError(
            f"{schedule.name}: rank {sent.peer} takes the result of {sent.action} of rank {taken.peer} for "
            f"what its {wanted} needs: messages of one communicator are received in the order of sending"
        )


def _waits(rank: _Rank, number: int) -> str:
    fronts = [f"{queue[0]} on lane '{lane}'" for lane, queue in rank.lanes.items() if queue]
    at = f"'{rank.posted[rank.at]}'" if rank.at < len(rank.posted) else "its end"
    return f"rank {number} at {at} behind {', '.join(fronts)}"
