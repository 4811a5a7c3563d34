"""Stand-ins for `torch.cuda` where the device is faked: its properties, and streams that are told of.

Nothing runs on a stream; an observer hears in which order the program uses streams and events, and on which
stream an operator would be launched.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from itertools import count
from typing import Any, NamedTuple, Protocol

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from meshwright.fake_cuda.library import NAMES, load

Capability = tuple[int, int]
DEVICES_A_HOST = 8
DEFAULT_STREAM = 0


class DeviceProperties(NamedTuple):
    """The properties of a GPU that torch and its compiler ask for, by torch's names."""

    name: str
    major: int
    minor: int
    multi_processor_count: int
    L2_cache_size: int
    total_memory: int
    max_threads_per_multi_processor: int = 2048
    max_threads_per_block: int = 1024
    regs_per_multiprocessor: int = 65536
    warp_size: int = 32
    shared_memory_per_block: int = 49152
    gcnArchName: str = ""  # noqa: N815 - that of torch


_PROPERTIES = {
    (8, 0): DeviceProperties(NAMES[8, 0], 8, 0, 108, 40 << 20, 80 << 30),
    (9, 0): DeviceProperties(NAMES[9, 0], 9, 0, 132, 50 << 20, 80 << 30),
    (10, 0): DeviceProperties(NAMES[10, 0], 10, 0, 148, 126 << 20, 180 << 30),
}
"""Compute capability -> the GPU's properties. Source: NVIDIA's data sheets and whitepapers."""


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

    def on_capture(self, graph: int, stream: int) -> None:
        """A graph holds what comes on `stream`, and on those that wait for it, which is not launched."""
        ...

    def on_captured(self, graph: int) -> None:
        """The graph is whole: what comes is launched again."""
        ...

    def on_replay(self, graph: int) -> None:
        """All that a graph holds is launched on the stream that is used now."""
        ...


class _Nobody:
    def on_record(self, event: int, stream: int) -> None: ...

    def on_wait(self, stream: int, event: int) -> None: ...

    def on_synchronize(self, event: int | None, stream: int | None) -> None: ...

    def on_capture(self, graph: int, stream: int) -> None: ...

    def on_captured(self, graph: int) -> None: ...

    def on_replay(self, graph: int) -> None: ...


class Runtime:
    """The streams of the faked device: the one that is used, and who hears of them."""

    def __init__(self) -> None:
        self.stream = DEFAULT_STREAM
        self.capability: Capability = (9, 0)
        self.observer: StreamObserver = _Nobody()
        self._streams, self._events, self._graphs = count(DEFAULT_STREAM + 1), count(1), count(1)
        self.capturing: int | None = None
        """The graph that is captured now."""

    def new_graph(self) -> int:
        """The number of a new graph."""
        return next(self._graphs)

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


class FakeCUDAGraph:
    """`torch.cuda.CUDAGraph`, of which the observer hears what it holds, and when that is launched."""

    def __init__(self, keep_graph: bool = False) -> None:
        self.number = RUNTIME.new_graph()
        self._pool: Any = None
        self._captured = False

    def capture_begin(self, pool: Any = None, **_: Any) -> None:
        """Hold what is called from here on."""
        if RUNTIME.capturing is not None or RUNTIME.stream == DEFAULT_STREAM:
            raise RuntimeError("CUDA error: operation not permitted when stream is capturing")
        self._pool = pool or graph_pool_handle()
        RUNTIME.capturing = self.number
        RUNTIME.observer.on_capture(self.number, RUNTIME.stream)

    def capture_end(self) -> None:
        """Hold no more."""
        RUNTIME.capturing, self._captured = None, True
        RUNTIME.observer.on_captured(self.number)

    def replay(self) -> None:
        """Launch what is held."""
        if not self._captured:
            raise RuntimeError("Called CUDAGraph::replay without a preceding successful capture.")
        RUNTIME.observer.on_replay(self.number)

    def pool(self) -> Any:
        """The handle of its memory."""
        return self._pool


def graph_pool_handle() -> tuple[int, int]:
    """`torch.cuda.graph_pool_handle`: one that no other graph has."""
    return 0, RUNTIME.new_graph()


class FakeCudart:
    """`torch.cuda.cudart()`: what is registered of the host's memory, by address; `fails` refuses more."""

    def __init__(self) -> None:
        self.registered: dict[int, int] = {}
        self.fails = False

    def cudaHostRegister(self, address: int, size: int, _flags: int) -> int:  # noqa: N802
        """Pin memory; returns 0, or 2 for want of memory."""
        if self.fails:
            return 2
        self.registered[address] = size
        return 0

    def cudaHostUnregister(self, address: int) -> int:  # noqa: N802
        """Undo it; returns 0, or 713 for memory that is not registered."""
        return 0 if self.registered.pop(address, None) is not None else 713

    def cudaGetErrorString(self, status: int) -> str:  # noqa: N802
        """The text of an error."""
        return {0: "no error", 2: "out of memory", 713: "part or all of the memory is not registered"}[status]


CUDART = FakeCudart()
"""That of this process."""


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
    cuda.get_device_properties = lambda device=None: _PROPERTIES[RUNTIME.capability]
    cuda.device = cuda._DeviceGuard = lambda device: nullcontext()
    cuda._exchange_device = lambda device: 0
    cuda._maybe_exchange_device = lambda device: 0  # one that torch's compiler tells from the other
    cuda.get_rng_state = lambda device="cuda": torch.zeros(16, dtype=torch.uint8)
    cuda.set_rng_state = lambda state, device="cuda": None
    cuda.is_bf16_supported = lambda including_emulation=True: True
    cuda.memory_allocated = cuda.max_memory_allocated = lambda device=None: 0
    cuda.reset_peak_memory_stats = lambda device=None: None
    cuda.empty_cache = lambda: None
    cuda.Stream, cuda.Event, cuda.stream = FakeStream, FakeEvent, _on
    cuda.current_stream = lambda device=None: FakeStream(number=RUNTIME.stream)
    cuda.default_stream = lambda device=None: FakeStream(number=DEFAULT_STREAM)
    cuda.CUDAGraph, cuda.graph_pool_handle = FakeCUDAGraph, graph_pool_handle
    cuda.is_current_stream_capturing = lambda: RUNTIME.capturing is not None
    cuda.cudart = lambda: CUDART
    cuda.synchronize = lambda device=None: RUNTIME.observer.on_synchronize(None, None)
    raw: Any = torch._C
    raw._host_emptyCache = lambda: None
    torch._C._set_only_lift_cpu_tensors(True)  # else literals are copied to a device that has no memory
    FakeTensorMode.avoid_device_init = property(lambda self: True)  # type: ignore[assignment]
    set_capability(RUNTIME.capability)
