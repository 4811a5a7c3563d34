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

_ROUNDING = 1 - 1e-9
"""Bounds, times and bytes are sums in another order than the exact ones."""


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
    """The `top` fastest layouts so far, best first, and their Pareto front."""

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
    cutoff: float = inf
    """Seconds of the slowest of the best, once there are `top`."""
    counts: SearchCounts = field(default_factory=SearchCounts)
    start: float = field(default_factory=time.perf_counter)
    best: list[TimedLayout] = field(default_factory=list)
    front: list[TimedLayout] = field(default_factory=list)
    """Layouts that no other timed one beats both in time and in memory, fastest first."""

    def hopeful(self, bound: float) -> bool:
        """True if a layout that takes at least `bound` seconds can be among the best."""
        return bound * (_ROUNDING / self.speedup) <= self.cutoff

    def offer(self, timed: TimedLayout) -> None:
        """Keep a timed layout if it is among the best, or on the front."""
        self.counts.timed += 1
        slow = timed.seconds > self.cutoff
        if self.exact is not None:
            if slow:
                return
            timed = timed._replace(memory=self.exact(timed.spec))
            if timed.memory > self.capacity:
                return
        if all(each.seconds > timed.seconds or each.memory > timed.memory for each in self.front):
            self.front = [
                each for each in self.front if each.seconds < timed.seconds or each.memory < timed.memory
            ]
            insort(self.front, timed, key=attrgetter("order"))
        if slow:
            return
        if self.counts.first_seconds is None:
            self.counts.first_seconds = time.perf_counter() - self.start
        insort(self.best, timed, key=attrgetter("order"))
        del self.best[self.top :]
        if self.any_will_do:
            self.cutoff = -inf
        elif len(self.best) == self.top:
            self.cutoff = min(self.cutoff, self.best[-1].seconds)
        if self.progress is not None and self.best[0] is timed:
            self.progress(timed, self.counts)
