"""Monte Carlo simulation of runs under failures, event by event, against which the formulas are tested.

It makes the assumptions of `reliability/goodput.py`, and uses none of its formulas. It also gives the spread
between runs, which a formula for the mean does not.
"""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass
from random import Random

from meshwright.reliability.goodput import Faults, Shares, shares
from meshwright.spec.errors import UserError

MOST_EVENTS = 1e7
"""Limit on the expected saves, failures and restarts of all runs: about ten seconds on one core."""


@dataclass(frozen=True)
class Simulated(Shares):
    """Results of `runs` simulated runs: shares of the total time of all of them, and their spread."""

    runs: int
    standard_error: float
    """Standard error of the effective share."""
    low: float
    """Effective share that 95% of the runs reach."""
    high: float
    """Effective share that 5% of the runs reach."""
    failures: float
    """Mean number of failures per run."""


def simulate(
    faults: Faults, interval_seconds: float, saves: int = 1000, runs: int = 100, seed: int = 0
) -> Simulated:
    """Simulate `runs` runs of `saves` intervals of training, each followed by a save; the last is awaited.

    The result is a function of the arguments. Raises `UserError` for fewer than 2 runs, no save, and more
    events than can be simulated in reasonable time.
    """
    _check(faults, interval_seconds, saves, runs)
    clocks = [_Clock(faults, Random(f"{seed} {run}")) for run in range(runs)]
    for clock in clocks:
        while not _attempt(clock, interval_seconds, saves):
            while not clock.spend("restarting", faults.restart_seconds):
                pass
    work = saves * interval_seconds
    spent = {kind: statistics.fmean(clock.spent[kind] for clock in clocks) for kind in clocks[0].spent}
    walls = [sum(clock.spent.values()) for clock in clocks]
    wall, cuts = statistics.fmean(walls), statistics.quantiles(walls, n=20, method="inclusive")
    return Simulated(
        effective=work / wall,
        saving=spent["saving"] / wall,
        lost_work=(spent["training"] - work) / wall,
        restarting=spent["restarting"] / wall,
        runs=runs,
        standard_error=work / wall * statistics.stdev(walls) / math.sqrt(runs) / wall,
        low=work / cuts[-1],
        high=work / cuts[0],
        failures=statistics.fmean(clock.failures for clock in clocks),
    )


def _check(faults: Faults, interval_seconds: float, saves: int, runs: int) -> None:
    if saves < 1:
        raise UserError(f"saves: {saves} is too few; give 1 or more")
    if runs < 2:
        raise UserError(f"runs: {runs} is too few to estimate a spread; give 2 or more")
    wall = saves * interval_seconds / shares(faults, interval_seconds).effective
    events = wall / (interval_seconds + faults.save_seconds) + 2 * wall / faults.mtbf_seconds
    if runs * events > MOST_EVENTS:
        fewer = int(MOST_EVENTS / events)
        raise UserError(
            f"runs: {runs} with {events:.2g} saves and failures each would take too long; "
            + (f"give {fewer} or fewer" if fewer >= 2 else "not even 2 can be simulated, so omit it")
        )


class _Clock:
    """State of a simulated run: time spent, time to the next failure, and the save in flight."""

    def __init__(self, faults: Faults, random: Random) -> None:
        self.faults, self.random = faults, random
        self.spent = {"training": 0.0, "saving": 0.0, "restarting": 0.0}
        self.kept = self.failures = 0  # intervals in the last complete checkpoint; failures so far
        self.in_flight: int | None = None  # intervals in the checkpoint in flight
        self.left = 0.0  # seconds until the checkpoint in flight is complete
        self.to_failure = self._next()

    def _next(self) -> float:
        return self.random.expovariate(1 / self.faults.mtbf_seconds)

    def spend(self, kind: str, seconds: float) -> bool:
        """Let `seconds` pass; False if a failure cut them short, which also loses the save in flight."""
        passed = min(seconds, self.to_failure)
        self.spent[kind] += passed
        if self.in_flight is not None:
            if passed >= self.left:
                self.kept, self.in_flight, self.left = self.in_flight, None, 0.0
            else:
                self.left -= passed
        if passed == seconds:
            self.to_failure -= passed
            return True
        self.failures += 1
        self.in_flight, self.left, self.to_failure = None, 0.0, self._next()
        return False

    def save(self, intervals: int) -> bool:
        """Wait for the save in flight, then stop for the next and leave it in flight; False on a failure."""
        if not self.spend("saving", self.left + self.faults.save_seconds):
            return False
        self.in_flight, self.left = intervals, self.faults.background_seconds
        return True


def _attempt(clock: _Clock, interval_seconds: float, saves: int) -> bool:
    """Train from the last complete checkpoint until a failure, or until all is saved: then True."""
    for done in range(clock.kept, saves):
        if not (clock.spend("training", interval_seconds) and clock.save(done + 1)):
            return False
    return clock.spend("saving", clock.left)
