"""Microbatches in flight on the ranks of a schedule at the moments that may be their fullest."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache
from operator import le, mul
from typing import NamedTuple

from meshwright.schedule.actions import Action, Kind
from meshwright.schedule.registry import make
from meshwright.spec.layout import Layout
from meshwright.spec.pipeline_schedules import SCHEDULES


class InFlight(NamedTuple):
    """Microbatches in flight on one rank, moment by moment: at no other moment it has as many of each."""

    by_stage: tuple[tuple[int, ...], ...]
    """Those of each of its stages whose activations are there, and then those of each of which the weight
    gradients alone are left."""
    together: tuple[tuple[int, int], ...]
    """Both numbers over all its stages."""

    def most(self, whole: Sequence[float], deferred: Sequence[float]) -> float:
        """Most bytes, for those that one microbatch keeps in each stage until its backward, and those that it
        keeps after the first half of a split one.
        """
        first, second = whole[0], deferred[0]
        if all(size == first for size in whole) and all(size == second for size in deferred):
            return max([a * first + b * second for a, b in self.together])
        return max(sum(map(mul, moment, (*whole, *deferred))) for moment in self.by_stage)


def in_flight(layout: Layout, microbatches: int) -> tuple[InFlight, ...]:
    """The microbatches in flight on each rank of a layout's pipeline; without one, on one rank."""
    return _of_schedule(layout.schedule if layout.pp > 1 else "1f1b", layout.pp, layout.chunks, microbatches)


@lru_cache(maxsize=4096)
def _of_schedule(name: str, ranks: int, virtual: int, microbatches: int) -> tuple[InFlight, ...]:
    if SCHEDULES[name].holds_all:
        held = (microbatches,) * virtual + (0,) * virtual
        return (InFlight((held,), ((virtual * microbatches, 0),)),) * ranks
    made = make(name, ranks, virtual, microbatches)
    return tuple(_of_rank(actions, made.stages_of(rank)) for rank, actions in enumerate(made.actions))


def _of_rank(actions: Iterable[Action], own: Sequence[int]) -> InFlight:
    """The microbatches in flight on the rank with the stages `own`."""
    count, place = len(own), {stage: place for place, stage in enumerate(own)}
    now, rising = [0] * 2 * count, False
    peaks: set[tuple[int, ...]] = set()
    for kind, stage, _ in actions:
        at = place[stage]
        if kind is Kind.F:
            now[at] += 1
            rising = True
            continue
        if rising:
            peaks.add(tuple(now))
        rising = kind is Kind.I
        now[count + at if kind is Kind.W else at] -= 1
        now[count + at] += rising
    kept = _largest(peaks)
    pairs = _largest({(sum(each[:count]), sum(each[count:])) for each in kept})
    return InFlight(tuple(kept), tuple((whole, deferred) for whole, deferred in pairs))


def _largest(vectors: Iterable[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """The vectors that are not below another one in every number."""
    kept: list[tuple[int, ...]] = []
    for each in sorted(vectors, key=sum, reverse=True):
        if not any(all(map(le, each, other)) for other in kept):
            kept.append(each)
    return kept
