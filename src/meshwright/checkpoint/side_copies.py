"""Copies of training state from a GPU to the host, beside the training that goes on.

They are issued on a stream of their own, behind what training has issued before, and the host waits for none
of them. What is copied may change with the next update only, so training's stream waits for the copies before
that (`fence`): on the device, which still computes a forward and a backward until then. Other tensors, which
a forward may change, are copied on training's stream. A thread waits for the end, and has the bytes then.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from meshwright.comm.heartbeat import Heartbeat

_BY_UPDATES = "model", "optim"
"""Tensors that updates alone change, by the first part of their names."""


class SideCopies:
    """The copies from one device; one set of them is under way at a time."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._done: torch.cuda.Event | None = None
        """The end of the last copies, until training waits for it."""
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        """The error that the thread has ended in."""
        self.longest = 0.0
        """Most seconds that a thread has taken for one set."""

    def start(self, copies: Iterable[tuple[str, Tensor, Tensor]], then: Callable[[], None]) -> None:
        """Start to copy (name, target, source) each; a thread calls `then` once all are copied.

        Called after `settle`. The sources live until they are copied.
        """
        listed = list(copies)
        aside = [each for each in listed if _is_aside(each[0])]
        _copy(each for each in listed if not _is_aside(each[0]))
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            _copy(aside)
        self._done = done = self._stream.record_event()
        sources = [source for _, _, source in listed]

        def work() -> None:
            begun = time.perf_counter()
            try:
                torch.cuda.set_device(self._device)  # that of a new thread is the first one
                done.synchronize()
                sources.clear()
                then()
            except BaseException as error:  # raised by `settle`
                self._error = error
            self.longest = max(self.longest, time.perf_counter() - begun)

        self._thread = threading.Thread(target=work, name="snapshot", daemon=True)
        self._thread.start()

    def fence(self) -> None:
        """Let what training issues from now on wait for the copies, on the device."""
        if self._done is not None:
            torch.cuda.current_stream(self._device).wait_event(self._done)
            self._done = None

    def settle(self, heartbeat: Heartbeat) -> None:
        """Return when the thread has ended, and raise the error that it has ended in, if any."""
        if self._thread is not None:
            with heartbeat.waits("the snapshot before"):
                self._thread.join()
            self._thread = None
        if self._error is not None:
            error, self._error = self._error, None
            raise error


def _is_aside(name: str) -> bool:
    """True for a tensor of a model or an optimiser, of an island, too."""
    parts = name.split("/")
    return parts[0] in _BY_UPDATES or (parts[0].startswith("island.") and parts[1] in _BY_UPDATES)


def _copy(copies: Iterable[tuple[str, Tensor, Tensor]]) -> None:
    with torch.no_grad():
        for _, target, source in copies:
            target.copy_(source, non_blocking=True)
