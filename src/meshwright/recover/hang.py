"""Detection of ranks that hang: they have stopped moving, for longer than a step of this run takes.

A rank that waits for others is not at fault, and one that computes is slow and not hung; so it matters what a
rank does while nothing moves. A limit is learnt from the run's own steps. A process that is stopped (SIGSTOP)
is told by the kernel; one that neither waits for others nor uses a processor is stuck; where all ranks wait,
a collective was skipped or a link is cut, which may heal.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

from meshwright.parallel.heartbeat import Beat
from meshwright.recover.processes import ProcessState, process_state

STEP_PHASES = frozenset({"data", "forward", "backward", "reduce", "optimiser"})
LEARNT = 3
"""Steps after which their time counts as known."""
MOST_TICK_S = 1.0
"""Longest time between two looks that counts: a supervisor that slept cannot say that ranks did not move."""
UNLEARNT_S = 10.0
"""Limit for a stopped process before a step time is known, or outside of steps."""
OTHER_PHASES_S: Mapping[str, float] = {"evaluate": 600.0, "save": 1800.0, "end": 1800.0}
"""Limits of phases whose time is not learnt; tokenizing a corpus at the start may take hours."""
IDLE_SHARE = 0.05
"""Share of a processor below which a process counts as idle: threads that poll use some."""


@dataclass(frozen=True)
class Hang:
    """Ranks that hang, what they do, and for how long (in seconds) nothing has moved."""

    ranks: tuple[int, ...]
    sentence: str
    seconds: float


@dataclass
class _Rank:
    pid: int
    beat: Beat
    moved_at: float
    cpu_seconds: float

    def state(self) -> ProcessState:
        return process_state(self.pid) or ProcessState("?", self.cpu_seconds)


class HangWatch:
    """Looks at the heartbeats of one host's ranks, of which `pids` has the processes by local rank.

    `first` is the global rank of the host's first.
    """

    def __init__(self, pids: Mapping[int, int], heartbeats: memoryview, now: float, first: int = 0) -> None:
        self._heartbeats, self._last, self._clock, self._first = heartbeats, now, 0.0, first
        self._ranks = {
            number: _Rank(pid, Beat.of(heartbeats, number), 0.0, 0.0) for number, pid in pids.items()
        }
        self._step, self._step_at = -1, 0.0
        self._step_seconds: deque[float] = deque(maxlen=50)

    @property
    def step_seconds(self) -> float | None:
        """Median time of a step; None as long as fewer than `LEARNT` have been seen."""
        return statistics.median(self._step_seconds) if len(self._step_seconds) >= LEARNT else None

    def look(self, now: float) -> Hang | None:
        """Return a hang, if there is one; called several times a second with `time.monotonic`."""
        self._clock += min(now - self._last, MOST_TICK_S)
        self._last = now
        for number, rank in self._ranks.items():
            beat = Beat.of(self._heartbeats, number)
            if beat.changes != rank.beat.changes:
                rank.beat, rank.moved_at, rank.cpu_seconds = beat, self._clock, rank.state().cpu_seconds
        self._learn(max(rank.beat.step for rank in self._ranks.values()))
        quiet = [number for number in self._ranks if self._quiet(number) > self._stopped_limit(number)]
        if not quiet:
            return None
        stopped = [number for number in quiet if self._ranks[number].state().letter == "T"]
        if stopped:
            return self._hang(stopped, "is stopped")
        if len(quiet) < len(self._ranks) or self._quiet(quiet[0]) < self._stuck_limit(quiet):
            return None
        least = min(quiet, key=lambda number: (self._waits(number), self._ranks[number].beat.started))
        beat = self._ranks[least].beat
        same = [
            number
            for number in quiet
            if (self._waits(number), self._ranks[number].beat.started) == (self._waits(least), beat.started)
        ]
        return self._hang(same, f"waits for {beat.label}" if self._waits(least) else "does not go on")

    def _learn(self, step: int) -> None:
        if step > self._step:
            if self._step >= 0:
                self._step_seconds.append((self._clock - self._step_at) / (step - self._step))
            self._step, self._step_at = step, self._clock

    def _quiet(self, number: int) -> float:
        """Seconds for which a rank has not moved."""
        return self._clock - self._ranks[number].moved_at

    def _waits(self, number: int) -> bool:
        """True if a rank waits for others; on CUDA the host waits for the device in `reduce`."""
        beat = self._ranks[number].beat
        return beat.waiting > 0 or beat.phase == "reduce"

    def _stopped_limit(self, number: int) -> float:
        seconds = self.step_seconds
        if seconds is None or self._ranks[number].beat.phase not in STEP_PHASES:
            return UNLEARNT_S
        return 2 * seconds + 1.0

    def _stuck_limit(self, numbers: list[int]) -> float:
        """Seconds after which ranks of which none moves, and none is stopped, count as hung."""
        at_work = [number for number in numbers if not self._waits(number)]
        phases = {self._ranks[number].beat.phase for number in at_work or numbers}
        if "start" in phases:
            return float("inf")
        if others := phases & OTHER_PHASES_S.keys():
            return max(OTHER_PHASES_S[phase] for phase in others)
        seconds = self.step_seconds or UNLEARNT_S
        if at_work and all(self._idle(number) for number in at_work):
            return max(10.0, 5 * seconds)
        return max(60.0, 10 * seconds)

    def _idle(self, number: int) -> bool:
        rank = self._ranks[number]
        return rank.state().cpu_seconds - rank.cpu_seconds < IDLE_SHARE * self._quiet(number)

    def _hang(self, numbers: list[int], deed: str) -> Hang:
        """Return the hang of these local ranks, with where they are."""
        beat = self._ranks[numbers[0]].beat
        seconds = self._quiet(numbers[0])
        who = " and ".join(f"rank {self._first + number}" for number in numbers)
        sentence = (
            f"{who} {deed} since {seconds:.1f} s, in phase {beat.phase} of step {beat.step + 1}, after "
            f"{beat.started} collectives"
        )
        return Hang(tuple(self._first + number for number in numbers), sentence, seconds)
