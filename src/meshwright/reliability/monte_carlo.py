"""A run under failures, played event by event: what the formulas of `reliability/goodput.py` are held to.

It shares with them the assumptions that are written there, and no formula. It also says what a formula for
the mean can't: how much runs differ by luck.
"""

from __future__ import annotations

import math
import statistics
from dataclasses import asdict, dataclass
from random import Random
from typing import Any

from meshwright.reliability.goodput import Faults, Shares, shares
from meshwright.spec.errors import UserError

MOST_EVENTS = 1e7
"""Expected saves, failures and restarts of all runs: some ten seconds of a core."""


@dataclass(frozen=True)
class Simulated:
    """What `runs` simulated runs did."""

    runs: int
    shares: Shares
    """Of all runs' time together."""
    standard_error: float
    """Of the effective share."""
    low: float
    """The effective share that 95% of the runs reach."""
    high: float
    """The effective share that 5% of the runs reach."""
    failures: float
    """Mean number of a run."""

    def to_json(self) -> dict[str, Any]:
        """Plain numbers by name, the shares among them."""
        fields = asdict(self)
        return {**fields.pop("shares"), **fields}


def simulate(
    faults: Faults, interval_seconds: float, saves: int = 1000, runs: int = 100, seed: int = 0
) -> Simulated:
    """Play `runs` runs of `saves` intervals of training, each followed by a save; the last is waited for.

    The same arguments give the same figures. Raises `UserError` for fewer than 2 runs, no save, and more
    events than are played in reasonable time.
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
        runs=runs,
        shares=Shares(
            effective=work / wall,
            saving=spent["saving"] / wall,
            lost_work=(spent["training"] - work) / wall,
            restarting=spent["restarting"] / wall,
        ),
        standard_error=work / wall * statistics.stdev(walls) / math.sqrt(runs) / wall,
        low=work / cuts[-1],
        high=work / cuts[0],
        failures=statistics.fmean(clock.failures for clock in clocks),
    )


def _check(faults: Faults, interval_seconds: float, saves: int, runs: int) -> None:
    if saves < 1:
        raise UserError(f"saves: {saves} is not a number of saves; give 1 or more")
    if runs < 2:
        raise UserError(f"runs: {runs} tell no spread; give 2 or more")
    wall = saves * interval_seconds / shares(faults, interval_seconds).effective
    events = wall / (interval_seconds + faults.save_seconds) + 2 * wall / faults.mtbf_seconds
    if runs * events > MOST_EVENTS:
        fewer = int(MOST_EVENTS / events)
        raise UserError(
            f"runs: {runs} with {events:.2g} saves and failures each would take too long; "
            + (f"give {fewer} or fewer" if fewer >= 2 else "not even 2 can be simulated, so leave it away")
        )


class _Clock:
    """A run's time as it passes: to the next failure, and to the end of the save in flight."""

    def __init__(self, faults: Faults, random: Random) -> None:
        self.faults, self.random = faults, random
        self.spent = {"training": 0.0, "saving": 0.0, "restarting": 0.0}
        self.kept = self.failures = 0  # intervals in the last complete checkpoint; failures so far
        self.in_flight: int | None = None  # intervals in the one that is being written
        self.left = 0.0  # seconds until that is complete
        self.to_failure = self._next()

    def _next(self) -> float:
        return self.random.expovariate(1 / self.faults.mtbf_seconds)

    def spend(self, kind: str, seconds: float) -> bool:
        """Let `seconds` pass; False where a failure cut them short, and with it what was in flight."""
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
        """Wait for the save in flight, stop for the next, and leave that in flight; False on a failure."""
        if not self.spend("saving", self.left + self.faults.save_seconds):
            return False
        self.in_flight, self.left = intervals, self.faults.background_seconds
        return True


def _attempt(clock: _Clock, interval_seconds: float, saves: int) -> bool:
    """Go on from the last complete checkpoint until a failure, or until all is saved: then True."""
    for done in range(clock.kept, saves):
        if not (clock.spend("training", interval_seconds) and clock.save(done + 1)):
            return False
    return clock.spend("saving", clock.left)
