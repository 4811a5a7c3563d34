"""Communication of a step by axis: bytes, seconds, the share that is hidden, the load of each link level.

Bytes are those that the program sends (`planner/traffic/messages.py`), seconds those of the cost model.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from meshwright.planner.cost.collectives import CollectiveCosts
from meshwright.planner.cost.data_parallel import AXES
from meshwright.planner.cost.layer import PRICED_AS
from meshwright.planner.cost.model import CostModel
from meshwright.planner.cost.stages import message
from meshwright.planner.cost.step import StepTime
from meshwright.planner.group_shapes import axes
from meshwright.planner.rank_view import place_of
from meshwright.planner.traffic.message import Message
from meshwright.planner.traffic.messages import messages, microbatch_messages, totals
from meshwright.spec import RunSpec

_INSIDE = ("tensor", "context", "expert")
"""Axes whose messages are sent inside layers."""


@dataclass(frozen=True)
class LevelLoad:
    """Traffic of an axis over one device's link to a level of the cluster."""

    level: str
    bytes: float
    """Sent by one device in one step."""
    utilisation: float
    """`bytes` over what the link carries in the seconds of the step."""


@dataclass(frozen=True)
class AxisLoad:
    """Communication of one axis of the layout in one step, as one rank sees it."""

    axis: str
    ranks: int
    operations: dict[str, float]
    """Operation -> bytes that the rank sends."""
    seconds: float
    """Seconds of its messages with nothing else on the links."""
    exposed: float
    """Seconds of these that the step waits for; data axes share theirs in proportion to `seconds`."""
    levels: tuple[LevelLoad, ...]

    @property
    def bytes(self) -> float:
        """Bytes that the rank sends."""
        return sum(self.operations.values())

    @property
    def hidden(self) -> float:
        """The share of `seconds` that overlaps computation."""
        return max(0.0, 1 - self.exposed / self.seconds) if self.seconds else 0.0

    def to_json(self) -> dict[str, Any]:
        """The fields and properties by name."""
        return {**asdict(self), "bytes": self.bytes, "hidden": self.hidden}


def communication(spec: RunSpec, model: CostModel, timed: StepTime) -> tuple[AxisLoad, ...]:
    """The axes of the busiest pipeline rank, the most bytes first.

    Sums of a few numbers over all ranks (loss, norm, router statistics) are left out: they are not timed.
    """
    groups, sent = axes(spec.layout)._asdict(), dict[str, list[Message]]()
    for m in messages(spec, timed.rank):
        if m.axis in groups:
            sent.setdefault(m.axis, []).append(m)
    alone, exposed, loads = _alone(spec, model, timed, sent.get("pipeline", [])), _exposed(timed), []
    for axis, listed in sent.items():
        operations = totals((m.operation, m.count * m.sent) for m in listed)
        carried = totals(crossed for m in listed for crossed in _crossed(model.links, m))
        levels = tuple(
            LevelLoad(level.name, carried[level.name], carried[level.name] / (level.loaded * timed.seconds))
            for level in model.cluster.levels
            if level.name in carried
        )
        waits = min(exposed[axis], alone[axis])
        loads.append(AxisLoad(axis, groups[axis].ranks, operations, alone[axis], waits, levels))
    return tuple(sorted(loads, key=lambda load: -load.bytes))


def _exposed(timed: StepTime) -> dict[str, float]:
    """Axis -> seconds that the busiest rank waits for it, recomputation included."""
    own, idle = timed.ranks[timed.rank], timed.simulation.idle[timed.rank]
    sent = sum(own.data.sent.values())
    waits = {axis: own.data.exposed * own.data.sent[axis] / sent if sent else 0.0 for axis in AXES}
    waits["replicate"] += timed.exchange.exposed
    inside = {axis: sum(getattr(seconds, axis) for seconds in own.work) for axis in _INSIDE}
    return {**waits, **inside, "pipeline": own.sent + idle.link}


def _alone(spec: RunSpec, model: CostModel, timed: StepTime, edges: Sequence[Message]) -> dict[str, float]:
    """Axis -> seconds of the busiest rank's messages with nothing else on the links."""
    cost = model.blocks(spec)
    listed = microbatch_messages(place_of(spec, timed.rank), cost.messages, cost.end_messages)
    inside = totals((PRICED_AS.get(m.axis, m.axis), m.count * model.links.seconds(m)) for m in listed)
    edge = message(spec, model, cost)[0] * sum(m.count for m in edges if m.operation == "send")
    data = dict(timed.ranks[timed.rank].data.sent)
    data["replicate"] += timed.exchange.sent
    return {**dict.fromkeys(_INSIDE, 0.0), **inside, **data, "pipeline": edge}


def _crossed(links: CollectiveCosts, message: Message) -> Iterator[tuple[str, float]]:
    """(level, bytes of one device over it) of all calls of a message.

    As `planner/cost/collectives.py` times them: a ring leaves a group of neighbours once, through the
    interfaces of all its members there; an all-to-all sends what others need through each rank's own.
    """
    sent, n = message.count * message.sent, message.group.ranks
    if message.operation in ("send", "shift"):
        yield links.outermost(message.group).name, sent  # of the ranks whose neighbour is farthest
        return
    for level, here, inner in links.members(message.group):
        if message.operation == "all_to_all":
            yield level.name, sent * (here - inner) / (n - 1)
        elif message.operation == "all_reduce":
            yield level.name, sent * n / (n - 1) * (1 - inner / here) / links.interfaces(inner)
        else:
            yield level.name, sent / links.interfaces(inner)
