"""Layouts that a search has timed: the best, the Pareto front, and counts of what it did."""

from __future__ import annotations

import time
from bisect import insort
from collections.abc import Callable
from dataclasses import dataclass, field
from math import inf
from operator import attrgetter
from typing import Any, NamedTuple

from meshwright.planner.search.simplest import Changes, Ordering
from meshwright.spec import RunSpec

ROUNDING = 1 - 1e-9
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
    preferred: TimedLayout | None = None
    """The fastest of the simplest layouts near the best."""
    start: float = field(default_factory=time.perf_counter)
    best: list[TimedLayout] = field(default_factory=list)
    front: list[TimedLayout] = field(default_factory=list)
    """Layouts that no other timed one beats both in time and in memory, fastest first."""

    def hopeful(self, bound: float, changes: Changes | None = None) -> bool:
        """True if a layout that takes at least `bound` seconds can be among the best, whatever it
        changes."""
        return bound * (ROUNDING / self.speedup) <= self.cutoff

    def offer(self, timed: TimedLayout) -> None:
        """Keep a timed layout if it is among the best, simple, or on the front."""
        self.counts.timed += 1
        wanted = self.hopeful(timed.seconds * self.speedup)
        if self.exact is not None:
            if not wanted or not self._may_be_kept(timed):
                return
            timed = timed._replace(memory=self.exact(timed.spec))
            if timed.memory > self.capacity:
                return
        if self._on_front(timed):
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
        if len(self.best) == self.top:
            self.cutoff = self.best[-1].seconds
        if self.any_will_do:
            self.cutoff = -inf
        if self.progress is not None and self.best[0] is timed:
            self.progress(timed, self.counts)

    def _may_be_kept(self, timed: TimedLayout) -> bool:
        """True if a layout with at least such bytes can be the fastest of its kind, or on the front."""
        mine = kind(timed.spec)
        same = (each for each in self.best if kind(each.spec) == mine)
        return self._on_front(timed) or all(timed.seconds <= each.seconds for each in same)

    def _on_front(self, timed: TimedLayout) -> bool:
        return all(each.seconds > timed.seconds or each.memory > timed.memory for each in self.front)


@dataclass
class Simplest:
    """The fastest of the layouts that change least of those that take at most `most` seconds, so far."""

    ordering: Ordering
    most: float
    exact: Callable[[RunSpec], float] | None
    capacity: float
    speedup: float
    counts: SearchCounts
    best: TimedLayout | None = None
    changes: Changes | None = None
    """Those of the best."""

    def hopeful(self, bound: float, changes: Changes | None = None) -> bool:
        """True if a layout that takes at least `bound` seconds and makes `changes` at least can be before the
        best."""
        seconds = bound * (ROUNDING / self.speedup)
        if seconds > self.most or changes is None or self.best is None or self.changes is None:
            return seconds <= self.most
        return (changes, seconds) <= (self.changes, self.best.seconds)

    def offer(self, timed: TimedLayout) -> None:
        """Keep a timed layout if it is before the best."""
        self.counts.timed += 1
        if timed.seconds > self.most or not self._first(timed):
            return
        if self.exact is not None:
            timed = timed._replace(memory=self.exact(timed.spec))
        if timed.memory <= self.capacity:
            self.keep(timed)

    def keep(self, timed: TimedLayout) -> None:
        """Keep a layout that fits, if it is near the fastest and before the best."""
        if timed.seconds <= self.most and self._first(timed):
            self.best, self.changes = timed, self.ordering.of(timed.spec)

    def _first(self, timed: TimedLayout) -> bool:
        """True if a layout is before the best, by its changes and then as the list of plans is ordered."""
        if self.best is None or self.changes is None:
            return True
        return (self.ordering.of(timed.spec), timed.order) < (self.changes, self.best.order)
