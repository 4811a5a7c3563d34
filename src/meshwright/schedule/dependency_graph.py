"""The lists as arrays of numbers, with who waits for whom: what the checker and the simulator run on.

Actions are numbered rank by rank in the order of the lists, so a rank's are neighbours.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate, chain

from meshwright.schedule.actions import Kind, Schedule


@dataclass(frozen=True)
class DependencyGraph:
    """Lists with one entry an action; only `starts` is rank -> its first action, and last their number."""

    starts: list[int]
    rank_of: list[int]
    source: list[int]
    """The action whose result this one waits for, in the stage beside; -1 where there is none."""
    target: list[int]
    """The action that waits for this one's result; -1 where there is none."""
    crosses: list[bool]
    """True if the target is on another rank."""

    @property
    def ranks(self) -> int:
        return len(self.starts) - 1

    @property
    def actions(self) -> int:
        return len(self.rank_of)


def flow_of(schedule: Schedule) -> DependencyGraph:
    """Number the actions of lists in which each is there once (see `check`), or forwards only."""
    microbatches, stages = schedule.microbatches, schedule.stages
    starts = [0, *accumulate(len(listed) for listed in schedule.actions)]
    rank_of = [rank for rank, listed in enumerate(schedule.actions) for _ in listed]
    # Where each (stage, microbatch) is computed, with an empty stage at each end.
    forward = [-1] * ((stages + 2) * microbatches)
    backward = forward.copy()
    for at, (kind, stage, microbatch) in enumerate(chain.from_iterable(schedule.actions)):
        if kind is not Kind.W:
            (forward if kind is Kind.F else backward)[(stage + 1) * microbatches + microbatch] = at
    source, target = [-1] * len(rank_of), [-1] * len(rank_of)
    for i in range(microbatches, (stages + 1) * microbatches):
        source[forward[i]], target[forward[i]] = forward[i - microbatches], forward[i + microbatches]
        if backward[i] >= 0:
            source[backward[i]], target[backward[i]] = backward[i + microbatches], backward[i - microbatches]
    crosses = [to >= 0 and rank_of[to] != rank for to, rank in zip(target, rank_of, strict=True)]
    return DependencyGraph(starts, rank_of, source, target, crosses)
