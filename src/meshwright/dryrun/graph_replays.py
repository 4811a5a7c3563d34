"""CUDA graphs in a trace: what was captured comes again at each replay, without a call of the host."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field, replace

from meshwright.dryrun.events import ByteRange, Event
from meshwright.fake_cuda.runtime import RUNTIME

DEFINES = ("record", "collective")
"""Kinds of events whose number stands for them."""


@dataclass
class CapturedGraph:
    """The events that a graph holds, in the order in which they were captured."""

    stream: int
    """The one that was captured, in whose place a replay's is."""
    events: list[Event] = field(default_factory=list)

    def replayed(self, launch: int, alive: Collection[int]) -> list[Event]:
        """The launch, the number of which is `launch`, and what follows it on the device.

        The launch reads what the graph reads of storages that are not its own, and not among those `alive`.
        """
        onto = RUNTIME.stream
        numbers = {each.number: RUNTIME.new_event() for each in self.events if each.kind in DEFINES}
        events = [
            replace(
                each,
                host="none",
                graph=launch,
                stream=onto if each.stream == self.stream else each.stream,
                after=onto if each.after == self.stream else each.after,
                number=numbers.get(each.number, each.number),
            )
            for each in self.events
        ]
        lost = tuple(each for each in self._external() if each.storage not in alive)
        return [Event("graph", "replay", "graph", onto, "", "", reads=lost, graph=launch), *events]

    def _external(self) -> list[ByteRange]:
        """Bytes that are read or written of storages that the graph does not make."""
        own = {each.storage for event in self.events if event.kind == "allocate" for each in event.writes}
        touched = [
            each for event in self.events if event.kind != "free" for each in (*event.reads, *event.writes)
        ]
        return [each for each in dict.fromkeys(touched) if each.storage not in own]
