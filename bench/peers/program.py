"""A program that trains, with all its processes: it is started, stopped for a while, continued and ended."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

LIMIT = 600.0
"""Seconds that a program may compute for a part of its work, which is a number of steps, or its end."""


@dataclass
class Report:
    """The figures of a side in a round, in the order of its steps."""

    seconds: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    steps: int = 0
    """Steps that were seen to end: their figures may come later."""
    first: float = 0.0
    """Seconds from the command to the end of the first step."""
    peak: int = 0
    held: list[Any] = field(default_factory=list)
    note: str = ""
    error: str | None = None


class Program:
    """A command whose lines `read` enters into the report, and whose processes take turns with others'.

    A line may end the wait for a step, so `read` gets each as it comes. Lines are those of the standard
    output, or of `file`, which the command appends to.
    """

    def __init__(
        self,
        command: Sequence[str],
        cores: Sequence[int],
        environment: Mapping[str, str],
        folder: Path,
        read: Callable[[str, Report], None],
        file: Path | None = None,
    ) -> None:
        self.report, self._read = Report(), read
        self._errors = folder / "stderr"
        self._start = time.perf_counter()
        with self._errors.open("w") as stderr:
            self._process = subprocess.Popen(
                command, stdout=subprocess.PIPE if file is None else subprocess.DEVNULL, stderr=stderr,
                text=True, env=environment, cwd=folder, start_new_session=True,
                preexec_fn=lambda: os.sched_setaffinity(0, cores),
            )  # fmt: skip
        self._source = self._process.stdout if file is None else appended(file, self._process)
        self._over, self._watched = threading.Event(), threading.Event()
        self._watcher = threading.Thread(target=self._watch)
        self._watcher.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._watcher.join()
        if self._process.poll() is None:
            self._send(signal.SIGKILL)
            self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()

    def until(self, steps: int, *, timed: bool = False) -> bool:
        """Go on until so many steps have ended in all, and stop; False if the program has ended before.

        While steps are `timed` its memory is not read, which would stop it for tens of milliseconds.
        """
        if not timed:
            self._watched.set()
        self._send(signal.SIGCONT)
        for _ in self._lines():
            if self.report.steps >= steps:
                self._send(signal.SIGSTOP)
                self._watched.clear()
                return True
        return False

    def end(self) -> None:
        """Go on until the program ends, and enter its error, if it has one."""
        self._watched.set()
        self._send(signal.SIGCONT)
        for _ in self._lines():
            pass
        if self._process.wait() == 0 or self.report.error is not None:
            return
        lines = [line for line in self._errors.read_text().splitlines() if line.strip()]
        told = [line for line in lines if "Error" in line and "ChildFailedError" not in line]
        self.report.error = (told or lines or [f"status {self._process.returncode}"])[-1].strip()[:300]

    def _lines(self) -> Iterator[None]:
        """Read lines, and return where there are no more."""
        killed = threading.Event()

        def kill() -> None:
            killed.set()
            self._send(signal.SIGKILL)

        limit = threading.Timer(LIMIT, kill)
        limit.start()
        try:
            assert self._source is not None
            for line in self._source:
                self._read(line, self.report)
                if self.report.steps and not self.report.first:
                    self.report.first = time.perf_counter() - self._start
                yield
        finally:
            limit.cancel()
        if killed.is_set():
            self.report.error = f"stopped after {LIMIT:g} s"

    def _send(self, number: signal.Signals) -> None:
        """Stop, continue or kill all processes. Those that watch others stop first, and go on last."""
        found = list(descendants(self._process.pid))
        for pid in reversed(found) if number == signal.SIGCONT else found:
            with suppress(ProcessLookupError):
                os.kill(pid, number)

    def _watch(self) -> None:
        while not self._over.wait(0.5):
            if self._watched.is_set():
                self.report.peak = max(self.report.peak, memory(self._process.pid))


def appended(file: Path, process: subprocess.Popen[Any]) -> Iterator[str]:
    """Lines of a file that a process appends to, each some 10 ms after it was written, until it has ended."""
    while not file.exists():
        if process.poll() is not None:
            return
        time.sleep(0.01)
    with file.open(encoding="utf-8") as opened:
        line = ""
        while True:
            ended = process.poll() is not None
            while part := opened.readline():
                line += part
                if line.endswith("\n"):
                    yield line
                    line = ""
            if ended:
                return
            time.sleep(0.01)


def descendants(pid: int) -> Iterator[int]:
    """A process and all that came from it."""
    yield pid
    try:
        text = Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="ascii")
    except (FileNotFoundError, ProcessLookupError):
        return
    for child in text.split():
        yield from descendants(int(child))


def memory(pid: int) -> int:
    """Bytes in memory of a process and its descendants; what they share is counted once (PSS)."""
    total = 0
    for each in descendants(pid):
        try:
            text = Path(f"/proc/{each}/smaps_rollup").read_text(encoding="ascii")
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            continue  # it ended meanwhile
        total += sum(1024 * int(line.split()[1]) for line in text.splitlines() if line.startswith("Pss:"))
    return total
