"""Steps between saves, from what a save costs training and the failure rate (Young 1974; Daly 2006)."""

from __future__ import annotations

import statistics
from collections import deque
from typing import Any

from meshwright.comm.control import Control
from meshwright.reliability.goodput import HOUR, LEAST, Faults, optimal_interval, system_mtbf
from meshwright.reliability.training_time import DEVICE_MTBF_HOURS

FIRST_STEPS = 10
"""Steps before the first save, and before the second one, which is when the first is known."""
LEAST_CHANGE = 0.2
"""Relative change of the best interval from which it is used: what is measured varies from save to save."""
MOST_LOST_S = 1800.0
"""Seconds of training between two saves at most where no failure rate is given: people stop runs, and reboot
machines, far more often than devices fail."""
MOST_COST = 0.01
"""Share of the time that saves within that limit may cost; where they cost more, they are further apart."""
REMEMBERED = 5
"""Saves whose median cost counts."""


class AutoInterval:
    """The number of steps between saves with the largest effective share of the time (`reliability.goodput`).

    The cost of a save is what training feels: the seconds that it stands still, and what the steps during
    the write behind it take longer than the others. Of all ranks the slowest counts, since they wait for each
    other, and so all of them choose the same number. `mtbf_hours` is of the whole run; by default it is that
    of a device, divided by the number of ranks, and saves are `MOST_LOST_S` apart at most.
    """

    def __init__(self, control: Control, mtbf_hours: float | None) -> None:
        self.steps = FIRST_STEPS
        self._chosen = False
        self._control = control
        self._is_limited = mtbf_hours is None
        per_device = None if mtbf_hours is not None else DEVICE_MTBF_HOURS
        self._mtbf = system_mtbf(mtbf_hours, per_device, control.size)
        self._undisturbed: deque[float] = deque(maxlen=50)
        """Seconds of the last steps without a write behind them."""
        self._stall: float | None = None
        """Seconds that training stood still for the last save; None where there is nothing to measure."""
        self._beside: list[float] = []
        """Seconds of the steps beside the write of the last save."""
        self._costs: deque[tuple[float, float]] = deque(maxlen=REMEMBERED)

    def note_save(self, stall: float | None) -> None:
        """Note the seconds that training stood still for a save that now goes on; None: it failed."""
        self._stall, self._beside = stall, []

    def note_step(self, seconds: float, writing: bool) -> None:
        """Note the duration of a step, and whether a save was written behind it."""
        (self._beside if writing else self._undisturbed).append(seconds)

    def choose(self) -> dict[str, Any] | None:
        """Set `steps` from the last save, which has ended. Collective.

        Returns what to tell of the first choice, or of a change: the steps and the figures behind them.
        """
        rows = self._control.gather(self._measured())
        known = [row for row in rows if row is not None]
        agreed = self._control.broadcast([max(column) for column in zip(*known, strict=True)])
        if not agreed:
            return None
        step, cost, background = agreed
        self._costs.append((cost, background))
        cost, background = (statistics.median_high(column) for column in zip(*self._costs, strict=True))
        best = optimal_interval(Faults(self._mtbf, cost, 0.0, background), step)
        if self._is_limited:
            best = min(best, max(1, int(max(MOST_LOST_S, cost / MOST_COST) / step)))
        if self._chosen and abs(best - self.steps) <= LEAST_CHANGE * self.steps:
            return None
        self.steps, self._chosen = best, True
        return {
            "steps": best,
            "save_seconds": cost,
            "background_seconds": background,
            "step_seconds": step,
            "mtbf_hours": self._mtbf / HOUR,
        }

    def _measured(self) -> list[float] | None:
        """Return (seconds of a step, seconds that the last save cost, seconds of its write) on this rank."""
        if self._stall is None or not (steps := self._undisturbed or self._beside):
            return None
        step = max(statistics.median(steps), LEAST)
        slower = sum(self._beside) - len(self._beside) * step
        return [step, self._stall + max(0.0, slower), sum(self._beside)]
