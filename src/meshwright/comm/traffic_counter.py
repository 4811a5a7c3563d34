"""The collectives that a rank calls: what they have sent, and what is still under way."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Protocol

import torch.distributed as dist
from torch import Tensor

from meshwright.comm.collective_log import AxisInfo, Ended, Flight
from meshwright.comm.heartbeat import Heartbeat
from meshwright.comm.shared_memory_group import SharedMemoryWork


class Pending(Protocol):
    """A collective under way."""

    def wait(self) -> object:
        """Return when the result may be read (on CUDA: by what is enqueued after this)."""
        ...

    def is_completed(self) -> bool:
        """True if it has ended; does not wait for it."""
        ...


class CallCheck(Protocol):
    """A check of the calls that a rank is about to start (`call_check.py`)."""

    def starts(
        self,
        axis: Any,
        operation: str,
        what: str,
        pair: tuple[int, int, int] | None = None,
        rows: tuple[list[int], list[int]] | None = None,
    ) -> object:
        """Raise an error if the call on an axis (`mesh.Axis`) is not that of the other ranks.

        `what` says its size and format, `pair` a message's sender, receiver and tag, and `rows` the numbers
        that go to each rank and come from it.
        """
        ...


class WireObserver(Protocol):
    """Hears of each call after it has been started, and when it is waited for."""

    def started(self, axis: str, operation: str, sent: float) -> int:
        """A call has been started that sends `sent` bytes; returns a number for it."""
        ...

    def waited(self, number: int) -> None:
        """The call with this number is about to be waited for."""
        ...


@dataclass(slots=True, eq=False)
class _Watched:
    """A collective under way, whose wait shows in the rank's heartbeat and on its wire.

    It keeps the tensors that are sent and received until it has been waited for.
    """

    works: Sequence[Pending]
    wire: TrafficCounter
    label: str
    number: int
    calls: Sequence[object]
    tensors: Sequence[Tensor]
    observed: int
    """Its number to the wire's observer."""
    flight: Flight | None

    def wait(self) -> None:
        wire = self.wire
        if wire.observer is not None:
            wire.observer.waited(self.observed)
        with wire.heartbeat.waits(self.label, self.number):
            wire.awaited = self.calls
            for work in self.works:
                # A message of gloo's waits as long as its group did when that was made, unless told here.
                if wire.limit is not None and isinstance(work, (dist.Work, SharedMemoryWork)):
                    work.wait(wire.limit)
                else:
                    work.wait()
            wire.awaited = ()
        if self.flight is not None:
            self.flight.waited()
        self.tensors = ()

    def is_completed(self) -> bool:
        return all(work.is_completed() for work in self.works)


@dataclass
class TrafficCounter:
    """Bytes that this rank sent and calls that it made, by (axis, operation).

    Bytes are those of a bandwidth-optimal algorithm over n ranks and a tensor of S bytes: all-gather,
    reduce-scatter and broadcast S (n-1)/n, all-reduce 2 S (n-1)/n (Thakur et al. 2005), all-to-all of S bytes
    a rank S (n-1)/n; a shift or a send what leaves this rank. What is under way shows in `heartbeat`.
    """

    heartbeat: Heartbeat = field(default_factory=Heartbeat)

    bytes: dict[tuple[str, str], float] = field(default_factory=dict)
    calls: dict[tuple[str, str], int] = field(default_factory=dict)
    log: list[tuple[str, str, float]] | None = None
    """(axis, operation, bytes) of each call in order, if this is a list; None records the sums only."""
    check: CallCheck | None = None
    """Sees each call before it starts."""
    limit: timedelta | None = None
    """The longest wait for a call, by default that of its group."""
    observer: WireObserver | None = None
    awaited: Sequence[Any] = ()
    """Results of the check for the call that the rank waits for, or whose wait has failed."""

    def record(self, axis: str, operation: str, sent: float) -> None:
        """Add one call that sends `sent` bytes."""
        key = (axis, operation)
        self.bytes[key] = self.bytes.get(key, 0.0) + sent
        self.calls[key] = self.calls.get(key, 0) + 1
        if self.log is not None:
            self.log.append((axis, operation, sent))

    def start(
        self,
        axis: AxisInfo,
        operation: str,
        sent: float,
        works: Sequence[Pending | None],
        calls: Sequence[object],
        tensors: Sequence[Tensor],
        pair: tuple[int, int, int] | None = None,
    ) -> Pending:
        """Add one call that has just been started, and sends `sent` bytes; returns the handle to wait on.

        It ends with the last of its `works`; `calls` are what the check has returned of it, `tensors` those
        that it reads and writes, and `pair` is a message's sender, receiver and tag.
        """
        self.record(axis.name, operation, sent)
        return self.watched(axis, operation, works, calls, tensors, pair, sent)

    def watched(
        self,
        axis: AxisInfo,
        operation: str,
        works: Sequence[Pending | None],
        calls: Sequence[object],
        tensors: Sequence[Tensor],
        pair: tuple[int, int, int] | None = None,
        sent: float = 0.0,
    ) -> Pending:
        """The handle to wait on of a call that has just been started, as of `start`, which is not counted:
        what receives a message sends nothing."""
        started = [work for work in works if work is not None]
        assert len(started) == len(works), "a rank starts collectives only on groups that it is in"
        observed = 0 if self.observer is None else self.observer.started(axis.name, operation, sent)
        flight, log = None, self.heartbeat.collectives
        if log is not None:
            flight = log.start(axis, operation, sent, [_ended(work) for work in started], pair)
        label, number = f"{axis.name} {operation}", self.heartbeat.start()
        return _Watched(started, self, label, number, calls, tensors, observed, flight)

    def clear(self) -> None:
        """Drop all sums, and stop logging calls."""
        self.bytes.clear()
        self.calls.clear()
        self.log = None


def _ended(work: Pending) -> Ended:
    """Tells whether a work has ended, from any thread."""
    if isinstance(work, SharedMemoryWork):  # only its own thread may look further
        return lambda: work.done
    return work.is_completed
