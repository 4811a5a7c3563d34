"""Which collectives a rank has started and finished, by process group, in memory that its supervisor reads.

A wait says nothing where a backend runs on a device: NCCL's returns at once, and the host goes on to the end
of a step whose first collective may hang. So a thread beside the training looks several times a second which
of the collectives under way have ended, and publishes of each group how many were started and finished, and
the first that is not finished. It asks works and events that have been recorded, as NCCL's own watchdog does
(`Work.is_completed`, cudaEventQuery), and puts nothing on a stream.

A work of NCCL keeps the tensors that it writes. Once a collective has been waited for, an event on the
stream that waited takes the place of its work, so that the memory may be used again. On CUDA another event
says whether the device has reached a collective, which the host may have issued long before.

Collectives of a group are numbered from 1, equally on all of its ranks; messages from one rank to another are
numbered by pair and tag, as a group of two.
"""

from __future__ import annotations

import struct
import threading
import zlib
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import torch
import torch.distributed as dist

GROUPS = 32
"""Groups of a rank that are published: those that were last used."""
_FIELDS = struct.Struct("@qqqqqq24s24s")
"""Identity, ranks, started, reached, finished, bytes; axis and operation."""
GROUP_BYTES = 128
BYTES = GROUPS * GROUP_BYTES
"""Room for what one rank publishes."""
LOOK_S = 0.2
"""Seconds between two looks at what has ended."""

Ended = Callable[[], bool]
"""True if something has ended; does not wait for it."""


class GroupProgress(NamedTuple):
    """What one rank has done in one process group."""

    identity: int
    """Equal on the ranks of the group."""
    ranks: int
    """How many ranks the group has."""
    started: int
    """Collectives that the rank has issued."""
    reached: int
    """Those at which its device has arrived, `started` where there is no device."""
    finished: int
    """Those that have ended, with all before them."""
    bytes: int
    """What the rank sends in the first that has not ended; 0 if all have."""
    axis: str
    operation: str
    """The operation of the first that has not ended, or of the last."""

    @classmethod
    def all_of(cls, memory: memoryview, offset: int) -> list[GroupProgress]:
        """Return what a rank has published from byte `offset` on."""
        found = []
        for start in range(offset, offset + BYTES, GROUP_BYTES):
            *numbers, axis, operation = _FIELDS.unpack_from(memory, start)
            if not numbers[0]:
                break
            found.append(cls(*numbers, axis.rstrip(b"\0").decode(), operation.rstrip(b"\0").decode()))
        return found


class AxisInfo(Protocol):
    """What the log needs to know of an axis (`mesh.Axis`)."""

    @property
    def name(self) -> str:
        """The name that the wire records."""

    @property
    def group(self) -> dist.ProcessGroup | None:
        """The group of its ranks."""

    @property
    def device(self) -> torch.device:
        """Where collectives take tensors."""


@dataclass(slots=True, eq=False)
class Flight:
    """One collective of this rank, until it has ended."""

    axis: str
    operation: str
    bytes: int
    on_device: bool
    reached: Ended
    ended: Ended | None
    """None once it has ended."""

    def waited(self) -> None:
        """The collective has been waited for: on a device by the present stream, else it has ended."""
        if self.ended is None:
            return
        if self.on_device:
            event = torch.cuda.Event()
            event.record()
            self.ended = event.query
        elif self.ended():
            self.ended = None

    def over(self) -> bool:
        """True if it has ended."""
        if self.ended is not None and self.ended():
            self.ended = None
        return self.ended is None


def _at_once() -> bool:
    return True


@dataclass(slots=True)
class _Group:
    identity: int
    ranks: int
    started: int = 0
    finished: int = 0
    flights: deque[Flight] = field(default_factory=deque)
    last: tuple[str, str] = ("", "")
    """Axis and operation of the last that was started."""

    def settle(self) -> None:
        """Count those that have ended, up to the first that has not."""
        while self.flights and self.flights[0].over():
            self.flights.popleft()
            self.finished += 1

    def progress(self) -> GroupProgress:
        """What is published."""
        first = self.flights[0] if self.flights else None
        axis, operation = self.last if first is None else (first.axis, first.operation)
        at = 0
        while at < len(self.flights) and self.flights[at].reached():
            at += 1
        reached, size = self.finished + at, 0 if first is None else first.bytes
        return GroupProgress(
            self.identity, self.ranks, self.started, reached, self.finished, size, axis, operation
        )


class CollectiveLog:
    """The collectives of one rank; `memory` of `BYTES` is where they are published."""

    def __init__(self, memory: memoryview) -> None:
        self._memory = memory
        self._lock = threading.Lock()
        self._groups: OrderedDict[tuple[int, tuple[int, int, int] | None], _Group] = OrderedDict()

    def start(
        self,
        axis: AxisInfo,
        operation: str,
        sent: float,
        ended: Sequence[Ended],
        pair: tuple[int, int, int] | None = None,
    ) -> Flight:
        """Note a collective that has just been issued, which ends when all of `ended` have.

        `pair` has the sender, the receiver and the tag of a message.
        """
        on_device, reached = axis.device.type == "cuda", _at_once
        if on_device:
            event = torch.cuda.Event()
            event.record()
            reached = event.query
        flight = Flight(axis.name, operation, int(sent), on_device, reached, _all(ended))
        key = id(axis.group), pair
        with self._lock:
            group = self._groups.get(key)
            if group is None:
                group = self._groups[key] = _Group(_identity(axis.group, pair), _ranks(axis.group, pair))
            self._groups.move_to_end(key)
            group.settle()
            group.flights.append(flight)
            group.started += 1
            group.last = axis.name, operation
        return flight

    def publish(self) -> None:
        """Look what has ended, and write it where the supervisor reads it."""
        with self._lock:
            groups = list(self._groups.values())[-GROUPS:]
            for group in groups:
                group.settle()
            found = [group.progress() for group in groups]
        for number, each in enumerate(found):
            *numbers, axis, operation = each
            texts = (axis.encode()[:24], operation.encode()[:24])
            _FIELDS.pack_into(self._memory, number * GROUP_BYTES, *numbers, *texts)

    def watch(self) -> None:
        """Publish several times a second from now on, as long as the process lives."""

        def look() -> None:
            pause = threading.Event()
            while not pause.wait(LOOK_S):
                self.publish()

        threading.Thread(target=look, name="collective log", daemon=True).start()


def _all(ended: Sequence[Ended]) -> Ended:
    return ended[0] if len(ended) == 1 else lambda: all(each() for each in ended)


def _identity(group: dist.ProcessGroup | None, pair: tuple[int, int, int] | None) -> int:
    """A number above 0 that is equal on the ranks of a group, or on both ends of a pair."""
    assert group is not None
    return 1 + zlib.crc32(f"{group.group_name} {dist.get_process_group_ranks(group)} {pair}".encode())


def _ranks(group: dist.ProcessGroup | None, pair: tuple[int, int, int] | None) -> int:
    assert group is not None
    return group.size() if pair is None else 2
