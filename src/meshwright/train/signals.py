"""Stopping when a signal asks for it: after the step that runs, with a checkpoint, instead of at once."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

SIGNALS = (signal.SIGINT, signal.SIGTERM)


@contextmanager
def stop_signals() -> Iterator[list[int]]:
    """Context in which the first SIGINT or SIGTERM is only noted, in the list that it yields.

    A second one is obeyed at once. Python delivers signals to the main thread alone, so in any other thread
    the context changes nothing.
    """
    noted: list[int] = []
    before: dict[int, Any] = {}

    def restore() -> None:
        while before:
            signal.signal(*before.popitem())

    def note(number: int, _frame: FrameType | None) -> None:
        noted.append(number)
        restore()

    if threading.current_thread() is threading.main_thread():
        before.update({number: signal.signal(number, note) for number in SIGNALS})
    try:
        yield noted
    finally:
        restore()
