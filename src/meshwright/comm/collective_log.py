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
from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:  # a supervisor reads what ranks publish, and has no torch
    import torch
    import torch.distributed as dist

GROUPS = 32
"""Groups of a rank that are published: those that were last used."""
_FIELDS = struct.Struct("@qqqqqqq24s24s")
"""Identity, ranks, peer, started, reached, finished, bytes; axis and operation."""
GROUP_BYTES = 128
BYTES = GROUPS * GROUP_BYTES
"""Room for what one rank publishes."""
LOOK_S = 0.2
"""Seconds between two looks at what has ended."""

Ended = Callable[[], bool]
"""True if something has ended; does not wait for it."""


class GroupProgress(NamedTuple):
    """The collectives that one rank has started and finished in one process group."""

    identity: int
    """Equal on the ranks of the group."""
    ranks: int
    """How many ranks the group has."""
    peer: int
    """The number of the other rank of a pair in the world; -1 for a group."""
    started: int
    """Collectives that the rank has issued."""
    reached: int
    """Those at which its device has arrived, `started` where there is no device."""
    finished: int
    """Those that have ended, with all before them."""
    bytes: int
    """Those that the rank sends in the first that has not ended; 0 if all have."""
    axis: str
    operation: str
    """The operation of the first that has not ended, or of the last."""

    @classmethod
    def all_of(cls, memory: memoryview, offset: int) -> list[GroupProgress]:
        """Return the groups that a rank has published from byte `offset` on."""
        found = []
        for start in range(offset, offset + BYTES, GROUP_BYTES):
            *numbers, axis, operation = _FIELDS.unpack_from(memory, start)
            if not numbers[0]:
                break
            texts = (text.rstrip(b"\0").decode() for text in (axis, operation))
            found.append(cls._make([*numbers, *texts]))
        return found


class AxisInfo(Protocol):
    """The facts about an axis that the log needs (`mesh.Axis`)."""

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
    record: Callable[[], Ended] | None
    """Records an event on the present stream of a device; None on the host."""
    reached: Ended
    ended: Ended | None
    """None once it has ended."""

    def waited(self) -> None:
        """The collective has been waited for: on a device by the present stream, else it has ended."""
        if self.ended is None:
            return
        if self.record is not None:
            self.ended = self.record()
        elif self.ended():
            self.ended = None

    def over(self) -> bool:
        """True if it has ended."""
        if self.ended is not None and self.ended():
            self.ended = None
        return self.ended is None


def _at_once() -> bool:
    return True


def recorded() -> Ended:
    """Record an event on the present stream; tells whether the device has come to it."""
    import torch

    event = torch.cuda.Event()
    event.record()
    return event.query


@dataclass(slots=True)
class _Group:
    group: dist.ProcessGroup
    identity: int
    ranks: int
    peer: int
    last: tuple[str, str]
    """Axis and operation of the last that was started."""
    started: int = 0
    finished: int = 0
    flights: deque[Flight] = field(default_factory=deque)

    def settle(self) -> None:
        """Count those that have ended, up to the first that has not."""
        while self.flights and self.flights[0].over():
            self.flights.popleft()
            self.finished += 1

    def progress(self) -> GroupProgress:
        """The record that is published."""
        first = self.flights[0] if self.flights else None
        axis, operation = self.last if first is None else (first.axis, first.operation)
        at = 0
        while at < len(self.flights) and self.flights[at].reached():
            at += 1
        counts = self.started, self.finished + at, self.finished
        size = 0 if first is None else first.bytes
        return GroupProgress(self.identity, self.ranks, self.peer, *counts, size, axis, operation)


class CollectiveLog:
    """The collectives of one rank; `memory` of `BYTES` is where they are published."""

    def __init__(self, memory: memoryview, record: Callable[[], Ended] = recorded) -> None:
        self._memory, self.record = memory, record
        self._device: torch.device | None = None
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
        record = self.record if axis.device.type == "cuda" else None
        self._device = axis.device
        reached = _at_once if record is None else record()
        flight = Flight(axis.name, operation, int(sent), record, reached, _all(ended))
        with self._lock:
            group = self._group(axis, pair)
            group.settle()
            group.flights.append(flight)
            group.started += 1
            group.last = axis.name, operation
        return flight

    def join(self, axis: AxisInfo) -> None:
        """Publish the group of an axis before its first collective, for which a rank may be late, too."""
        if axis.group is not None:
            with self._lock:
                self._group(axis, None)

    def _group(self, axis: AxisInfo, pair: tuple[int, int, int] | None) -> _Group:
        """The record of a group or of a pair in it, which now is the last that was used."""
        assert axis.group is not None
        key = id(axis.group), pair
        found = self._groups.get(key)
        if found is None:
            found = self._groups[key] = _record(axis.name, axis.group, pair)
        self._groups.move_to_end(key)
        return found

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
            import torch

            pause, there = threading.Event(), False
            while not pause.wait(LOOK_S):
                on_gpu = self._device is not None and self._device.type == "cuda"
                if not there and on_gpu and torch.cuda.is_initialized():
                    torch.cuda.set_device(self._device)  # that of a new thread is the first one
                    there = True
                self.publish()

        threading.Thread(target=look, name="collective log", daemon=True).start()


def _all(ended: Sequence[Ended]) -> Ended:
    return ended[0] if len(ended) == 1 else lambda: all(each() for each in ended)


def _record(axis: str, group: dist.ProcessGroup, pair: tuple[int, int, int] | None) -> _Group:
    """A new record; its identity is above 0, and equal on the ranks of the group or both ends of a pair."""
    import torch.distributed as dist

    ranks = dist.get_process_group_ranks(group)
    identity = 1 + zlib.crc32(f"{group.group_name} {ranks} {pair}".encode())
    if pair is None:
        return _Group(group, identity, len(ranks), -1, (axis, ""))
    other = pair[1] if pair[0] == group.rank() else pair[0]
    return _Group(group, identity, 2, ranks[other], (axis, ""))
