"""Seconds of the exchanges of islands, which the steps of a period share.

A fragment's messages are sent one after the other, and so are fragments that are under way together. An
island goes on for `outer.delay` steps meanwhile, and waits for what has not come by then (Streaming DiLoCo:
Douillard et al. 2025). Without a delay it waits for all of it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from meshwright.planner.cost.data_parallel import StoredParameters
from meshwright.planner.cost.model import CostModel
from meshwright.planner.cost.software import SoftwareStack
from meshwright.planner.group_shapes import axes
from meshwright.planner.rank_view import widths
from meshwright.planner.traffic.exchange import exchanged_width
from meshwright.spec import RunSpec, UserError
from meshwright.spec.outer import OuterFormat, OuterSpec
from meshwright.units import gigabytes, percent, seconds

_MOVED = 19
"""Numbers that an exchange reads and writes of each parameter in operators that are not fused. Counted: 3
for the difference, 2 for its mean, 5 for the momentum, 3 for Nesterov's form, 3 for the anchor, 3 for the
island's parameters (`islands/outer.py`)."""
_CODED: dict[OuterFormat, tuple[int, int]] = {
    "fp32": (1, 2), "bf16": (3, 4), "int8": (11, 7), "int4": (13, 10), "fp4": (24, 11),
}  # fmt: skip
"""Numbers of 4 bytes that are moved to encode one and to decode and add it, counted in
`islands/outer_compression.py`."""
_PLACED = (4, 9)
"""Those that are moved to gather one of the largest of a block, and to scatter it, with its place."""
_SORTED = 80
"""Numbers of 4 bytes moved in the time that it takes to put one in its place in a block of 256: 31 ns,
measured on one core of a processor, which moves 10 GB/s."""
_PERIODS = 4
"""Periods that are followed, of which the last half counts."""
_NUMBER = 8
"""Bytes of the number of ranks that were asked to stop."""


@dataclass(frozen=True)
class ExchangeSeconds:
    """Seconds of a step for exchanges, in the mean of a period; all 0 without islands."""

    sent: float = 0.0
    """All messages, hidden or not."""
    exposed: float = 0.0
    """Messages that an island waits for."""
    slowed: float = 0.0
    """Slowdown of compute by messages that it hides."""
    update: float = 0.0
    """Differences from anchors, and the outer optimiser."""

    @property
    def total(self) -> float:
        """Seconds by which exchanges make a step longer."""
        return self.exposed + self.slowed + self.update


@dataclass(frozen=True)
class ExchangeFigures:
    """The exchanges of islands in a plan."""

    spec: RunSpec
    costs: CostModel
    mean: ExchangeSeconds
    step_seconds: float
    traffic: Mapping[tuple[str, str], float]
    """(axis, operation) -> bytes that a rank of the busiest pipeline rank sends in a step."""
    synchronous: float
    """Seconds of a step of the same layout that reduces gradients instead."""

    @property
    def exposed(self) -> float:
        """The share of the time that islands wait for messages."""
        return self.mean.exposed / self.step_seconds

    def to_json(self) -> dict[str, float]:
        """Plain values; bytes and seconds of messages are those of a period."""
        every = self.spec.outer.every
        return {
            "count": self.spec.step_groups,
            "bytes": every * sum(size for (axis, _), size in self.traffic.items() if axis == "replicate"),
            "seconds": every * self.mean.sent,
            "exposed_seconds": every * self.mean.exposed,
            "exposed": self.exposed,
            "synchronous_step_seconds": self.synchronous,
        }

    @property
    def words(self) -> str:
        """A clause on what is exchanged how often, and what that costs."""
        outer, of = self.spec.outer, self.to_json()
        level = self.costs.links.outermost(axes(self.spec.layout).replicate)
        parts = f" in {outer.fragments} fragments" if outer.fragments > 1 else ""
        period = f"{outer.every} step{'s' * (outer.every > 1)}"
        delay = f" while islands take {outer.delay} step{'s' * (outer.delay > 1)} each" if outer.delay else ""
        return (
            f"{of['count']:,.0f}, which send {gigabytes(of['bytes'])} a rank over '{level.name}' in "
            f"{period}{parts}; that takes {seconds(of['seconds'])}{delay}, of which they wait for "
            f"{seconds(of['exposed_seconds'])}, {percent(of['exposed'])} of the time; in this layout a step "
            f"that sums gradients instead takes {seconds(of['synchronous_step_seconds'])}"
        )


def exchange_json(found: ExchangeFigures | None) -> dict[str, Any]:
    """The part of a plan's JSON about exchanges."""
    return {"islands": found and found.to_json()}


def exchange_facts(found: ExchangeFigures | None) -> dict[str, str]:
    """The facts of a plan about exchanges, each with its name."""
    return {} if found is None else {"islands": found.words}


