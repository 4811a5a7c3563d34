"""The clocks of a step on a faked GPU: the host's, and one for each stream, followed through its trace.

The host issues events in order, each at a cost. A kernel starts when the host has issued it and its stream
has ended what was on it before. A stream that waits for an event or for a collective goes on when that has
ended. A collective starts after the work of the stream that it was called on, and after the collectives of
its group, which have a stream of their own. The host that waits for the device goes on when that has ended.

Ranks of a pipeline are followed together: a message arrives when its receiver has asked for it and its sender
has sent it, and from then on takes its seconds; a sender does not wait for its receiver.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import NamedTuple

from meshwright.dryrun.events import Event
from meshwright.fake_cuda.runtime import DEFAULT_STREAM

Seconds = Callable[[Event], float]
Lane = tuple[int, int, int]
HOST, MESSAGES, OTHER_STREAMS, OTHER_RANKS = "host", "messages", "other streams", "other ranks"
WAITS = (HOST, MESSAGES, OTHER_STREAMS, OTHER_RANKS)
"""Why a stream idles: the host has not issued its next work, a collective has not ended, or an event of
another stream has not come; other ranks of the pipeline have not ended their step."""


class BusySpan(NamedTuple):
    """From `start` to `end`, in seconds of the step, a clock was at an event."""

    start: float
    end: float
    event: Event


class IdleSpan(NamedTuple):
    """From `start` to `end` a stream waited: the reason is one of `WAITS`, the event what it waited for."""

    start: float
    end: float
    reason: str
    event: Event | None = None


@dataclass
class Stream:
    """The clock of a stream."""

    front: float = 0.0
    """When all that is on it has ended."""
    spans: list[BusySpan] = field(default_factory=list)
    idle: list[IdleSpan] = field(default_factory=list)
    last: Event | None = None

    def pause(self, until: float, reason: str, event: Event | None = None) -> None:
        """Idle until a time, if that is later than its front."""
        if until > self.front:
            self.idle.append(IdleSpan(self.front, until, reason, event))
            self.front = until

    def run(self, event: Event, start: float, seconds: float) -> float:
        """Run an event from `start` on; returns its end."""
        self.front = start + seconds
        self.spans.append(BusySpan(start, self.front, event))
        self.last = event
        return self.front


class _BlockedError(Exception):
    """The message that is needed next has not been sent yet."""


class Mail:
    """The messages and calls that ranks of a pipeline wait for from each other.

    Messages of a lane arrive in the order in which they are sent. A collective of an axis in `members`, which
    says how many of the ranks are in it, starts when all of these have called it.
    """

    def __init__(self, members: Mapping[str, int] | None = None) -> None:
        self._sent = defaultdict[Lane, deque[float]](deque)
        self._members = members or {}
        self._called = defaultdict[tuple[str, int], list[float]](list)

    def post(self, lane: Lane, start: float) -> None:
        """A message's transfer may start."""
        self._sent[lane].append(start)

    def take(self, lane: Lane) -> float:
        """When the next message's transfer may start. Raises `_BlockedError` if it has not been sent."""
        if not self._sent[lane]:
            raise _BlockedError
        return self._sent[lane].popleft()

    def call(self, axis: str, number: int, start: float) -> None:
        """A rank may start its `number`-th collective of an axis."""
        self._called[axis, number].append(start)

    def meet(self, axis: str, number: int) -> float:
        """When the last rank may start that collective; 0 for an axis that is not in `members`.

        Raises `_BlockedError` if not all have called it.
        """
        starts = self._called[axis, number]
        if len(starts) < self._members.get(axis, 0):
            raise _BlockedError
        return max(starts) if axis in self._members else 0.0


