"""Replays the operations that all ranks post under the rules of NCCL, and finds ranks that would hang.

- The operations of one communicator (lane) of a rank run one after the other, in the order of posting.
- A receive blocks its lane until it is matched; a send completes with its receive (NCCL may buffer small
  messages, which hides a hang at small sizes).
- The host posts without waiting. Waits are on the stream of the device: what is computed or posted after one
  starts when the awaited operation is done.

Since nothing that is posted after a wait starts before the wait is over, each rank is run up to its first
wait that is not over, again and again.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Hashable, Sequence

from meshwright.schedule.actions import Action, Kind, Schedule, ScheduleError, target_of
from meshwright.schedule.lanes import LaneOf, lane_rule
from meshwright.schedule.posting import Operation, PostedKind, postings


def replay(
    schedule: Schedule, lane_of: LaneOf | None = None, posted: Sequence[Sequence[Operation]] | None = None
) -> None:
    """Raise `ScheduleError` if ranks wait for each other forever, or receive another message than was sent.

    `lane_of` says which messages share a communicator, by default `lane_rule`; `posted` are the operations by
    rank, by default `postings(schedule)`.
    """
    posted = postings(schedule) if posted is None else posted
    ranks = [_Progress(number, listed) for number, listed in enumerate(posted)]
    lane_of = lane_of or lane_rule(schedule.ranks)
    work = [*ranks]
    while work:
        rank = work.pop()
        for lane in _advance(schedule, rank, lane_of):
            work += _match(schedule, ranks, rank, lane)
    waiting = [str(rank) for rank in ranks if not rank.ended]
    if waiting:
        raise ScheduleError(
            f"{schedule.name}: on communicators that keep their order the ranks wait for each other: "
            + "; ".join(waiting)
        )


class _Progress:
    """Progress of one rank through its operations."""

    def __init__(self, number: int, posted: Sequence[Operation]) -> None:
        self.number, self.posted, self.at = number, posted, 0
        self.lanes: dict[Hashable, deque[Operation]] = defaultdict(deque)
        self.under_way: set[tuple[PostedKind, Action]] = set()
        self.latest: dict[Action, PostedKind] = {}
        """The last operation of each action."""

    @property
    def ended(self) -> bool:
        return self.at == len(self.posted) and not self.under_way

    def __str__(self) -> str:
        fronts = [f"{queue[0]} on lane '{lane}'" for lane, queue in self.lanes.items() if queue]
        at = "its end" if self.at == len(self.posted) else f"'{self.posted[self.at]}'"
        return f"rank {self.number} at {at} behind {', '.join(fronts)}"


_AWAITED = {PostedKind.RECEIVED: PostedKind.RECEIVE, PostedKind.SENT: PostedKind.SEND}
_AFTER: dict[PostedKind, tuple[PostedKind | None, ...]] = {
    PostedKind.RECEIVE: (None,),
    PostedKind.RECEIVED: (PostedKind.RECEIVE,),
    PostedKind.COMPUTE: (None, PostedKind.RECEIVED),
    PostedKind.SEND: (PostedKind.COMPUTE,),
    PostedKind.SENT: (PostedKind.SEND,),
}
"""Each operation -> the operation of its action that comes before it."""


def _advance(schedule: Schedule, rank: _Progress, lane_of: LaneOf) -> list[Hashable]:
    """Run a rank up to a wait that is not over; return the lanes with a new operation at the front."""
    fronts: list[Hashable] = []
    while rank.at < len(rank.posted):
        verb, action, peer = operation = rank.posted[rank.at]
        if verb in _AWAITED and (_AWAITED[verb], action) in rank.under_way:
            break
        if rank.latest.get(action) not in _AFTER[verb]:
            raise ScheduleError(
                f"{schedule.name}: rank {rank.number} posts '{operation}' out of order; an action's "
                f"operations are receive, wait for it, compute, send, wait for it, each once"
            )
        rank.latest[action] = verb
        if peer >= 0:
            ends = (rank.number, peer) if verb is PostedKind.SEND else (peer, rank.number)
            lane = lane_of(action.kind is not Kind.F, *ends)
            rank.lanes[lane].append(operation)
            rank.under_way.add((verb, action))
            if len(rank.lanes[lane]) == 1:
                fronts.append(lane)
        rank.at += 1
    return fronts


def _match(schedule: Schedule, ranks: list[_Progress], rank: _Progress, lane: Hashable) -> list[_Progress]:
    """Let messages of a lane pass, from the front of the rank's queue on; return the ranks that may go on."""
    moved: list[_Progress] = []
    fronts = [rank]
    while fronts:
        own = fronts.pop()
        queue = own.lanes[lane]
        if not queue:
            continue
        other = ranks[queue[0].peer]
        theirs = other.lanes[lane]
        if not theirs or theirs[0].peer != own.number or theirs[0].verb is queue[0].verb:
            continue
        _check_same_message(schedule, queue[0], theirs[0])
        for end in (own, other):
            verb, action, _ = end.lanes[lane].popleft()
            end.under_way.discard((verb, action))
        moved += [own, other]
        fronts += [own, other]
    return moved


def _check_same_message(schedule: Schedule, *ends: Operation) -> None:
    """Raise `ScheduleError` unless the receive that takes a message is the one that it was sent for."""
    sent, taken = sorted(ends, key=lambda end: end.verb is PostedKind.RECEIVE)
    (kind, _, microbatch), wanted = sent.action, taken.action
    delivered = kind is Kind.F, target_of(sent.action, schedule.stages), microbatch
    if delivered != (wanted.kind is Kind.F, wanted.stage, wanted.microbatch):
        raise ScheduleError(
            f"{schedule.name}: rank {sent.peer} takes the result of {sent.action} of rank {taken.peer} for "
            f"what its {wanted} needs: messages of one communicator are received in the order of sending"
        )
