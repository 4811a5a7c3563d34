"""Accesses of a step to the device's memory that no event orders, found in its trace.

What is on one stream runs in order; streams are ordered by events, collectives and waits of the host. The
clocks are those of torch's CUDA sanitizer (`torch.cuda._sanitizer`), which follows tensors that it meets as a
program runs on a GPU. Here accesses are to bytes of storages, so that streams may work on parts of one
buffer, and freeing is an access, too: what a stream has freed it may allocate again at once. The tensors of a
collective, too, have to live until its end has been waited for: torch's ProcessGroupNCCL keeps them so long,
which no backend has to.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from torch.cuda._sanitizer import StreamSynchronizations

from meshwright.dryrun.events import ByteRange, Event


class _Access(NamedTuple):
    """The `number`-th launch, which reads or writes bytes of a storage."""

    number: int
    event: Event
    writes: bool
    start: int
    end: int

    def overlaps(self, other: ByteRange) -> bool:
        """True if both access a byte."""
        return self.start < other.end and other.start < self.end


class Race(NamedTuple):
    """Two accesses to the same bytes on two streams, of which neither is known to come first."""

    earlier: Event
    """The one that the host issued first."""
    later: Event

    def __str__(self) -> str:
        return f"{_told(self.later)} does not wait for {_told(self.earlier)}"


def races(events: Iterable[Event]) -> Iterator[Race]:
    """The races of a trace."""
    clocks, accesses, number = StreamSynchronizations(), defaultdict[int, list[_Access]](list), 0
    for event in events:
        match event.kind:
            case "record":
                clocks.record_state(event.number, event.stream)
            case "wait":
                clocks.stream_wait_for_event(event.stream, event.number)
            case "synchronize":
                _wait_on_host(clocks, event)
            case "kernel" | "copy" | "collective":
                number += 1
                if event.kind == "collective":
                    clocks.record_state(event.number, event.after)
                    clocks.stream_wait_for_event(event.stream, event.number)
                clocks.update_seq_num(event.stream, number)
                for each in event.reads:
                    yield from _access(clocks, accesses, number, event, each, writes=False)
                for each in event.writes:
                    yield from _access(clocks, accesses, number, event, each, writes=True)
                if event.kind == "collective":
                    clocks.record_state(event.number, event.stream)
            case "free":
                (freed,) = event.writes
                for earlier in accesses.pop(freed.storage, ()):
                    if not _ordered(clocks, event, earlier):
                        yield Race(earlier.event, event)
            case _:
                pass


def told(found: Iterable[Race]) -> list[dict[str, str | int]]:
    """Races in words, each kind once with its count, most first."""
    return [{"race": words, "count": count} for words, count in Counter(map(str, found)).most_common()]


def _access(
    clocks: StreamSynchronizations,
    accesses: defaultdict[int, list[_Access]],
    number: int,
    event: Event,
    touched: ByteRange,
    writes: bool,
) -> Iterator[Race]:
    """Note an access, and yield the earlier ones that race with it."""
    kept = []
    for earlier in accesses[touched.storage]:
        within = touched.start <= earlier.start and earlier.end <= touched.end
        if (writes or earlier.writes) and earlier.overlaps(touched) and not _ordered(clocks, event, earlier):
            yield Race(earlier.event, event)
        # What comes after this access comes after those on its stream, and after all that it overwrites.
        if not within or (not writes and (earlier.writes or earlier.event.stream != event.stream)):
            kept.append(earlier)
    kept.append(_Access(number, event, writes, touched.start, touched.end))
    accesses[touched.storage] = kept


def _ordered(clocks: StreamSynchronizations, event: Event, earlier: _Access) -> bool:
    same = event.stream == earlier.event.stream
    return same or clocks.is_ordered_after(event.stream, earlier.number, earlier.event.stream)


def _wait_on_host(clocks: StreamSynchronizations, event: Event) -> None:
    """Let all that the host issues from now on come after what it waits for."""
    if event.number >= 0:
        clocks.all_streams_wait_for_event(event.number)
    elif event.stream >= 0:
        clocks.all_streams_wait_for_stream(event.stream)
    else:
        clocks.sync_all_streams()


def _told(event: Event) -> str:
    what = "freeing memory" if event.kind == "free" else f"{event.axis} {event.name}".strip()
    place = " in ".join(part for part in (event.phase, event.module) if part)
    return f"{what} on stream {event.stream}" + (f" ({place})" if place else "")