class StepClocks:
    """The clocks of one rank: `seconds` are those of an event on the device, `host` those of its call."""

    def __init__(
        self, events: Sequence[Event], seconds: Seconds, host: Seconds, mail: Mail | None = None
    ) -> None:
        self.host = Stream()
        self.streams = defaultdict[int, Stream](Stream)
        self.streams[DEFAULT_STREAM] = Stream()
        self.collectives = {each.stream for each in events if each.kind == "collective"}
        """Streams of process groups."""
        self._seconds, self._host_seconds, self._mail = seconds, host, mail or Mail()
        self._events = events
        self._ended: dict[int, tuple[float, Event]] = {}
        """Number of an event or collective -> when it ends, and what it stands for."""
        self._queued = defaultdict[int, deque[tuple[Event, float, int]]](deque)
        """Stream -> calls behind what has not come, each with the time from which on it may start and its
        place among those of its axis."""
        self._calls = Counter[str]()
        self._stream_of: dict[int, int] = {}
        """Number of a collective that is queued -> its stream."""
        self._next = 0

    def advance(self) -> bool:
        """Go on until a message is needed that has not been sent; True at the end."""
        try:
            while self._next < len(self._events):
                self._follow(self._events[self._next])
                self._next += 1
            for stream in [*self._queued]:
                self._settle(stream)
        except _BlockedError:
            return False
        return True

    @property
    def progress(self) -> int:
        """Events followed so far, calls that wait for messages not counted."""
        return self._next - sum(map(len, self._queued.values()))

    @property
    def seconds(self) -> float:
        """When the host and all streams have ended."""
        return max(self.host.front, *(stream.front for stream in self.streams.values()))

    def _follow(self, event: Event) -> None:
        match event.kind:
            case "kernel" | "copy":
                self._call(event)
                stream = self.streams[event.stream]
                stream.pause(self.host.front, HOST)
                stream.run(event, stream.front, self._seconds(event))
            case "collective":
                self._call(event)
                start = max(self.host.front, self.streams[event.after].front)
                if event.lane is not None and event.name == "send":
                    self._mail.post(event.lane, start)
                place = self._calls[event.axis]
                self._calls[event.axis] += 1
                self._mail.call(event.axis, place, start)
                self._stream_of[event.number] = event.stream
                self._queued[event.stream].append((event, start, place))
                with suppress(_BlockedError):  # it is asked for again when something waits for it
                    self._settle(event.stream)
            case "record":
                self._call(event)
                stream = self.streams[event.stream]
                self._ended[event.number] = stream.front, stream.last or event
            case "wait":
                found = self._end(event.number)
                self._call(event)
                stream = self.streams[event.stream]
                if found is not None and found[0] > stream.front:
                    until, awaited = found
                    stream.pause(min(self.host.front, until), HOST)
                    stream.pause(until, self._reason(awaited), awaited)
            case "synchronize":
                until = self._awaited(event)
                self._call(event)
                self.host.pause(until, OTHER_STREAMS, event)
            case _:
                self._call(event)

    def _reason(self, awaited: Event) -> str:
        return MESSAGES if awaited.stream in self.collectives else OTHER_STREAMS

    def close(self, end: float) -> None:
        """Let all streams that compute idle until the step has ended on all ranks at `end`."""
        own, last = self.seconds, None
        if own > self.host.front:
            last = next(stream.last for stream in self.streams.values() if stream.front == own)
        for number, stream in self.streams.items():
            if number not in self.collectives:
                stream.pause(own, HOST if last is None else self._reason(last), last)
                stream.pause(end, OTHER_RANKS)

    def _call(self, event: Event) -> None:
        """The host's part of an event."""
        if (seconds := self._host_seconds(event)) > 0:
            self.host.run(event, self.host.front, seconds)

    def _settle(self, number: int) -> None:
        """Run the calls that are queued on a stream. Raises `_BlockedError`."""
        queue, stream = self._queued[number], self.streams[number]
        while queue:
            event, start, place = queue[0]
            if event.lane is None:
                start = max(start, self._mail.meet(event.axis, place))
            elif event.name == "receive":
                start = max(start, self._mail.take(event.lane))
            queue.popleft()
            end = stream.run(event, max(start, stream.front), self._seconds(event))
            self._ended[event.number] = end, event

    def _end(self, number: int) -> tuple[float, Event] | None:
        """When an event or a collective ends; None for one of nothing. Raises `_BlockedError`."""
        if number in self._stream_of and number not in self._ended:
            self._settle(self._stream_of[number])
        return self._ended.get(number)

    def _awaited(self, event: Event) -> float:
        """When what the host waits for has ended. Raises `_BlockedError`."""
        if event.number >= 0:
            found = self._end(event.number)
            return 0.0 if found is None else found[0]
        if event.stream >= 0:
            self._settle(event.stream)
            return self.streams[event.stream].front
        for stream in [*self._queued]:
            self._settle(stream)
        return max(stream.front for stream in self.streams.values())


def follow(ranks: Sequence[StepClocks]) -> None:
    """Follow the clocks of ranks that share a `Mail` to their ends, and let all wait for the last."""
    waiting = list(ranks)
    while waiting:
        before = [each.progress for each in waiting]
        still = [each for each in waiting if not each.advance()]
        stuck = still and len(still) == len(waiting) and before == [each.progress for each in still]
        assert not stuck, "ranks wait for messages that none of them sends"
        waiting = still
    end = max(each.seconds for each in ranks)
    for each in ranks:
        each.close(end)
