"""Stopping when a signal asks for it: after the step that runs, with a checkpoint, instead of at once."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from meshwright.spec.errors import STOP_SIGNALS

ECHO_SECONDS, OTHER_ECHO_SECONDS = {signal.SIGINT: 0.5}, 3.0
"""Signal -> seconds after the first in which another one is its echo, and those of other signals.

A scheduler signals all processes of a job at once, and the launcher hands its own signal on: each rank gets
two. Whoever presses Ctrl-C again means it.
"""


class Noted(list[int]):
    """Numbers of signals; the first came at `at`, by `time.monotonic`, if there is one."""

    at: float | None = None


@contextmanager
def stop_signals(react: Callable[[int], None] | None = None) -> Iterator[Noted]:
    """Context in which the first of the `STOP_SIGNALS` is noted, in the list that it yields, and `react` is
    called with its number, which may raise; without `react` nothing else happens.

    One that comes after the first's echo is obeyed at once. Signals that this process ignores stay ignored: a
    run under nohup outlives its terminal. Python delivers signals to the main thread alone, so in any other
    thread the context changes nothing.
    """
    noted = Noted()
    before: dict[int, Any] = {}

    def restore() -> None:
        while before:
            signal.signal(*before.popitem())

    def note(number: int, _frame: FrameType | None) -> None:
        if noted.at is None:
            noted.append(number)
            noted.at = time.monotonic()
            if react is not None:
                react(number)
        elif time.monotonic() - noted.at >= ECHO_SECONDS.get(signal.Signals(number), OTHER_ECHO_SECONDS):
            restore()
            signal.raise_signal(number)

    if threading.current_thread() is threading.main_thread():
        taken = [number for number in STOP_SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
        before.update({number: signal.signal(number, note) for number in taken})
    try:
        yield noted
    finally:
        restore()