def refuse_other_stacks(spec: RunSpec, stack: SoftwareStack) -> None:
    """Raise `UserError` for a plan with islands of another program's runs."""
    if spec.step_groups > 1 and not stack.ours:
        raise UserError(
            f"outer.every: {spec.outer.every} steps between exchanges of islands are of this program, "
            f"and the stack is {stack.name}; leave --stack out, or give outer.every = 0"
        )


@dataclass(frozen=True)
class RankParts:
    """Parameters of a pipeline rank, on one tensor rank: blocks, and ends of the model."""

    blocks: StoredParameters
    embed: float
    head: float


def exchange_seconds(
    spec: RunSpec, costs: CostModel, ranks: Iterable[RankParts], alone: float
) -> ExchangeSeconds:
    """Seconds of the exchanges of islands whose steps take `alone` seconds without them.

    Of each fragment the rank whose messages take longest counts.
    """
    if spec.step_groups == 1:
        return ExchangeSeconds()
    outer, links, stack = spec.outer, costs.links, costs.stack
    listed = [_fragments(spec, rank) for rank in ranks]
    group, width = axes(spec.layout).replicate, exchanged_width(spec)
    call, share = ("all_gather", spec.step_groups) if outer.compressed else ("all_reduce", 1)
    sends = [0.0] * outer.fragments
    for rank in listed:
        for place, (elements, units) in enumerate(rank):
            each = units * links.collective(call, share * width * elements / units, group) if units else 0.0
            if outer.quorum is not None:
                each = (spec.step_groups - 1) * links.to_next("send", width * elements, group)
            sends[place] = max(sends[place], each)
    stops = links.collective("all_reduce", _NUMBER, group)
    sends = [stops + each * (links.slowed if outer.delay and stack.own else 1.0) for each in sends]
    exposed, sent = waited(outer, alone, sends), sum(sends)
    contention = links.contention(call)
    if not stack.own:  # compute loses by what a message moves, not by how long a slow link takes to carry it
        rates = [links.rate(level) for level in (links.outermost(group), costs.cluster.levels[0])]
        contention = costs.contention * min(1.0, rates[0] / rates[1])
    whole = max(sum(elements for elements, _ in rank) for rank in listed)
    update = costs.kernels.moved((_MOVED + _coding(spec)) * widths(spec).exact * whole)
    in_period = sent, exposed, contention * (sent - exposed), update
    return ExchangeSeconds(*(each / outer.every for each in in_period))


def _coding(spec: RunSpec) -> float:
    """Numbers that are moved to write an island's message, and to read those of all, for each parameter."""
    outer = spec.outer
    if not outer.compressed:
        return 0.0
    share = 1.0 if outer.top_k is None else outer.top_k
    encode, decode = _CODED[outer.format]
    sort = 0
    if outer.top_k is not None:
        sort, encode, decode = _SORTED, encode + _PLACED[0], decode + _PLACED[1]
    kept = 4 if outer.kept_error else 0  # the error is added before, and what is sent is taken off it
    return sort + kept + share * (encode + decode * (spec.step_groups + (outer.kept_error > 0)))


def _fragments(spec: RunSpec, rank: RankParts) -> list[tuple[float, float]]:
    """(elements, units) that a rank sends of each fragment; its blocks are taken to be shared evenly."""
    layout, count = spec.layout, spec.outer.fragments
    shards, expert_shards = (layout.shard_ranks, layout.expert_data_ranks) if layout.zero else (1, 1)
    held = rank.blocks
    found = [(held.dense / shards + held.routed / expert_shards, float(held.units))] * count
    found = [(elements / count, units / count) for elements, units in found]
    for name, elements in (("embed", rank.embed), ("head", rank.head)):
        place = spec.outer.fragment_of(name, spec.model.head_embeds)
        before, units = found[place]
        found[place] = before + elements / shards, units + (elements > 0)
    return found


def waited(outer: OuterSpec, step: float, sends: Sequence[float]) -> float:
    """Seconds that an island waits in a period, where a step takes `step` and each fragment's messages
    take `sends`."""
    free = total = half = 0.0
    coming = deque[tuple[int, float]]()

    def take(at: int) -> None:
        nonlocal total
        while coming and coming[0][0] <= at:
            due, done = coming.popleft()
            total += max(0.0, done - (due * step + total))

    for period in range(_PERIODS):
        if period == _PERIODS // 2:
            half = total
        for part, each in enumerate(sends):
            at = period * outer.every + part * outer.every // outer.fragments
            take(at)
            free = max(free, at * step + total) + each
            coming.append((at + outer.delay, free))
            take(at)
    backlog = sum(sends) - outer.every * step  # of a full link, which may take long to be felt
    return max(backlog, (total - half) / (_PERIODS - _PERIODS // 2))
