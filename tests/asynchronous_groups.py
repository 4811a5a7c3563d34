"""Process groups whose waits return at once, as NCCL's do: threads stand for the streams of devices.

A device has a stream for kernels and one for collectives, which start after what was on the first when they
were issued, and end when the devices of all ranks are in them. A wait lets the first stream wait.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Any

import torch

from meshwright.comm.collective_log import CollectiveLog
from meshwright.comm.heartbeat import Heartbeat
from meshwright.comm.mesh import Axis
from meshwright.comm.traffic_counter import Pending, TrafficCounter


class Stream:
    """Does in order what it is given."""

    def __init__(self) -> None:
        self._tasks: queue.SimpleQueue[Callable[[], object]] = queue.SimpleQueue()
        threading.Thread(target=self._work, daemon=True).start()

    def _work(self) -> None:
        while True:
            self._tasks.get()()

    def launch(self, task: Callable[[], object]) -> None:
        """Do something after all that was given before."""
        self._tasks.put(task)

    def event(self) -> threading.Event:
        """Record an event."""
        event = threading.Event()
        self.launch(event.set)
        return event


class Device:
    """The streams of one device."""

    def __init__(self) -> None:
        self.kernels, self.collectives = Stream(), Stream()

    def record(self) -> Callable[[], bool]:
        """Record an event on the stream of kernels; tells whether the device has come to it."""
        return self.kernels.event().is_set


class AsyncWork:
    """A collective, whose wait does not block the host."""

    def __init__(self, device: Device) -> None:
        self.device, self.done = device, threading.Event()

    def wait(self) -> None:
        self.device.kernels.launch(self.done.wait)

    def is_completed(self) -> bool:
        return self.done.is_set()


class AsyncGroup:
    """The collectives of a group of ranks; a rank's n-th meets the n-th of the others."""

    def __init__(self, name: str, ranks: list[int]) -> None:
        self.group_name, self.ranks = name, ranks
        self._lock, self._meetings = threading.Lock(), dict[int, threading.Barrier]()
        self._issued = dict.fromkeys(ranks, 0)

    def size(self) -> int:
        return len(self.ranks)

    def collective(self, rank: int, device: Device) -> AsyncWork:
        """Issue the next one of a rank on its device."""
        with self._lock:
            number = self._issued[rank]
            self._issued[rank] += 1
            meeting = self._meetings.setdefault(number, threading.Barrier(len(self.ranks)))
        work, arrived = AsyncWork(device), device.kernels.event()

        def run() -> None:
            arrived.wait()
            meeting.wait()
            work.done.set()

        device.collectives.launch(run)
        return work


class AsyncRank:
    """A rank with its device, its heartbeat, and what it publishes of its collectives."""

    def __init__(self, number: int, memory: memoryview, log: bool = True) -> None:
        self.number, self.device = number, Device()
        self.heartbeat = Heartbeat(memory)
        self.wire = TrafficCounter(self.heartbeat)
        self.log: CollectiveLog | None = self.heartbeat.publish_collectives() if log else None
        if self.log is not None:
            self.log.record = self.device.record

    def join(self, group: AsyncGroup, axis: str) -> Axis:
        """The rank's axis of a group, as `build_mesh` makes it."""
        of: Any = group
        place = Axis(axis, group.size(), group.ranks.index(self.number), of, torch.device("cuda"), self.wire)
        if self.log is not None:
            self.log.join(place)
        return place

    def start(self, group: AsyncGroup, axis: str, operation: str, size: int) -> Pending:
        """Issue a collective, as `comm/collectives.py` does."""
        place = self.join(group, axis)
        works = [group.collective(self.number, self.device)]
        return self.wire.start(place, operation, size, works, (), ())

    def publish(self) -> None:
        """Publish now what has ended."""
        if self.log is not None:
            self.log.publish()
