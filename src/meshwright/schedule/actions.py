"""A pipeline schedule as data: for each rank the list of what it computes, in order.

Letters, here and in the rest of the package: p ranks of the pipeline, v stages on each of them (virtual), m
microbatches of one step. Stages are numbered 0 to v*p - 1 in the order in which a microbatch's forward visits
them. Sends and receives are not in the lists: what a stage computes goes to the stage beside it, so where it
goes and where it comes from follows from the placement of the stages (`steps`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property
from typing import NamedTuple


class ScheduleError(ValueError):
    """A schedule that can't be, as one sentence: which key or action, its value, why, and what would work."""


class Kind(IntEnum):
    """Kind of computation: forward F, backward B, or its halves for inputs I and weights W (Qi et al.
    2023)."""

    F = 0
    """Forward."""
    I = 1  # noqa: E741
    """Backward for the input: the gradient that the stage before waits for."""
    W = 2
    """Backward for the weights: nobody waits for it."""
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
class Schedule:
    """The lists of all ranks, and where the stages are."""

    name: str
    ranks: int
    virtual: int
    microbatches: int
    rank_of: tuple[int, ...]
    """Stage -> the rank that computes it."""
    actions: tuple[tuple[Action, ...], ...]
    """Rank -> what it computes, in order."""

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


def looped(ranks: int, virtual: int) -> tuple[int, ...]:
    """Stage s on rank s % p: after the last rank comes the first again (Narayanan et al. 2021)."""
    return tuple(stage % ranks for stage in range(ranks * virtual))


def v_shape(ranks: int) -> tuple[int, ...]:
    """Two stages a rank, down and back up: the first and the last stage share rank 0 (Qi et al. 2023, §6)."""
    return (*range(ranks), *reversed(range(ranks)))


def source_of(action: Action, stages: int) -> int | None:
    """The stage whose result an action waits for: none for the first forward, the last backward, any W."""
    if action.kind is Kind.W:
        return None
    stage = action.stage - 1 if action.kind is Kind.F else action.stage + 1
    return stage if 0 <= stage < stages else None


def target_of(action: Action, stages: int) -> int | None:
    """The stage that waits for an action's result: none for the last forward, the first backward, any W."""
    if action.kind is Kind.W:
        return None
    stage = action.stage + 1 if action.kind is Kind.F else action.stage - 1
    return stage if 0 <= stage < stages else None


def steps(schedule: Schedule) -> tuple[tuple[Step, ...], ...]:
    """Rank -> its actions with what each receives first and then sends.

    A forward receives the activations that stage - 1 computed and sends its own to stage + 1; an I or B
    receives the gradient that stage + 1 computed and sends its own to stage - 1; a W does neither. Nothing is
    sent where the stage beside is on the same rank.
    """
    rank_of, stages = schedule.rank_of, schedule.stages

    def other(rank: int, stage: int | None) -> int | None:
        return None if stage is None or rank_of[stage] == rank else rank_of[stage]

    return tuple(
        tuple(
            Step(action, other(rank, source_of(action, stages)), other(rank, target_of(action, stages)))
            for action in listed
        )
        for rank, listed in enumerate(schedule.actions)
    )
