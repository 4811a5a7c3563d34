"""Islands of one host that are worlds of their own: each is a process that supervises its ranks.

An island that fails is started again, and the others go on; one that is refused, or that fails too often, is
left out. All end with this process.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Collection, Sequence
from functools import partial
from pathlib import Path
from signal import SIGINT, Signals

from meshwright.launch.start import Tell
from meshwright.launch.supervisor import stop_requests
from meshwright.rank.child import tie_to_parent
from meshwright.rank.env import with_own_modules
from meshwright.rank.failure import KINDS
from meshwright.rank.processes import kill_session, send_signal
from meshwright.spec.errors import REQUEUE

POLL_S = 0.05


class Island:
    """The process of one island, which runs `python -m meshwright argv...` on some cores (by default all).

    What it prints goes to the file `log`.
    """

    def __init__(self, number: int, argv: Sequence[str], cores: Collection[int], log: Path) -> None:
        self.number, self._argv, self._cores, self._log = number, argv, cores, log
        self.starts = 0
        """How often the process was started."""
        self.failures = 0
        """Failures in a row, without an exchange in between."""
        self.left_out = False
        """True once it is not started again."""
        self.code: int | None = None
        """Exit code of its last start; None while it runs, and before the first."""
        self._process: subprocess.Popen[bytes] | None = None
        self._begins = 0
        """Bytes of the log before the last start."""
        self._unstarted = ""
        """Why the last start failed, if it did."""

    @property
    def runs(self) -> bool:
        """True while the process lives."""
        if self._process is not None and self.code is None:
            self.code = self._process.poll()
        return self._process is not None and self.code is None

    @property
    def is_over(self) -> bool:
        """True once the process has come to its end, or is left out."""
        return not self.runs and (self.code == 0 or self.left_out)

    @property
    def saved(self) -> bool:
        """True for a process that has come to its end, or that a signal stopped and that has saved."""
        # Ctrl-C has one exit code, whether or not something was saved.
        return self.code in (0, REQUEUE) or (self.code == 128 + SIGINT and "is saved" in self.last_words())

    def start(self, resume: str | None) -> None:
        """Start the process, to go on from `resume`; where that fails, it has ended with code 1."""
        argv = [sys.executable, "-m", "meshwright", *self._argv]
        self.code, self._unstarted = None, ""
        self.starts += 1
        try:
            with self._log.open("ab") as log:
                self._begins = log.tell()
                self._process = subprocess.Popen(
                    argv if resume is None else [*argv, "--resume", resume],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    env=with_own_modules(os.environ),
                    start_new_session=True,  # signals of the terminal are handed on
                    preexec_fn=partial(_prepare, os.getpid(), self._cores),
                )
        except (OSError, subprocess.SubprocessError) as error:
            self.code, self._unstarted = 1, f"its process could not be started ({error})"

    def signal(self, number: int) -> None:
        """Hand a signal to the process."""
        if self.runs and self._process is not None:
            send_signal(self._process.pid, number)

    def kill(self) -> None:
        """End the process and its ranks at once."""
        if self._process is not None:
            kill_session(self._process.pid)
            self._process.wait()

    def last_words(self) -> str:
        """How the process ended: why it did not start, its signal, or the last line that it printed."""
        if self._unstarted:
            return self._unstarted
        if self.code is not None and self.code < 0:
            return f"ended by {Signals(-self.code).name}"
        text = self._log.read_bytes()[self._begins :].decode("utf-8", errors="replace")
        lines = text.strip().splitlines()
        return lines[-1].removeprefix("meshwright: error: ") if lines else f"ended with exit code {self.code}"


def _prepare(parent: int, cores: Collection[int]) -> None:
    tie_to_parent(parent)
    if cores:
        os.sched_setaffinity(0, cores)


def shares_of_cores(islands: int) -> list[list[int]]:
    """The cores of each island, where there are as many; else none, so that all may use all."""
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    return [cores[place::islands] if len(cores) >= islands else [] for place in range(islands)]


class IslandsSupervisor:
    """Starts islands, and starts those again that fail. With a `resume` the first joins before the others.

    One that fails `most` + 1 times in a row without an exchange is left out. `done(island)` returns the
    numbers of times that it has joined, and of its exchanges. `tell` hears of each failure.
    """

    def __init__(
        self, islands: Sequence[Island], most: int, done: Callable[[int], tuple[int, int]], tell: Tell
    ) -> None:
        self.islands, self._most, self._done, self._tell = islands, most, done, tell
        self._exchanges = {island.number: 0 for island in islands}

    def run(self, resume: str | None) -> int:
        """Run the islands to their ends; returns the signal that asked them to stop, or 0."""
        with stop_requests() as asked:
            try:
                self._start(resume, asked)
                handed = 0
                while True:
                    self._done(0)  # looks at what is new
                    for number in asked[handed:]:
                        for island in self.islands:
                            island.signal(number)
                    handed = len(asked)
                    for island in self.islands:
                        failed = not island.runs and island.code not in (None, 0)
                        if failed and not island.left_out and not asked:
                            self._failed(island)
                    if all(island.is_over or (asked and not island.runs) for island in self.islands):
                        break
                    time.sleep(POLL_S)
            finally:
                for island in self.islands:
                    island.kill()
            return asked[0] if asked else 0

    def _start(self, resume: str | None, asked: Sequence[int]) -> None:
        first, *others = self.islands
        before, _ = self._done(first.number)
        first.start(resume)
        while resume and first.runs and self._done(first.number)[0] == before and not asked:
            time.sleep(POLL_S)
        for island in others:
            island.start(resume)

    def _failed(self, island: Island) -> None:
        """Start an island again, or leave it out, and say which."""
        _, exchanges = self._done(island.number)
        island.failures = island.failures + 1 if exchanges == self._exchanges[island.number] else 1
        self._exchanges[island.number] = exchanges
        code, again = island.code, island.code not in KINDS and island.failures <= self._most
        words = island.last_words()
        fields = {"island": island.number, "code": code, "message": words, "restarted": again}
        self._tell("island_failed", fields)
        done = "is started again" if again else "is left out from now on"
        warnings.warn(f"island {island.number}: {words}; it {done}", stacklevel=2)
        island.left_out = not again
        if again:
            island.start("auto")
