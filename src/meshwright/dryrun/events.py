"""The events of a step on a faked GPU: what a trace has.

An event is an operator, a copy, a call of a collective, what the program does with streams, a wait of the
host, a launch of a graph, or an allocation. Each says on which stream it is, which bytes of which storages it
reads and writes, and what it costs the host.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

from meshwright.dryrun.kernel_shapes import KernelWork

Kind = Literal[
    "kernel",  # an operator that computes on the device
    "copy",  # one that only moves numbers: see `Event.direction`
    "view",  # one that launches nothing, such as a view
    "empty",  # one that would launch a kernel, if its tensors had elements
    "collective",  # a call of a collective, or of messages that are sent and received together
    "record",  # `number` stands for what is on `stream` now
    "wait",  # what comes on `stream` starts after `number`, an event or a collective
    "synchronize",  # the host waits until `number`, or `stream`, or with -1 for both the device has ended
    "graph",  # the host launches a graph, whose events follow
    "allocate",
    "free",
]
HostCost = Literal["operator", "compiled", "view", "collective", "stream", "wait", "graph", "none"]
"""The cost of an event to the host: an operator with its launch, a launch by compiled code, an operator
without a launch, a collective, a call of a stream or of an event, a wait for the device, a launch of a graph;
or nothing."""
Direction = Literal["", "host to device", "device to host", "device to device"]


RESIZED = "resized"
"""The name of an event that frees the memory of a storage which stays, and may be allocated again."""


class ByteRange(NamedTuple):
    """Bytes of a storage on the device, from `start` to before `end`; storages are numbered as they come."""

    storage: int
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Event:
    """One event of a step. `bytes` are those that it reads and writes on the device, or sends."""

    kind: Kind
    name: str
    host: HostCost
    stream: int
    phase: str
    module: str
    reads: tuple[ByteRange, ...] = ()
    writes: tuple[ByteRange, ...] = ()
    bytes: float = 0
    flops: int = 0
    direction: Direction = ""
    number: int = -1
    """The number of an event of `torch.cuda`, or of a collective, which stands for its end; -1 for none."""
    work: KernelWork | None = None
    """The work of a product or of attention."""
    axis: str = ""
    """The axis of a collective, as the wire records it."""
    group: str = ""
    """The process group of a collective, which has a stream of its own."""
    ranks: int = 1
    stride: int = 1
    """The distance between the ranks of a collective's group in the world."""
    after: int = -1
    """The stream whose work a collective starts after."""
    lane: tuple[int, int, int] | None = None
    """The sender, the receiver and the tag of a message between two ranks, which arrive in order."""
    graph: int = -1
    """The launch of a graph that it is, or is part of, counted in the trace; -1 for none."""
