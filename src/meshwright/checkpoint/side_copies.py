"""Copies of training state from a GPU to the host, beside the training that goes on.

They are issued on a stream of their own, behind what training has issued before, and the host waits for none
of them. What is copied may change with the next update only, so training's stream waits for the copies before
that (`fence`): on the device, which still computes a forward and a backward until then. Other tensors, which
a forward may change, are copied on training's stream. A thread waits for the end, and has the bytes then.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

_BY_UPDATES = "model", "optim"
"""Tensors that updates alone change, by the first part of their names."""
Copies = Iterable[tuple[str, Tensor, Tensor]]
"""Name, target and source of each copy."""


class IssuedCopies:
    """Copies that the device has yet to end; what is copied lives until `wait`."""

    def __init__(self, done: torch.cuda.Event, device: torch.device, sources: list[Tensor]) -> None:
        self._done, self._device, self._sources = done, device, sources

    def wait(self) -> None:
        """Return when the targets have their bytes; any thread may call it."""
        torch.cuda.set_device(self._device)  # that of a new thread is the first one
        self._done.synchronize()
        self._sources.clear()


class SideCopies:
    """The copies from one device; one set of them is under way at a time."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._done: torch.cuda.Event | None = None
        """The end of the last copies, until training waits for it."""

    def issue(self, copies: Copies) -> IssuedCopies:
        """Let the device make the copies, while the host goes on."""
        listed = list(copies)
        aside = [each for each in listed if _is_aside(each[0])]
        copy_all(each for each in listed if not _is_aside(each[0]))
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            copy_all(aside)
        self._done = self._stream.record_event()
        return IssuedCopies(self._done, self._device, [source for _, _, source in listed])

    def fence(self) -> None:
        """Let what training issues from now on wait for the copies, on the device."""
        if self._done is not None:
            torch.cuda.current_stream(self._device).wait_event(self._done)
            self._done = None


def _is_aside(name: str) -> bool:
    """True for a tensor of a model or an optimiser, of an island, too."""
    parts = name.split("/")
    return parts[0] in _BY_UPDATES or (parts[0].startswith("island.") and parts[1] in _BY_UPDATES)


def copy_all(copies: Copies) -> None:
    """Make the copies: of a device's tensors on the stream that is used."""
    with torch.no_grad():
        for _, target, source in copies:
            target.copy_(source, non_blocking=True)
