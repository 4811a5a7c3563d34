"""Detection of ranks that hang: they have stopped moving, for longer than a step of this run takes.

A rank that waits for others is not at fault, and one that computes is slow and not hung; so it matters what a
rank does while nothing moves. A limit is learnt from the run's own steps. A process that is stopped (SIGSTOP)
is told by the kernel; one that neither waits for others nor uses a processor is stuck; where all ranks wait,
a collective was skipped or a link is cut, which may heal. On GPUs all hosts wait for their devices, and what
these have finished tells who is late (`stalled_collective.py`).
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from meshwright.comm.heartbeat import Beat
from meshwright.launch.stalled_collective import stalled_collective
from meshwright.rank.processes import ProcessState, process_state

LEARNT = 3
"""Steps after which their time counts as known."""
MOST_TIMES = 50
"""Times of steps that are remembered: of the first, and of the last ones."""
MOST_TICK_S = 1.0
"""Longest time between two looks that counts: a supervisor that slept cannot say that ranks did not move."""
UNLEARNT_STOPPED_S = 10.0
"""Limit for a stopped process before a step time is known."""
UNLEARNT_STUCK_S = 300.0
"""Limit for ranks that do not compute, before any step was seen: the first steps may compile."""
FEW_STUCK_S = 60.0
"""Least limit for ranks that do not compute, while fewer than `LEARNT` steps were seen."""
IDLE_S, WAITING_S, COMPUTING_S = 10.0, 60.0, 300.0
"""Least limits of ranks of which one is idle, all wait for others, or one computes without getting on."""
OTHER_PHASES_S: Mapping[str, float] = {"evaluate": 600.0, "save": 1800.0, "end": 1800.0}
"""Limits of phases whose time is not learnt; tokenizing a corpus at the start may take hours."""
IDLE_SHARE = 0.05
"""Share of a processor below which a process counts as idle: threads that poll use some."""
SAMPLE_S = 1.0
"""Time over which the use of a processor is taken."""


@dataclass(frozen=True)
class Hang:
    """Ranks that hang, a sentence about them, for how long (in seconds) they have not moved, and after how
    many completed steps."""

    ranks: tuple[int, ...]
    sentence: str
    seconds: float
    step: int

    def with_clause(self, clause: str) -> Hang:
        """The hang with a further clause, if there is one, in its sentence."""
        return replace(self, sentence=f"{self.sentence}; {clause}") if clause else self


@dataclass
class _WatchedRank:
    pid: int
    beat: Beat
    moved_at: float = 0.0
    busy_at: float = 0.0
    """When it last moved, computed or read a disk, as far as was seen."""
    sampled_at: float = 0.0
    cpu_seconds: float | None = None
    """Time of processors used up to `sampled_at`; None if it has moved since."""

    @property
    def waits(self) -> bool:
        """True if it waits for others."""
        return self.beat.waiting > 0

    def sample(self, state: ProcessState | None, clock: float) -> None:
        """Note if a rank that does not move is busy; without a /proc it always counts as such."""
        if state is None or state.letter == "D":
            self.busy_at = clock
        elif self.cpu_seconds is None:
            self.busy_at = self.sampled_at = clock
            self.cpu_seconds = state.cpu_seconds
        elif clock - self.sampled_at >= SAMPLE_S:
            if state.cpu_seconds - self.cpu_seconds >= IDLE_SHARE * (clock - self.sampled_at):
                self.busy_at = clock
            self.sampled_at, self.cpu_seconds = clock, state.cpu_seconds


class HangWatch:
    """Looks at the heartbeats of one host's ranks, of which `pids` has the processes by local rank.

    `first` is the global rank of the host's first; `stuck_seconds`, if not 0, replaces the limits that are
    learnt for steps, except that for stopped processes. `step_times` are those of an earlier start, which
    count until this one has seen `LEARNT` steps.
    """

    def __init__(
        self,
        pids: Mapping[int, int],
        heartbeats: memoryview,
        now: float,
        first: int = 0,
        stuck_seconds: float = 0.0,
        step_times: Sequence[float] = (),
    ) -> None:
        self._heartbeats, self._last, self._clock, self._first = heartbeats, now, 0.0, first
        self._stuck_seconds, self._earlier = stuck_seconds, tuple(step_times)
        self._ranks = {number: _WatchedRank(pid, Beat.of(heartbeats, number)) for number, pid in pids.items()}
        self._step, self._step_at = -1, 0.0
        self._own: list[float] = []
        """Times of the steps of this start."""

    @property
    def step_seconds(self) -> float | None:
        """Median time of a step, once `LEARNT` have been seen."""
        times = self.step_times
        return statistics.median(times) if len(times) >= LEARNT else None

    @property
    def step_times(self) -> tuple[float, ...]:
        """Seconds of the steps that were seen, from the first of a start on, for the next start."""
        own = self._own
        return tuple(own if len(own) >= LEARNT else _newest([*self._earlier, *own]))

    def ended(self, number: int) -> None:
        """Leave out a rank that has ended."""
        self._ranks.pop(number, None)

    def look(self, now: float) -> Hang | None:
        """Return a hang, if there is one; called several times a second with `time.monotonic`."""
        before = self._clock
        self._clock += min(now - self._last, MOST_TICK_S)
        self._last = now
        for number, rank in self._ranks.items():
            beat = Beat.of(self._heartbeats, number)
            if beat.progress != rank.beat.progress:
                rank.cpu_seconds = None
                rank.moved_at = rank.busy_at = self._clock
            rank.beat = beat
        self._learn()
        seconds = self.step_seconds
        limit = UNLEARNT_STOPPED_S if seconds is None else 2 * seconds + 1.0
        quiet = [number for number in self._ranks if self._quiet(number) > limit]
        states = {number: process_state(self._ranks[number].pid) for number in quiet}
        letters = {number: state.letter for number, state in states.items() if state is not None}
        if "t" in letters.values():  # under a debugger: until it goes on, no time passes
            self._clock = before
            return None
        if stopped := [number for number in quiet if letters.get(number) == "T"]:
            return self._hang(stopped, "been stopped")
        for number, state in states.items():
            self._ranks[number].sample(state, self._clock)
        if not quiet or len(quiet) < len(self._ranks) or not self._stuck():
            return None
        return self._least_far()

    def _learn(self) -> None:
        """Learn from steps that were done since the last look."""
        furthest = max((rank.beat for rank in self._ranks.values()), key=lambda beat: beat.step, default=None)
        if furthest is None or furthest.phase == "start" or furthest.step <= self._step:
            return
        if self._step >= 0:
            steps = furthest.step - self._step  # several where they are shorter than the time between looks
            times = [(self._clock - self._step_at) / steps] * min(steps, MOST_TIMES)
            self._own = _newest([*self._own, *times])
        self._step, self._step_at = furthest.step, self._clock

    def _quiet(self, number: int) -> float:
        """Seconds for which a rank has not moved."""
        return self._clock - self._ranks[number].moved_at

    def _stuck(self) -> bool:
        """True if ranks of which none moves, and none is stopped, count as hung."""
        at_work = [rank for rank in self._ranks.values() if not rank.waits]
        phases = {rank.beat.phase for rank in at_work or self._ranks.values()}
        quiet = min(map(self._quiet, self._ranks))
        if "start" in phases:
            return False
        if others := phases & OTHER_PHASES_S.keys():
            return quiet >= max(OTHER_PHASES_S[phase] for phase in others)
        if self._stuck_seconds:
            return quiet >= self._stuck_seconds
        if not at_work:
            return quiet >= self._limit(10, WAITING_S)
        idle = self._clock - max(rank.busy_at for rank in at_work)
        computes_on = self.step_seconds is not None and quiet >= self._limit(10, COMPUTING_S)
        return idle >= self._limit(5, IDLE_S) or computes_on

    def _limit(self, steps: int, least: float) -> float:
        """Seconds after which ranks that do not move are hung: the time of so many steps, at least `least`.

        The first steps of a start warm up, and may compile in other processes while the rank is idle: they
        may take as long as an earlier start's first.
        """
        times, seconds = self.step_times, self.step_seconds
        if not times:
            return UNLEARNT_STUCK_S
        if seconds is None:
            return max(FEW_STUCK_S, least, steps * max(times))
        if len(self._own) < LEARNT:
            seconds = max(seconds, times[0])
        return max(least, steps * seconds)

    def _least_far(self) -> Hang:
        """Return the hang of the ranks that do not wait, or else of all: of those that a collective is late
        for, or that are the least far by steps, then by collectives."""
        beats = {number: rank.beat for number, rank in self._ranks.items()}
        stalled = stalled_collective({number: beat.groups for number, beat in beats.items()}, self._first)
        clause = "" if stalled is None else stalled.sentence(self._first)
        among = [number for number, rank in self._ranks.items() if not rank.waits] or [*self._ranks]
        found = [number for number in among if stalled is not None and number in stalled.late]
        if not found:
            least = min((beats[number].step, beats[number].started) for number in among)
            found = [n for n in among if (beats[n].step, beats[n].started) == least]
            clause = clause if self._ranks[found[0]].waits else ""
        waits = self._ranks[found[0]].waits
        return self._hang(found, f"waited for {beats[found[0]].label}" if waits else "not moved", clause)

    def _hang(self, numbers: list[int], deed: str, clause: str = "") -> Hang:
        """Return the hang of these local ranks, with where they are, and a clause about the collective."""
        beat, seconds = self._ranks[numbers[0]].beat, self._quiet(numbers[0])
        ranks = tuple(self._first + number for number in numbers)
        who = " and ".join(f"rank {rank}" for rank in ranks)
        sentence = (
            f"{who} {'has' if len(ranks) == 1 else 'have'} {deed} for {seconds:.1f} s in phase {beat.phase}, "
            f"after {beat.step} steps and {beat.started} collective{'s' * (beat.started != 1)} of the next"
        )
        return Hang(ranks, sentence, seconds, beat.step).with_clause(clause)


def _newest(times: list[float]) -> list[float]:
    """The first and the last of these times, `MOST_TIMES` in all."""
    return [*times[:1], *times[1:][1 - MOST_TIMES :]]
