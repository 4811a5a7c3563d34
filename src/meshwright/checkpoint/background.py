"""A thread that writes behind training, one piece of work after another."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable


class BackgroundThread:
    """Work beside training, one piece at a time, whose error waits until it is asked for."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self.longest = 0.0
        """Most seconds that a piece of work has taken."""

    def start(self, name: str, work: Callable[[], None]) -> None:
        """Call `work` in a thread of this name; called after `join`."""
        assert self._thread is None

        def run() -> None:
            begun = time.perf_counter()
            try:
                work()
            except BaseException as error:  # raised by `raise_error`
                self._error = error
            self.longest = max(self.longest, time.perf_counter() - begun)

        self._thread = threading.Thread(target=run, name=name, daemon=True)
        self._thread.start()

    @property
    def started(self) -> bool:
        """True for work that `join` has not been called for."""
        return self._thread is not None

    @property
    def busy(self) -> bool:
        """True while work goes on."""
        return self._thread is not None and self._thread.is_alive()

    def join(self) -> None:
        """Return when the work has ended, if any was started."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def raise_error(self) -> None:
        """Raise what the last work has ended in, once."""
        error, self._error = self._error, None
        if error is not None:
            raise error
