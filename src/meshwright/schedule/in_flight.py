"""Microbatches in flight on the ranks of a schedule at the moments that may be their fullest."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache
from operator import le, mul
from typing import NamedTuple

from meshwright.schedule.actions import Action, Kind
from meshwright.schedule.registry import actions_of, stages_of
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
    lists = _lists(layout, microbatches)
    return tuple(_of_schedule(*lists, rank) for rank in range(layout.pp))


def most_in_flight(layout: Layout, microbatches: int, ranks: tuple[int, ...]) -> InFlight:
    """The microbatches in flight on any of some ranks of a layout's pipeline, none of whose lists is made but
    theirs where these are written rank by rank."""
    return _of_ranks(*_lists(layout, microbatches), ranks)


def _lists(layout: Layout, microbatches: int) -> tuple[str, int, int, int]:
    """Arguments of `make`."""
    return layout.schedule if layout.pp > 1 else "1f1b", layout.pp, layout.chunks, microbatches


@lru_cache(maxsize=4096)
def _of_ranks(name: str, ranks: int, virtual: int, microbatches: int, some: tuple[int, ...]) -> InFlight:
    each = [_of_schedule(name, ranks, virtual, microbatches, rank) for rank in some]
    by_stage = dict.fromkeys(moment for flight in each for moment in flight.by_stage)
    return InFlight(tuple(by_stage), _pairs(pair for flight in each for pair in flight.together))


@lru_cache(maxsize=65536)
def _of_schedule(name: str, ranks: int, virtual: int, microbatches: int, rank: int) -> InFlight:
    if SCHEDULES[name].holds_all:
        held = (microbatches,) * virtual + (0,) * virtual
        return InFlight((held,), ((virtual * microbatches, 0),))
    listed = actions_of(name, ranks, virtual, microbatches, rank)
    return _of_rank(listed, stages_of(name, ranks, virtual, rank))


def _of_rank(actions: Iterable[Action], own: Sequence[int]) -> InFlight:
    """The microbatches in flight on the rank with the stages `own`."""
    count, place = len(own), {stage: place for place, stage in enumerate(own)}
    now, rising = [0] * 2 * count, False
    peaks: set[tuple[int, ...]] = set()
    forward, input, weight, _ = Kind
    for kind, stage, _ in actions:
        at = place[stage]
        if kind is forward:
            now[at] += 1
            rising = True
            continue
        if rising:
            peaks.add(tuple(now))
        rising = kind is input
        now[count + at if kind is weight else at] -= 1
        now[count + at] += rising
    kept = _largest(peaks)
    return InFlight(tuple(kept), _pairs((sum(each[:count]), sum(each[count:])) for each in kept))


def _pairs(pairs: Iterable[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    """The largest pairs."""
    return tuple((whole, deferred) for whole, deferred in _largest(set(pairs)))


def _largest(vectors: Iterable[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """The vectors that are not below another one in every number."""
    kept: list[tuple[int, ...]] = []
    for each in sorted(vectors, key=sum, reverse=True):
        if not any(all(map(le, each, other)) for other in kept):
            kept.append(each)
    return kept
