"""The progress of a submitted job, shown as it goes on."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable
from pathlib import Path

from meshwright.spec import UserError
from meshwright.submit.progress import progress, told_state
from meshwright.submit.scheduler import ENDED, Scheduler, State
from meshwright.submit.schedulers import SCHEDULERS
from meshwright.submit.submission import Submission

EVERY_S = 1.0
"""Seconds between two looks at a job."""
Show = Callable[[str], None]


class _LogFile:
    """A log that grows, of which whole lines are shown once."""

    def __init__(self, path: Path, prefix: str, show: Show) -> None:
        self.path, self.prefix, self.show = path, prefix, show
        self.read = 0

    def more(self) -> None:
        """Show the lines that have come since."""
        if not self.path.is_file():
            return
        with self.path.open("rb") as file:
            file.seek(self.read)
            whole, end, _ = file.read().rpartition(b"\n")
        self.read += len(whole) + len(end)
        for line in whole.decode(errors="replace").splitlines():
            self.show(f"{self.prefix}{line}")


def follow(submission: Submission, show: Show, every: float = EVERY_S) -> list[str]:
    """Show how a job gets on until all its runs have ended; return how each has ended.

    That is the word of a run's status where it has one here, else the scheduler's state.
    """
    scheduler, before = SCHEDULERS[submission.scheduler], list[State]()
    logs = [scheduler.log(submission, member) for member in range(len(submission.job.folders()))]
    several = len(logs) > 1
    files = [
        _LogFile(log, f"[{member}] " if several else "", show)
        for member, log in enumerate(logs)
        if isinstance(log, Path)
    ]
    while True:
        states = scheduler.states(submission)
        for file in files:
            file.more()
        for member, state in enumerate(states):
            if member >= len(before) or before[member] != state:
                told = told_state(state, progress(Path(submission.job.folders()[member]))["status"])
                show(f"{f'[{member}] ' if several else ''}{submission.scheduler}: {told}")
                _show_by_command(logs[member], state, show)
        if all(state in ENDED for state in states):
            return [ended(scheduler, submission, member, state) for member, state in enumerate(states)]
        before = states
        time.sleep(every)


def ended(scheduler: Scheduler, submission: Submission, member: int, state: State) -> str:
    """How a run has ended: the word of its status, where this machine has its folder, else the state."""
    status = progress(Path(submission.job.folders()[member]))["status"] if scheduler.here else None
    return state if status is None or status == "running" else str(status)


def _show_by_command(log: Path | list[str], state: State, show: Show) -> None:
    """Show a log that a command prints, as long as the run runs."""
    if isinstance(log, Path) or state != "running":
        return
    words = [word for word in log if word != "--no-follow"]
    words += [] if "--no-follow" in log else ["--follow"]
    try:
        with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as printed:
            assert printed.stdout is not None
            for line in printed.stdout:
                show(line.rstrip("\n"))
    except FileNotFoundError:
        raise UserError(f"{words[0]}: is not installed here; follow the job where it is") from None
