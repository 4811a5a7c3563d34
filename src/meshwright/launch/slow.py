"""Detection of slow ranks: in each step they compute for longer than others that do the same work.

A slow rank makes all others wait, so all take equally long for a step; what tells them apart is the time that
each spends outside of waits for others, and for a processor: that other programs use the host makes no rank
slow. On CUDA the host hands its work to the device and waits for it as a whole, which no heartbeat shows:
there only a slow host is seen.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from meshwright.comm.heartbeat import STEP_PHASES, Beat
from meshwright.launch.hang import MOST_TICK_S
from meshwright.rank.processes import queued_seconds

WINDOW_STEPS, WINDOW_S = 20, 5.0
"""Least steps and seconds of a window over which the time of a step is taken."""
WINDOWS, SLOW_WINDOWS = 5, 4
"""A rank is slow that was so in so many of the last windows."""
RATIO, DEVIATIONS, LEAST_S = 1.25, 6.0, 0.005
"""A rank is slow in a window if its time is above the others' median by this factor, by so many of their
median absolute deviations, and by so many seconds: rank 0 writes the record, too."""


@dataclass(frozen=True)
class Slow:
    """A slow rank: seconds that it computes in a step, and the median of the others."""

    rank: int
    step: int
    seconds: float
    others: float

    @property
    def sentence(self) -> str:
        """A sentence for people."""
        return (
            f"rank {self.rank} computes for {self.seconds:.3g} s in each step, the others for "
            f"{self.others:.3g} s"
        )


@dataclass
class _Timed:
    beat: Beat
    first_step: int
    computed: float = 0.0
    """Seconds of the window in steps, without waits for others and for a processor."""
    slow: deque[bool] = field(default_factory=lambda: deque(maxlen=WINDOWS))
    told: bool = False


class SlowWatch:
    """Looks at the heartbeats of `ranks` ranks of one host; the first has number `first` in the world.

    Runs of `peers` ranks of the world do the same work, by default all. `pids` are the ranks' processes.
    """

    def __init__(
        self,
        heartbeats: memoryview,
        ranks: int,
        now: float,
        peers: int | None = None,
        first: int = 0,
        pids: Sequence[int] = (),
    ) -> None:
        self._heartbeats, self._last, self._began, self._first = heartbeats, now, now, first
        self._peers = peers or first + ranks
        beats = [Beat.of(heartbeats, number) for number in range(ranks)]
        self._ranks = [_Timed(beat, beat.step) for beat in beats]
        self._pids, self._queued = pids, [queued_seconds(pid) for pid in pids]

    def look(self, now: float) -> list[Slow]:
        """Return ranks that have become slow; called several times a second with `time.monotonic`."""
        elapsed, self._last = now - self._last, now
        before, self._queued = self._queued, [queued_seconds(pid) for pid in self._pids]
        for number, rank in enumerate(self._ranks):
            beat = Beat.of(self._heartbeats, number)
            if {beat.phase, rank.beat.phase} <= set(STEP_PHASES):
                rank.computed += elapsed - (beat.waited_ns - rank.beat.waited_ns) / 1e9
                if self._pids:  # of one that has just ended nothing is known any more
                    rank.computed -= max(0.0, self._queued[number] - before[number])
            rank.beat = beat
        steps = min(rank.beat.step - rank.first_step for rank in self._ranks)
        if elapsed > MOST_TICK_S:  # nobody looked
            self._begin(now)
        elif steps >= WINDOW_STEPS and now - self._began >= WINDOW_S:
            seconds = [rank.computed / (rank.beat.step - rank.first_step) for rank in self._ranks]
            self._begin(now)
            return [found for number in range(len(seconds)) if (found := self._judge(number, seconds))]
        return []

    def _begin(self, now: float) -> None:
        self._began = now
        for rank in self._ranks:
            rank.first_step, rank.computed = rank.beat.step, 0.0

    def _judge(self, number: int, seconds: Sequence[float]) -> Slow | None:
        """Return a rank that has become slow, given the seconds that each computes in a step."""
        rank, stages = self._ranks[number], [(self._first + n) // self._peers for n in range(len(seconds))]
        others = [seconds[n] for n, own in enumerate(stages) if own == stages[number] and n != number]
        if not others:
            return None
        median = statistics.median(others)
        deviation = statistics.median(abs(each - median) for each in others)
        excess = seconds[number] - median
        rank.slow.append(excess > max((RATIO - 1) * median, DEVIATIONS * deviation, LEAST_S))
        if sum(rank.slow) <= WINDOWS - SLOW_WINDOWS:
            rank.told = False
        if sum(rank.slow) < SLOW_WINDOWS or rank.told:
            return None
        rank.told = True
        return Slow(self._first + number, rank.beat.step, seconds[number], median)
