"""State of processes of this host, as the kernel tells it (Linux; elsewhere nothing is known of them)."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import NamedTuple

_PR_SET_CHILD_SUBREAPER = 36  # <linux/prctl.h>
_TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")


class ProcessState(NamedTuple):
    """A process's state letter (`T` is stopped, `D` in the kernel, see proc(5)), and CPU seconds used."""

    letter: str
    cpu_seconds: float


def process_state(pid: int) -> ProcessState | None:
    """Return the state of a process; None if it is gone, or where /proc does not exist."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return ProcessState(fields[0], (int(fields[11]) + int(fields[12])) / _TICKS_PER_SECOND)


def queued_seconds(pid: int) -> float:
    """Return for how long a process's main thread has been ready to run while no processor was free (Linux).

    It is 0 for a process that is gone, and where the kernel does not count it.
    """
    try:
        return int(Path(f"/proc/{pid}/schedstat").read_text().split()[1]) / 1e9
    except (OSError, ValueError, IndexError):
        return 0.0


def send_signal(pid: int, number: int) -> None:
    """Send a signal to a process; one that has ended is left alone."""
    with suppress(ProcessLookupError):
        os.kill(pid, number)


def kill_session(pid: int) -> None:
    """Kill a process that leads a session, and what it has started in it."""
    with suppress(ProcessLookupError):  # it has ended, or is not yet a leader
        os.killpg(pid, signal.SIGKILL)
    send_signal(pid, signal.SIGKILL)


@contextmanager
def adopted_orphans() -> Iterator[None]:
    """While the context lasts, be the parent of every descendant whose own parent has ended (Linux).

    Then `children` shows it.
    """
    adopt = partial(ctypes.CDLL(None).prctl, _PR_SET_CHILD_SUBREAPER) if sys.platform == "linux" else None
    if adopt is not None:
        adopt(1, 0, 0, 0)
    try:
        yield
    finally:
        if adopt is not None:
            adopt(0, 0, 0, 0)


def children() -> set[int]:
    """Return the processes whose parent is this one and that have not ended."""
    found: set[int] = set()
    for task in Path("/proc/self/task").glob("*/children"):
        found |= {int(pid) for pid in task.read_text().split()}
    return {pid for pid in found if (state := process_state(pid)) is not None and state.letter != "Z"}
