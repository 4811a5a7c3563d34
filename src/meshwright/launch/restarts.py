"""Policy of restarts: which failures are tried again, how often, and after which pauses."""

from __future__ import annotations

from meshwright.rank.failure import Outcome
from meshwright.spec.errors import CRASH_LOOP

BACK_OFF_S = (0.0, 1.0, 5.0, 30.0)
"""Pauses before restarts that follow each other without progress; the last holds for all further ones."""


class RestartPolicy:
    """Judges the failures of one run in their order.

    `most` restarts may follow each other without a step that was not done before.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self.restarts = 0
        self._furthest = -1
        self._fruitless = 0
        """Failures since the run last got further than before, that one included."""
        self._last = Outcome()

    @property
    def pause(self) -> float:
        """Seconds to wait before the restart."""
        return BACK_OFF_S[min(self._fruitless, len(BACK_OFF_S)) - 1]

    def judge(self, found: Outcome, steps: int, by_itself: bool) -> Outcome | None:
        """Return the outcome of the whole run, or None if the ranks shall be started again.

        `found` is how they ended after so many `steps`, and `by_itself` tells a likely error of the program
        from a signal, a hang or a process that was lost.
        """
        if found.final:
            return found
        repeated = by_itself and found.sentence == self._last.sentence
        began = self._furthest > 0 or steps > 0
        self._fruitless = 1 if steps > self._furthest else self._fruitless + 1
        self._furthest, self._last = max(self._furthest, steps), found
        if not self.most or (by_itself and not began):
            return found
        if self._fruitless <= self.most and not (repeated and self._fruitless > 1):
            self.restarts += 1
            return None
        times = "once" if self.restarts == 1 else f"{self.restarts} times"
        end_of_it = f"the ranks were started again {times} and do not get beyond step {self._furthest}"
        return Outcome(CRASH_LOOP, f"{found.sentence}; {end_of_it}", found.details)
