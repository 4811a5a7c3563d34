"""What crosses the links in a step, axis by axis: bytes, seconds, levels of the cluster, what is hidden.

Bytes are the program's own (`planner/traffic/traffic.py`), seconds the cost model's. What a message takes by
itself is asked of the same model with nothing to hide behind: a device that computes in no time, and a stack
that overlaps nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

from meshwright.planner.cost.breakdown import PassSeconds
from meshwright.planner.cost.collectives import CollectiveCosts
from meshwright.planner.cost.data_parallel import AXES
from meshwright.planner.cost.model import CostModel
from meshwright.planner.cost.stages import message
from meshwright.planner.cost.step import StepTime, step_time
from meshwright.planner.group_shapes import GroupShape, axes
from meshwright.planner.traffic.traffic import traffic
from meshwright.schedule import Schedule
from meshwright.spec import RunSpec
from meshwright.spec.layout import Layout

_IN_NO_TIME = 1e12


@dataclass(frozen=True)
class LevelLoad:
    """What one device's link to a level of the cluster carries for an axis."""

    level: str
    bytes: float
    """One way, of one device, in a step."""
    utilisation: float
    """Of what the link could carry in the step's seconds."""


@dataclass(frozen=True)
class AxisLoad:
    """An axis of the layout, as one rank sees it."""

    axis: str
    ranks: int
    operations: dict[str, float]
    """Bytes that the rank sends in a step."""
    seconds: float
    """Of its messages by themselves."""
    exposed: float
    """Of these, what a step waits for; data axes share what they wait for in proportion."""
    levels: tuple[LevelLoad, ...]

    @property
    def bytes(self) -> float:
        return sum(self.operations.values())

    @property
    def hidden(self) -> float:
        """The share of its seconds that run beside compute."""
        return max(0.0, 1 - self.exposed / self.seconds) if self.seconds else 0.0

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "bytes": self.bytes, "hidden": self.hidden}


def communication(spec: RunSpec, on: CostModel, timed: StepTime) -> tuple[AxisLoad, ...]:
    """The axes of the busiest pipeline rank, the most bytes first.

    Left out are numbers that all ranks agree on (a loss, a norm, counts of an expert's tokens): small, and
    not timed.
    """
    sent: dict[str, dict[str, float]] = {}
    for (axis, operation), size in traffic(spec, timed.rank).items():
        if operation != "scalars" and axis in (groups := groups_of(spec.layout)) and groups[axis].ranks > 1:
            sent.setdefault(axis, {})[operation] = size
    alone, exposed = _alone(spec, on, timed), _exposed(timed)
    found = [
        AxisLoad(
            axis,
            groups_of(spec.layout)[axis].ranks,
            operations,
            alone[axis],
            min(exposed[axis], alone[axis]),
            tuple(_levels(spec, on.links, axis, operations, timed.seconds)),
        )
        for axis, operations in sent.items()
    ]
    return tuple(sorted(found, key=lambda each: -each.bytes))


def groups_of(layout: Layout) -> dict[str, GroupShape]:
    """The axes that carry more than a few numbers, by the names of what the program records."""
    at = axes(layout)
    return {
        "tensor": at.tensor,
        "context": at.context,
        "expert": at.expert,
        "pipeline": at.pipeline,
        "shard": at.shard,
        "replicate": at.replicate,
        "expert_data": at.expert_data,
    }


def _exposed(timed: StepTime) -> dict[str, float]:
    """Seconds that the busiest rank waits for each axis, what it does again included."""
    own, idle = timed.ranks[timed.rank], timed.simulation.idle[timed.rank]
    sent = sum(own.data.sent.values())
    waits = {axis: own.data.exposed * own.data.sent[axis] / sent if sent else 0.0 for axis in AXES}
    return {**waits, **_within_blocks(own.work), "pipeline": own.sent + idle.link}


def _within_blocks(work: PassSeconds) -> dict[str, float]:
    return {axis: sum(getattr(each, axis) for each in work) for axis in ("tensor", "context", "expert")}


def _alone(spec: RunSpec, on: CostModel, timed: StepTime) -> dict[str, float]:
    """Seconds of each axis's messages where nothing hides them."""
    device = on.cluster.device
    instant = replace(
        device,
        peak={name: rate * _IN_NO_TIME for name, rate in device.peak.items()},
        bandwidth=device.bandwidth * _IN_NO_TIME,
    )
    bare = replace(on.stack, overlap_tensor=0.0, overlap_gather=0.0, overlap_expert=0.0)
    nothing = CostModel(replace(on.cluster, device=instant), bare, on.format)
    work = step_time(spec, nothing).ranks[timed.rank].work
    each, _ = message(spec, on, on.blocks(spec))
    sends = spec.microbatches * _crossings(timed.simulation.schedule, timed.rank)
    return {**timed.ranks[timed.rank].data.sent, **_within_blocks(work), "pipeline": sends * each}


def _crossings(schedule: Schedule, rank: int) -> int:
    """Messages that a rank sends for each microbatch: to the next stage and back, where another has it."""
    last = len(schedule.rank_of) - 1
    return sum(
        (stage > 0 and schedule.rank_of[stage - 1] != rank)
        + (stage < last and schedule.rank_of[stage + 1] != rank)
        for stage in schedule.stages_of(rank)
    )


def _levels(
    spec: RunSpec, links: CollectiveCosts, axis: str, operations: dict[str, float], seconds: float
) -> Iterator[LevelLoad]:
    """What a device's link to each level carries."""
    layout, group = spec.layout, groups_of(spec.layout)[axis]
    carried: dict[str, float] = {}
    for operation, size in operations.items():
        if operation in ("send", "shift"):
            inner = layout.ulysses(spec.model.kv_heads) if operation == "shift" else 1
            name = links.between(group.stride * inner).name
            carried[name] = carried.get(name, 0.0) + size
            continue
        ranks = layout.ulysses(spec.model.kv_heads) if operation == "all_to_all" and axis == "context" else 0
        for name, load in _crossed(links, operation, size, GroupShape(ranks or group.ranks, group.stride)):
            carried[name] = carried.get(name, 0.0) + load
    for level in links.cluster.levels:
        if level.name in carried:
            size = carried[level.name]
            yield LevelLoad(level.name, size, size / (level.loaded * seconds))


def _crossed(
    links: CollectiveCosts, operation: str, size: float, group: GroupShape
) -> Iterator[tuple[str, float]]:
    """(level, bytes of one device over it) of a collective of which a rank sends `size` bytes.

    As `planner/cost/collectives.py` times them: a ring leaves a group of neighbours once, by the interfaces
    of all its members there; an all-to-all sends what is for others there by each rank's own.
    """
    n = group.ranks
    for level, here, inner in links.members(group):
        if operation == "all_to_all":
            yield level.name, size * (here - inner) / (n - 1)
        elif operation == "all_reduce":
            share = n / (n - 1) * (1 - inner / here)
            yield level.name, size * share / links.interfaces(inner)
        else:
            yield level.name, size / links.interfaces(inner)
