"""Stand-ins for `torch.cuda` where the device is faked: its properties, and streams that are told of.

Nothing runs on a stream; an observer hears in which order the program uses streams and events, and on which
stream an operator would be launched.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from types import SimpleNamespace
from typing import Any, Protocol

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from meshwright.fake_cuda.library import NAMES, load

Capability = tuple[int, int]
DEVICES_A_HOST = 8
DEFAULT_STREAM = 0
MEMORY = 80 * 2**30
"""Bytes that the device says it has."""
PROCESSORS = {(8, 0): 108, (9, 0): 132, (10, 0): 148}
"""Compute capability -> the multiprocessors of the GPU that is faked. Source: NVIDIA's datasheets."""


class StreamObserver(Protocol):
    """Hears what a program does with streams and events, both by number."""

    def on_record(self, event: int, stream: int) -> None:
        """`event` stands for what is on `stream` now."""
        ...

    def on_wait(self, stream: int, event: int) -> None:
        """Work on `stream` from now on starts after `event`."""
        ...

    def on_synchronize(self, event: int | None, stream: int | None) -> None:
        """The host waits for an event, a stream, or with neither for the device."""
        ...


class _Nobody:
    def on_record(self, event: int, stream: int) -> None: ...

    def on_wait(self, stream: int, event: int) -> None: ...

    def on_synchronize(self, event: int | None, stream: int | None) -> None: ...


class Runtime:
    """The streams of the faked device: the one that is used, and who hears of them."""

    def __init__(self) -> None:
        self.stream = DEFAULT_STREAM
        self.capability: Capability = (9, 0)
        self.observer: StreamObserver = _Nobody()
        self._streams, self._events = count(DEFAULT_STREAM + 1), count(1)

    def new_stream(self) -> int:
        """The number of a new stream."""
        return next(self._streams)

    def new_event(self) -> int:
        """The number of a new event."""
        return next(self._events)

    @contextmanager
    def observed(self, observer: StreamObserver) -> Iterator[None]:
        """Context in which `observer` hears of streams, which are numbered anew."""
        self._streams, self._events = count(DEFAULT_STREAM + 1), count(1)
        self.observer = observer
        try:
            yield
        finally:
            self.observer = _Nobody()


RUNTIME = Runtime()
"""That of this process: `torch.cuda` is one, too."""


class FakeStream:
    """`torch.cuda.Stream`."""

    def __init__(self, device: Any = None, priority: int = 0, number: int | None = None) -> None:
        self.number = RUNTIME.new_stream() if number is None else number
        self.cuda_stream = self.number
        self.device = torch.device("cuda", 0)

    def wait_stream(self, other: FakeStream) -> None:
        """Let what comes on this stream wait for what is on the other one."""
        self.wait_event(other.record_event())

    def wait_event(self, event: FakeEvent) -> None:
        """Let what comes on this stream wait for an event."""
        event.wait(self)

    def record_event(self, event: FakeEvent | None = None) -> FakeEvent:
        """Record an event on this stream."""
        event = event or FakeEvent()
        event.record(self)
        return event

    def synchronize(self) -> None:
        """Let the host wait for this stream."""
        RUNTIME.observer.on_synchronize(None, self.number)

    def query(self) -> bool:
        """True: nothing is computed."""
        return True


class FakeEvent:
    """`torch.cuda.Event`."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.number = RUNTIME.new_event()
        self._recorded: float | None = None

    def record(self, stream: FakeStream | None = None) -> None:
        """Stand for what is on a stream now."""
        self._recorded = time.perf_counter()
        RUNTIME.observer.on_record(self.number, RUNTIME.stream if stream is None else stream.number)

    def wait(self, stream: FakeStream | None = None) -> None:
        """Let what comes on a stream wait for this event."""
        RUNTIME.observer.on_wait(RUNTIME.stream if stream is None else stream.number, self.number)

    def elapsed_time(self, end: FakeEvent) -> float:
        """Milliseconds of the host's clock from this event to `end`, as the device has none."""
        assert self._recorded is not None and end._recorded is not None
        return 1e3 * (end._recorded - self._recorded)

    def synchronize(self) -> None:
        """Let the host wait for this event."""
        RUNTIME.observer.on_synchronize(self.number, None)

    def query(self) -> bool:
        """True: nothing is computed."""
        return True


@contextmanager
def _on(stream: FakeStream | None) -> Iterator[None]:
    before = RUNTIME.stream
    RUNTIME.stream = before if stream is None else stream.number
    try:
        yield
    finally:
        RUNTIME.stream = before


def set_capability(capability: Capability) -> str:
    """Make the device one of this compute capability, of `NAMES`, and return its name."""
    RUNTIME.capability = capability
    load().meshwright_set_capability(*capability)
    return NAMES[capability]


def install() -> None:
    """Let `torch.cuda` be that of the faked device, for the rest of the process."""
    assert load().meshwright_fake_cuda(), "torch was imported before the device was there"
    cuda: Any = torch.cuda
    cuda._lazy_init = lambda: None
    cuda.is_available = lambda: True
    cuda.device_count = lambda: DEVICES_A_HOST
    cuda.current_device = lambda: 0
    cuda.set_device = lambda device: None
    cuda.can_device_access_peer = lambda device, peer: True
    cuda.get_device_capability = lambda device=None: RUNTIME.capability
    cuda.get_device_name = lambda device=None: NAMES[RUNTIME.capability]
    cuda.get_device_properties = lambda device=None: SimpleNamespace(
        name=NAMES[RUNTIME.capability], major=RUNTIME.capability[0], minor=RUNTIME.capability[1],
        total_memory=MEMORY, multi_processor_count=PROCESSORS[RUNTIME.capability],
    )  # fmt: skip
    cuda.is_bf16_supported = lambda including_emulation=True: True
    cuda.memory_allocated = cuda.max_memory_allocated = lambda device=None: 0
    cuda.reset_peak_memory_stats = lambda device=None: None
    cuda.empty_cache = lambda: None
    cuda.Stream, cuda.Event, cuda.stream = FakeStream, FakeEvent, _on
    cuda.current_stream = lambda device=None: FakeStream(number=RUNTIME.stream)
    cuda.default_stream = lambda device=None: FakeStream(number=DEFAULT_STREAM)
    cuda.synchronize = lambda device=None: RUNTIME.observer.on_synchronize(None, None)
    torch._C._set_only_lift_cpu_tensors(True)  # else literals are copied to a device that has no memory
    FakeTensorMode.avoid_device_init = property(lambda self: True)  # type: ignore[assignment]
    set_capability(RUNTIME.capability)
