"""Layouts that a search has timed: the best, the Pareto front, and counts of what it did."""

from __future__ import annotations

import time
from bisect import insort
from collections.abc import Callable
from dataclasses import dataclass, field
from math import inf
from typing import Any, NamedTuple

from meshwright.spec import RunSpec

_ROUNDING = 1 - 1e-9
"""Bounds, times and bytes are sums in another order than the exact ones."""


class TimedLayout(NamedTuple):
    """A layout that fits, timed; plans are sorted by these fields."""

    seconds: float
    memory: float
    """Bytes of the device on its fullest rank."""
    name: tuple[Any, ...]
    """Decides between equal plans."""
    spec: RunSpec


def timed_layout(seconds: float, memory: float, spec: RunSpec) -> TimedLayout:
    """A timed layout, named by its values and recompute policy, which no other layout of a space shares."""
    name = (*(str(value) for value in vars(spec.layout).values()), spec.recompute.policy)
    return TimedLayout(seconds, memory, name, spec)


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


@dataclass
class SearchResult:
    """The best layouts, best first, and the work of finding them."""

    best: list[TimedLayout]
    counts: SearchCounts
    seen: list[TimedLayout] = field(default_factory=list)
    """Pareto front (seconds, bytes) of all timed layouts, fastest first."""


Progress = Callable[[TimedLayout, SearchCounts], None]


class BestLayouts:
    """The `top` fastest layouts so far, whose slowest bounds what is still worth a look.

    `accept` has the last word on layouts that are fast enough: a closer look at their memory. `speedup` is by
    how much a rank may be faster than bounds take it to be.
    """

    def __init__(
        self,
        top: int,
        accept: Callable[[RunSpec], bool] | None,
        progress: Progress | None,
        speedup: float,
    ) -> None:
        self.top, self.accept, self.progress, self.cutoff = top, accept, progress, inf
        self.counts, self.start = SearchCounts(), time.perf_counter()
        self.best: list[TimedLayout] = []
        self.front: list[TimedLayout] = []
        self._quickest = _ROUNDING / speedup

    def hopeful(self, bound: float) -> bool:
        """True if a layout that takes at least `bound` seconds can be among the best."""
        return bound * self._quickest <= self.cutoff

    def offer(self, timed: TimedLayout) -> None:
        """Keep a timed layout if it is among the best, or on the front."""
        self.counts.timed += 1
        if timed.seconds > self.cutoff or (self.accept is not None and not self.accept(timed.spec)):
            if self.accept is None:
                self._compare(timed)
            return
        self._compare(timed)
        if self.counts.first_seconds is None:
            self.counts.first_seconds = time.perf_counter() - self.start
        insort(self.best, timed, key=lambda each: each[:3])
        del self.best[self.top :]
        if len(self.best) == self.top:
            self.cutoff = min(self.cutoff, self.best[-1].seconds)
        if self.progress is not None and self.best[0] is timed:
            self.progress(timed, self.counts)

    def _compare(self, timed: TimedLayout) -> None:
        """Update the front: layouts that no other one beats both in time and in memory."""
        if all(each.seconds > timed.seconds or each.memory > timed.memory for each in self.front):
            self.front = [
                each for each in self.front if each.seconds < timed.seconds or each.memory < timed.memory
            ]
            self.front.append(timed)

    def result(self) -> SearchResult:
        """The result so far."""
        self.counts.seconds = time.perf_counter() - self.start
        return SearchResult(self.best, self.counts, sorted(self.front, key=lambda each: each[:3]))
