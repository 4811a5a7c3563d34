"""The end of a scheduler's job, before which a run saves and ends by itself, without a signal."""

from __future__ import annotations

import math
import subprocess
import time
from collections.abc import Callable

from meshwright.rank.scheduler import JOB_END, job_end
from meshwright.spec.sections import RecoverySpec

LEAST_MARGIN_S = 60.0
"""Time that "auto" leaves at least: a scheduler may be late in what it says, or early in what it does."""
AGAIN_S = 30.0
"""Seconds between two questions whether the limit has been changed, once it is near."""


class JobEnd:
    """Tells on the first rank, whose clock counts, when it is time to save; on others never."""

    def __init__(self, spec: RecoverySpec, first: bool, read: Callable[[], float | None] = job_end) -> None:
        """`read` returns when the job ends, in seconds since 1970; None if it does not end by itself."""
        self._given, self._read = spec.job_end_margin, read
        self._longest = self._asked = 0.0
        self._seen: float | None = None
        """When `is_near` was last asked, once a step."""
        self.warning: str | None = None
        """Why the job's end is not known, where a scheduler should tell it."""
        self.end: float | None = None
        """When the job ends, in seconds since 1970."""
        if first and self._given != 0:
            self.end = self._known()

    @property
    def margin(self) -> float:
        """Seconds before the end at which the run is to save: by default the least, and twice the longest
        time from one step to the next, with what was due between them, such as a save."""
        return LEAST_MARGIN_S + 2 * self._longest if self._given == "auto" else float(self._given)

    def is_near(self) -> bool:
        """True if it is time to save and end; asked once in each step."""
        if self.end is None:
            return False
        now = time.time()
        self._longest = max(self._longest, now - (self._seen or now))
        self._seen = now
        if now >= self.end - self.margin and now - self._asked >= AGAIN_S:
            self._asked = now
            self.end = self._known()  # somebody may have given the job more time
        return self.end is not None and now >= self.end - self.margin

    def seconds_left(self) -> float:
        """Return the seconds until the job ends, which may be infinite."""
        return math.inf if self.end is None else self.end - time.time()

    def _known(self) -> float | None:
        try:
            return self._read()
        except (OSError, subprocess.SubprocessError) as error:
            self.warning = (
                f"the end of the scheduler's job is not known ({error}), so the run does not save before it "
                f"by itself; let the scheduler send a signal (sbatch --signal=USR1@300), or set {JOB_END}"
            )
            return self.end
