"""Lanes: the communicators over which the messages of a pipeline travel.

NCCL runs the operations of one communicator strictly in the order in which a rank posts them, and a receive
blocks those behind it until its message has come. If a rank both sends and receives on one communicator, two
neighbours can each have a receive in front of the send that the other one waits for, and both hang. Lanes
are chosen so that a rank only sends or only receives on each of them; then only the order of the messages
between two ranks matters, and that is the order in which they are received (`Report.in_order_by_kind`).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from itertools import pairwise
from typing import NamedTuple


class Lane(NamedTuple):
    """One communicator of a pipeline, by what it carries and between which ranks."""

    gradients: bool
    """True for gradients, which go back through the stages; False for activations."""
    up: bool
    """True for messages to the next rank (the first comes after the last), False for the previous one."""
    senders: int
    """0 for senders of even rank, 1 for those of odd rank; 2 for messages between the last and the first rank
    where the number of ranks is odd."""

    def __str__(self) -> str:
        carried = "gradients" if self.gradients else "activations"
        senders = ("from even ranks", "from odd ranks", "around the ends")[self.senders]
        return f"{carried} {'up' if self.up else 'down'} {senders}"


LaneOf = Callable[[bool, int, int], Hashable]
"""(gradients, sender, receiver) -> the lane of a message."""


def lane_rule(ranks: int) -> Callable[[bool, int, int], Lane]:
    """Return the function that gives the lane of each message between neighbours among `ranks` ranks.

    Senders of even and of odd rank have separate lanes, so that no receiver of a lane is among its senders.
    In a ring of an odd number of ranks the last and the first rank are both even: messages between these two
    are a third class.
    """

    def lane_of(gradients: bool, sender: int, receiver: int) -> Lane:
        around = ranks % 2 and abs(sender - receiver) != 1
        senders = 2 if around else sender % 2
        return Lane(gradients, receiver == (sender + 1) % ranks, senders)

    return lane_of


def lanes_of(rank_of: Sequence[int]) -> tuple[Lane, ...]:
    """Return the lanes that a pipeline with stage s on rank `rank_of[s]` needs, sorted; at most 8.

    They depend on the placement only, not on the order of the schedule or the number of microbatches, so
    their communicators can be created before these are known.
    """
    lane_of = lane_rule(max(rank_of) + 1)
    lanes: set[Lane] = set()
    for before, after in pairwise(rank_of):
        if before != after:
            lanes |= {lane_of(False, before, after), lane_of(True, after, before)}
    return tuple(sorted(lanes))
