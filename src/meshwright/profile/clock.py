"""Times of calls, by the host's clock, or by CUDA's events where work is queued.

Of repeats the lower quartile counts, as other work on a machine only ever adds to a time. Where more ranks
than cores share a host, what a rank computes takes as long as its processor's time times the ranks that share
a core: that leaves out what other programs took meanwhile.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from itertools import pairwise

import torch

LEAST, MOST = 3, 1000
"""Repeats of a call."""


class Clock:
    """Times what runs on `device`; `share` ranks share a core."""

    def __init__(self, device: torch.device, share: float = 1.0) -> None:
        self.device, self.cuda, self.share = device, device.type == "cuda", max(1.0, share)
        self.crowded = share > 1

    def alone(self) -> Clock:
        """A clock for what one rank does while the others wait."""
        clock = Clock(self.device)
        clock.crowded = self.crowded
        return clock

    def typical(self, times: list[float]) -> float:
        """Lower quartile of repeated timings, in seconds."""
        return sorted(times)[(len(times) - 1) // 4]

    def _computed(self, call: Callable[[], object]) -> float:
        """Seconds of a call that waits for no other rank."""
        if not self.crowded:
            return self.once(call)
        start = time.process_time()
        call()
        return (time.process_time() - start) * self.share

    def settle(self) -> None:
        """Wait for what this thread has queued; what a collective has queued beside it goes on."""
        if self.cuda:
            torch.cuda.current_stream().synchronize()

    def once(self, call: Callable[[], object]) -> float:
        """Seconds of one call, until what it queued is done."""
        self.settle()
        start = time.perf_counter()
        call()
        self.settle()
        return time.perf_counter() - start

    def during(self, call: Callable[[], object], seconds: float) -> float:
        """The time of a call that waits for no other rank, by calls for `seconds`, but at least one.

        The first is not counted.
        """
        self.once(call)
        if self.cuda:
            return self.times(call, repeats_within(seconds, self.once(call)))
        times: list[float] = []
        end = time.perf_counter() + seconds
        while not times or (time.perf_counter() < end and len(times) < MOST):
            times.append(self._computed(call))
        return self.typical(times)

    def times(self, call: Callable[[], object], repeats: int) -> float:
        """The time of a call, by so many of them: what takes several ranks is called by each as often."""
        if not self.cuda:
            return self.typical([self.once(call) for _ in range(repeats)])
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]
        marks[0].record()
        for mark in marks[1:]:
            call()
            mark.record()
        self.settle()
        spans = [before.elapsed_time(after) for before, after in pairwise(marks)]
        return self.typical(spans) / 1e3


def time_shares(seconds: float, parts: int) -> Iterator[float]:
    """Seconds for each of `parts` measurements: the later ones share what one leaves over or overdraws."""
    end = time.perf_counter() + seconds
    for left in range(parts, 0, -1):
        yield max(0.0, end - time.perf_counter()) / left


def repeats_within(seconds: float, duration: float, least: int = LEAST) -> int:
    """Calls of `duration` seconds that fill `seconds`: at least `least`, and at most `MOST`."""
    return max(least, min(MOST, int(seconds / max(duration, 1e-9))))
