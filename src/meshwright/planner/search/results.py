"""Layouts that a search has timed: the best, the Pareto front, and counts of what it did."""

from __future__ import annotations

import time
from bisect import insort
from collections.abc import Callable
from dataclasses import dataclass, field
from math import inf
from operator import attrgetter
from typing import Any, NamedTuple

from meshwright.spec import RunSpec

NEAR = 0.02
"""Share by which the predicted step of a simpler layout may be longer than the fastest, to be preferred."""
_ROUNDING = 1 - 1e-9
"""Bounds, times and bytes are sums in another order than the exact ones."""
AXES = ("replicate", "dp", "cp", "tp", "pp", "ep", "etp")


def kind(spec: RunSpec) -> tuple[Any, ...]:
    """The choices that tell shown layouts apart: axes inside a copy of the model, ZeRO-3, recomputation.

    Others are variants of one layout: how data ranks share the rest of the states (in a pipeline parameters
    too, which stay whole through a step), another schedule, cut, microbatch, mode or order of the axes.
    """
    layout = spec.layout
    inside = layout.cp, layout.tp, layout.pp, layout.ep, layout.etp
    return *inside, layout.zero == 3 and layout.pp == 1, spec.recompute.policy


def simplicity(spec: RunSpec) -> tuple[bool, int, bool, int]:
    """Sort key, the simplest first: a pipeline, axes larger than 1, recomputation, and how many of schedule,
    cut and order of the axes are other than 1f1b, even and the default."""
    layout = spec.layout
    used = sum(getattr(layout, axis) > 1 for axis in AXES)
    odd = [layout.schedule != "1f1b", layout.stages != "even", layout.order != "pp-replicate-dp-tp"]
    return layout.pp > 1, used, spec.recompute.policy != "none", sum(odd)


class TimedLayout(NamedTuple):
    """A layout that fits, timed."""

    seconds: float
    memory: float
    """Bytes of the device on its fullest rank."""
    spec: RunSpec

    @property
    def order(self) -> tuple[Any, ...]:
        """Sort key: seconds, then bytes; the values of the layout decide between equal plans."""
        values = (str(value) for value in vars(self.spec.layout).values())
        return self.seconds, self.memory, *values, self.spec.recompute.policy


@dataclass
class SearchCounts:
    """Work of a search."""

    branches: int = 0
    simulated: int = 0
    timed: int = 0
    """Layouts whose time and memory are known exactly."""
    seconds: float = 0.0
    first_seconds: float | None = None
    """Until the first plan was known."""


Progress = Callable[[TimedLayout, SearchCounts], None]


@dataclass
class SearchResult:
    """The fastest layouts of the `top` fastest kinds so far, best first, and the Pareto front of all."""

    top: int
    exact: Callable[[RunSpec], float] | None
    """Bytes of the device on a layout's fullest rank, where layouts come with a lower bound of them."""
    capacity: float
    """Bytes of a device that may be used."""
    progress: Progress | None
    speedup: float
    """By how much a rank may be faster than bounds take it to be."""
    any_will_do: bool
    """True if nothing is hopeful any more after the first layout."""
    counts: SearchCounts
    cutoff: float = inf
    """Seconds of the slowest of the best, once there are `top`."""
    near: float = inf
    """Seconds up to which a simpler layout is preferred to the fastest."""
    preferred: TimedLayout | None = None
    """The fastest of the simplest layouts up to there."""
    start: float = field(default_factory=time.perf_counter)
    best: list[TimedLayout] = field(default_factory=list)
    again: bool = False
    """True if layouts were passed over for a simpler one that is no longer near: search again."""
    _passed_over: float = inf
    """Least seconds of those that were passed over for a simpler one."""
    _simple: dict[tuple[bool, int, bool, int], TimedLayout] = field(default_factory=dict)
    """The fastest layout of each simplicity."""
    front: list[TimedLayout] = field(default_factory=list)
    """Layouts that no other timed one beats both in time and in memory, fastest first."""

    def hopeful(self, bound: float, simplest: Callable[[], RunSpec] | None = None) -> bool:
        """True if a layout that takes at least `bound` seconds can be among the best, or preferred to them.

        It is no simpler than the one that `simplest` returns.
        """
        seconds = bound * (_ROUNDING / self.speedup)
        if seconds <= self.cutoff or self.preferred is None or seconds > self.near:
            return seconds <= self.cutoff
        rank = simplicity(self.preferred.spec), self.preferred.seconds
        if simplest is None or (simplicity(simplest()), seconds) <= rank:
            return True
        self._passed_over = min(self._passed_over, seconds)
        return False

    def offer(self, timed: TimedLayout) -> None:
        """Keep a timed layout if it is among the best, simple, or on the front."""
        self.counts.timed += 1
        wanted = self.hopeful(timed.seconds * self.speedup, lambda: timed.spec)
        if self.exact is not None:
            if not wanted:
                return
            timed = timed._replace(memory=self.exact(timed.spec))
            if timed.memory > self.capacity:
                return
        if all(each.seconds > timed.seconds or each.memory > timed.memory for each in self.front):
            self.front = [
                each for each in self.front if each.seconds < timed.seconds or each.memory < timed.memory
            ]
            insort(self.front, timed, key=attrgetter("order"))
        if not wanted:
            return
        if self.counts.first_seconds is None:
            self.counts.first_seconds = time.perf_counter() - self.start
        fastest: dict[tuple[Any, ...], TimedLayout] = {}
        for each in sorted([*self.best, timed], key=attrgetter("order")):
            fastest.setdefault(kind(each.spec), each)
        self.best = list(fastest.values())[: self.top]
        mine = simplicity(timed.spec)
        self._simple[mine] = min(timed, self._simple.get(mine, timed), key=attrgetter("order"))
        self.near = self.best[0].seconds * (1 + NEAR)
        near = [rank for rank, each in self._simple.items() if each.seconds <= self.near]
        before, self.preferred = self.preferred, self._simple[min(near)]
        if before is not None and min(near) > simplicity(before.spec):
            self.again = self.again or self._passed_over <= self.near
        if len(self.best) == self.top:
            self.cutoff = self.best[-1].seconds
        if self.any_will_do:
            self.cutoff = self.near = -inf
        if self.progress is not None and self.best[0] is timed:
            self.progress(timed, self.counts)
