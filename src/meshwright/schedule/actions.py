"""A pipeline schedule as data: the actions of each rank in order, and which action waits for which.

Symbols in this package: p ranks of the pipeline, v stages on each of them (virtual), m microbatches per step.
Stages are numbered 0 to v*p - 1 in the order in which a microbatch's forward visits them. Sends and receives
are not in the lists, since they follow from the placement of the stages (`steps`): the result of a stage goes
to a neighbouring stage.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property
from itertools import accumulate, chain, islice
from typing import NamedTuple


class ScheduleError(ValueError):
    """An invalid schedule; one sentence with the key or action, its value, the reason and a remedy."""


class Kind(IntEnum):
    """Kind of computation: forward F, backward B, or its halves for inputs I and weights W (Qi et al.
    2023)."""

    F = 0
    """Forward."""
    I = 1  # noqa: E741
    """Backward for the input: the gradient that the previous stage waits for."""
    W = 2
    """Backward for the weights: no other action waits for it."""
    B = 3
    """Whole backward: I, then W."""


class Action(NamedTuple):
    """One microbatch through one stage, in one direction."""

    kind: Kind
    stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.kind.name}{self.stage}.{self.microbatch}"


class Step(NamedTuple):
    """An action with its messages: the rank to receive from before it, and the rank to send to after it."""

    action: Action
    source: int | None
    target: int | None


Lists = Sequence[Sequence[Action]]
"""Rank -> its actions in order."""


@dataclass(frozen=True)
class DependencyGraph:
    """Dependencies between the actions of a schedule, as lists with one entry per action.

    Actions are numbered rank by rank in the order of the lists.
    """

    starts: list[int]
    """Rank -> the number of its first action; the last entry is the number of all actions."""
    rank_of: list[int]
    source: list[int]
    """The action of a neighbouring stage whose result this one waits for; -1 if there is none."""
    target: list[int]
    """The action that waits for the result of this one; -1 if there is none."""
    crosses: list[bool]
    """True if the target is on another rank."""

    @cached_property
    def order(self) -> list[int]:
        """Actions in an order that respects the lists and the sources, without those that wait for ever."""
        head, stops = self.starts[:-1], self.starts[1:]
        done = [False] * len(self.rank_of)
        order: list[int] = []
        work = list(range(len(head)))
        while work:
            rank = work.pop()
            at = head[rank]
            while at < stops[rank] and (self.source[at] < 0 or done[self.source[at]]):
                done[at] = True
                order.append(at)
                target = self.target[at]
                if target >= 0 and head[self.rank_of[target]] == target:
                    work.append(self.rank_of[target])
                at += 1
            head[rank] = at
        return order


@dataclass(frozen=True)
class Schedule:
    """The lists of all ranks, and the placement of the stages."""

    name: str
    ranks: int
    virtual: int
    microbatches: int
    rank_of: tuple[int, ...]
    """Stage -> the rank that computes it."""
    actions: tuple[tuple[Action, ...], ...]
    """Rank -> its actions in order."""

    @property
    def stages(self) -> int:
        """Number of stages: v * p."""
        return len(self.rank_of)

    @cached_property
    def splits_backward(self) -> bool:
        """True if some backward is split into the actions I and W."""
        return any(action.kind is Kind.I for listed in self.actions for action in listed)

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """The stages of a rank, ascending."""
        return tuple(stage for stage, owner in enumerate(self.rank_of) if owner == rank)

    @cached_property
    def flow(self) -> DependencyGraph:
        """Dependencies of lists that contain each action once (see `check`), or only the forwards."""
        microbatches = self.microbatches
        starts = [0, *accumulate(len(listed) for listed in self.actions)]
        rank_of = [rank for rank, listed in enumerate(self.actions) for _ in listed]
        # The action of each (stage, microbatch), with an empty stage at each end.
        forward = [-1] * ((self.stages + 2) * microbatches)
        backward = forward.copy()
        for at, (kind, stage, microbatch) in enumerate(chain(*self.actions)):
            if kind is not Kind.W:
                (forward if kind is Kind.F else backward)[(stage + 1) * microbatches + microbatch] = at
        source, target = [-1] * len(rank_of), [-1] * len(rank_of)
        for i in range(microbatches, (self.stages + 1) * microbatches):
            source[forward[i]], target[forward[i]] = forward[i - microbatches], forward[i + microbatches]
            if backward[i] >= 0:
                source[backward[i]] = backward[i + microbatches]
                target[backward[i]] = backward[i - microbatches]
        crosses = [to >= 0 and rank_of[to] != rank for to, rank in zip(target, rank_of, strict=True)]
        return DependencyGraph(starts, rank_of, source, target, crosses)


def looped(ranks: int, virtual: int) -> tuple[int, ...]:
    """Stage s on rank s % p: after the last rank comes the first again (Narayanan et al. 2021)."""
    return tuple(stage % ranks for stage in range(ranks * virtual))


def v_shape(ranks: int) -> tuple[int, ...]:
    """Two stages per rank, down and back up: the first and last stage are on rank 0 (Qi et al. 2023, §6)."""
    return (*range(ranks), *reversed(range(ranks)))


def target_of(action: Action, stages: int) -> int | None:
    """The stage that waits for an action's result: none for the last forward, the first backward, any W."""
    if action.kind is Kind.W:
        return None
    stage = action.stage + 1 if action.kind is Kind.F else action.stage - 1
    return stage if 0 <= stage < stages else None


def steps(schedule: Schedule) -> tuple[tuple[Step, ...], ...]:
    """Rank -> its actions, each with the rank to receive from before it and the rank to send to after it.

    A forward receives the activations that stage - 1 computed and sends its own to stage + 1; an I or B
    receives the gradient that stage + 1 computed and sends its own to stage - 1; a W does neither. Nothing is
    sent between two stages of one rank.
    """
    flow = schedule.flow

    def peer(rank: int, other: int) -> int | None:
        return None if other < 0 or flow.rank_of[other] == rank else flow.rank_of[other]

    ends = zip(chain(*schedule.actions), flow.rank_of, flow.source, flow.target, strict=True)
    rows = (Step(action, peer(rank, source), peer(rank, target)) for action, rank, source, target in ends)
    return tuple(tuple(islice(rows, len(listed))) for listed in schedule.actions)
