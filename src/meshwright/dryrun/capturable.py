"""Obstacles that keep a CUDA graph from holding a microbatch of a step, found in its trace.

What a microbatch launches is captured from its forward to the end of its backward, on the stream that
computes and on those that wait for it (CUDA C++ programming guide, CUDA graphs). So the host may wait for
nothing meanwhile, nor copy from or to its own memory, whose address and numbers would be those of one
microbatch; streams begin behind the one that is captured, and are waited for by it at the end. A replay has
the addresses of what was captured, so what a microbatch leaves for the next one has to stay in its place. In
a step that replays graphs these are what is checked.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from torch.cuda._sanitizer import StreamSynchronizations

from meshwright.dryrun.events import RESIZED, Event
from meshwright.dryrun.graph_replays import DEFINES
from meshwright.fake_cuda.runtime import DEFAULT_STREAM

LAUNCHED = ("kernel", "copy", "collective")
COMPUTED = ("forward", "backward")
"""Phases of a microbatch."""


class Obstacle(NamedTuple):
    """An event that no graph of a microbatch can hold, and a clause about it."""

    event: Event
    why: str

    def __str__(self) -> str:
        event = self.event
        name = f"{event.axis} {event.name}".strip() or event.kind
        place = " in ".join(part for part in (event.phase, event.module) if part)
        return f"{name}{f' ({place})' if place else ''} {self.why}"


class Region(NamedTuple):
    """The events of a microbatch, by their places in the trace from `start` to before `end`."""

    start: int
    end: int
    captured: bool
    """True for a replay of a graph, which ends with all that it has begun."""


def microbatches(events: Sequence[Event]) -> list[Region]:
    """The microbatches of a step: replays of graphs, or without any the forwards with their backwards."""
    graphs = defaultdict[int, list[int]](list)
    for place, event in enumerate(events):
        if event.graph >= 0:
            graphs[event.graph].append(place)
    if graphs:
        return [Region(places[0], places[-1] + 1, True) for places in graphs.values()]
    found, begun, before = list[Region](), None, ""
    for place, event in enumerate(events):
        if event.phase == before:
            continue
        if begun is not None and not (before == "forward" and event.phase == "backward"):
            found.append(Region(begun, place, False))
            begun = None
        if event.phase == "forward":
            begun = place
        before = event.phase
    return found if begun is None else [*found, Region(begun, len(events), False)]


def obstacles(events: Sequence[Event]) -> list[Obstacle]:
    """Events for which the microbatches of a step cannot be captured, or their graphs not replayed, in the
    order of the trace."""
    regions = microbatches(events)
    found = [each for region in regions for each in _of_host(events[region.start : region.end], region)]
    return [*found, *_of_streams(events, regions), *_of_addresses(events, regions)]


def _of_host(events: Iterable[Event], region: Region) -> Iterator[Obstacle]:
    """Waits of the host, copies over the bus, and memory that is gone."""
    waiting = [*events]
    for place, event in enumerate(waiting):
        if event.kind == "graph" and event.reads:
            yield Obstacle(event, "reads memory that was freed after it had been captured")
        elif event.kind == "synchronize":
            yield Obstacle(event, "makes the host wait for the device")
        elif event.direction in ("host to device", "device to host"):
            after = waiting[place + 1] if place + 1 < len(waiting) else None
            if after is None or after.kind != "synchronize":  # which says so itself
                whose = "from" if event.direction == "host to device" else "to"
                yield Obstacle(event, f"copies {whose} the host's memory")


def _of_streams(events: Sequence[Event], regions: Sequence[Region]) -> Iterator[Obstacle]:
    """Work on streams that do not wait for the one that is captured, or are not waited for by it."""
    clocks, number, starts = StreamSynchronizations(), 0, {each.start: each for each in regions}
    region: Region | None = None
    begun, own = 0, set[int]()
    last: dict[int, tuple[int, Event]] = {}
    """Stream -> the last launch on it of microbatches, by number."""
    for place, event in enumerate(events):
        if region is not None and place == region.end:
            if region.captured:
                yield from _not_joined(clocks, last)
                last = {}
            region = None
        if place in starts:
            region, number, own = starts[place], number + 1, set()
            begun = number
            clocks.update_seq_num(DEFAULT_STREAM, number)
        if event.kind in DEFINES:
            own.add(event.number)
        match event.kind:
            case "record":
                clocks.record_state(event.number, event.stream)
            case "wait":
                if region is not None and region.captured and event.number not in own:
                    yield Obstacle(event, "waits for what was begun before the microbatch")
                clocks.stream_wait_for_event(event.stream, event.number)
            case "kernel" | "copy" | "collective":
                number += 1
                if event.kind == "collective":
                    clocks.record_state(event.number, event.after)
                    clocks.stream_wait_for_event(event.stream, event.number)
                clocks.update_seq_num(event.stream, number)
                if event.kind == "collective":
                    clocks.record_state(event.number, event.stream)
                if region is not None:
                    last[event.stream] = number, event
                    if event.stream != DEFAULT_STREAM and not clocks.is_ordered_after(
                        event.stream, begun, DEFAULT_STREAM
                    ):
                        yield Obstacle(event, "is on a stream that does not wait for the one that computes")
            case _:
                pass
    yield from _not_joined(clocks, last)


def _not_joined(clocks: StreamSynchronizations, last: dict[int, tuple[int, Event]]) -> Iterator[Obstacle]:
    for stream, (number, event) in last.items():
        if stream != DEFAULT_STREAM and not clocks.is_ordered_after(DEFAULT_STREAM, number, stream):
            yield Obstacle(event, "is not waited for by the stream that computes")


def _of_addresses(events: Sequence[Event], regions: Sequence[Region]) -> Iterator[Obstacle]:
    """Memory that a microbatch other than the first allocates and the next one reads: the graph that both
    share reads it where it was when it was captured. So is what is made between two microbatches. Messages
    under way between two that are not captured are not meant: a run with graphs ends them in time."""
    if not regions:
        return
    under_way = set() if regions[0].captured else _sent_and_dropped(events)
    first, made = regions[0], dict[int, int]()
    """Storage -> the microbatch in which it was allocated, or -1 between two."""
    numbers = {place: n for n, each in enumerate(regions) for place in range(each.start, each.end)}
    told = set[int]()
    for place in range(first.start, len(events)):
        event, number = events[place], numbers.get(place, -1)
        if event.kind == "allocate":
            made[event.writes[0].storage] = number
        elif event.kind == "free":
            made.pop(event.writes[0].storage, None)
        elif number > 0:
            for each in (*event.reads, *event.writes):
                origin = made.get(each.storage, 0)
                if origin not in (0, number) and each.storage not in told | under_way:
                    told.add(each.storage)
                    where = "the microbatch before" if origin > 0 else "no microbatch"
                    yield Obstacle(
                        event, f"uses memory that {where} has allocated, at another address each time"
                    )


def _sent_and_dropped(events: Sequence[Event]) -> set[int]:
    """Storages that messages read or write, and that are not filled again once they are freed."""
    sent = {
        each.storage
        for event in events
        if event.kind == "collective"
        for each in (*event.reads, *event.writes)
    }
    return sent - {each.storage for event in events if event.name == RESIZED for each in event.writes}


def capturable(events: Sequence[Event], overlapping: bool) -> dict[str, object]:
    """Return whether a graph can hold a microbatch, and `obstacles` in words, each kind once.

    Those of a pipeline are `overlapping`: several are under way, and a graph would hold all of a step.
    """
    if overlapping:
        return {"microbatch": False, "obstacles": ["microbatches of a pipeline are under way together"]}
    found = [*dict.fromkeys(map(str, obstacles(events)))]
    return {"microbatch": not found, "obstacles": found}
