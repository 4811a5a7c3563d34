"""One step of a layout on a cluster: how long, and where the time goes.

What a microbatch costs in each stage comes from its operators and messages (`planner/block.py`); the
actions of the schedule that the program runs are then timed one by one (`schedule/simulate.py`); the data
axis and the optimiser follow each rank's last backward. Of very many microbatches the middle ones, which
all cost the same, are not simulated one by one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from meshwright.planner.axes import Group, axes
from meshwright.planner.block import Blocks
from meshwright.planner.data_axis import DataSeconds, Held, data_seconds
from meshwright.planner.engines import Engines
from meshwright.planner.passes import Passes, Seconds
from meshwright.planner.shared_cores import Places, makespan
from meshwright.planner.shared_cores import period as shared_period
from meshwright.schedule import Link, Simulation, StageCost, schedule_of, simulate
from meshwright.spec import RunSpec
from meshwright.spec.stages import Stage, stages

_UPDATE_BYTES = 38.0
"""AdamW reads the gradient, the master and both moments, and writes three of them and the copy that computes;
the norm reads gradients once more, and they are cleared."""
_ADAMW_BYTES = 28.0
"""Of them in fp32, AdamW's own."""
NUMBER = 8
"""Bytes of a number that ranks agree on."""
_SIMULATED = 6
"""Microbatches that are simulated, in multiples of the pipeline's ranks."""


@dataclass(frozen=True)
class RankTime:
    """What a pipeline rank does in a step, in seconds."""

    work: Passes
    """All its microbatches."""
    data: DataSeconds
    sent: float
    """Messages between stages that the rank waits for itself."""


@dataclass(frozen=True)
class StepTime:
    """A step's seconds, and what they are made of on each rank of the pipeline."""

    seconds: float
    simulation: Simulation
    rank: int
    """The busiest."""
    ranks: tuple[RankTime, ...]
    fixed: float
    """What belongs to no operator."""
    repeated: float = 0.0
    """Of microbatches that were not simulated one by one."""

    @cached_property
    def parts(self) -> dict[str, float]:
        """Seconds of the busiest rank by what they go to; their sum is `seconds`."""
        return self.parts_of(self.rank)

    def parts_of(self, rank: int) -> dict[str, float]:
        """Seconds of a rank by what they go to; its bubble is what is left of the step."""
        return parts_of(self.ranks[rank], self.seconds, self.fixed)


def parts_of(own: RankTime, seconds: float, fixed: float) -> dict[str, float]:
    """What a step of `seconds` goes to on a rank; its bubble is what is left of the step."""
    every, again = Seconds(), own.work.again
    for each in own.work:
        every = every.plus(each)
    first = every.plus(again, -1)
    parts = {
        "matrix products": first.matmul,
        "attention": first.attention,
        "memory-bound": first.moved,
        "host": first.host,
        "recomputation": again.total,
        "tensor axis": first.tensor,
        "context axis": first.context,
        "expert axis": first.expert,
        "pipeline axis": own.sent,
        "data axis": own.data.exposed + own.data.slowed,
        "optimiser": own.data.optimiser,
        "fixed": fixed,
    }
    total = sum(parts.values())
    if total > seconds:  # others left this rank more of the cores than its share
        parts = {name: value * seconds / total for name, value in parts.items()}
    parts["bubble"] = max(0.0, seconds - total)
    return parts


def step_time(spec: RunSpec, on: Engines) -> StepTime:
    """Seconds of one optimiser step."""
    blocks = on.blocks(spec)
    cut = stages(spec.model, spec.layout, spec.data.seq_len)
    passes = [stage_passes(blocks, stage) for stage in cut]
    count = spec.microbatches
    schedule = schedule_of(spec.layout, simulated(spec))
    own = [schedule.stages_of(rank) for rank in range(schedule.ranks)]
    data = [
        rank_data(spec, on, held_by(blocks, [cut[i] for i in mine]), [passes[i] for i in mine])
        for mine in own
    ]
    each, link = message(spec, on, blocks)
    costs = []
    for index, work in enumerate(passes):
        waits = data[schedule.rank_of[index]].each_microbatch / len(own[schedule.rank_of[index]])
        costs.append(
            stage_cost(work, waits, each, (index > 0, index + 1 < len(passes)), link is None, blocks)
        )
    finals = [seconds.final for seconds in data]
    timed = simulate(schedule, costs, link or Link(), finals)
    busiest = max(range(len(own)), key=lambda rank: sum(passes[i].total for i in own[rank]))
    each_rank = [sum(costs[i].forward + costs[i].input + costs[i].weight for i in mine) for mine in own]
    period, span = max(each_rank), timed.makespan
    if on.shared is not None and spec.layout.pp > 1:
        places = Places(on.shared, axes(spec.layout).pipeline.stride)
        span = makespan(schedule, costs, finals, places, each if link is not None else 0.0)
        period = shared_period(each_rank, places)
    repeated = (count - schedule.microbatches) * period
    ranks = []
    for mine, of_data in zip(own, data, strict=True):
        crossings = sum((index > 0) + (index + 1 < len(passes)) for index in mine)
        sent = count * crossings * each if link is None else 0.0
        ranks.append(RankTime(passed([passes[index] for index in mine], count), of_data, sent))
    agreed = on.links.collective("all_reduce", NUMBER, Group(spec.layout.world_size, 1))
    fixed = on.stack.step + on.stack.agreements * agreed
    return StepTime(span + repeated + fixed, timed, busiest, tuple(ranks), fixed, repeated)


def passed(passes: Sequence[Passes], times: float) -> Passes:
    """What `times` microbatches take in stages of these passes."""
    whole = Passes()
    for each in passes:
        whole = _added(whole, each, times)
    return whole


def simulated(spec: RunSpec) -> int:
    """Microbatches that are simulated one by one: all, or as many as fill the pipeline some times."""
    layout, count = spec.layout, spec.microbatches
    if layout.pp == 1:
        return count if count < 2 else 1
    most = max(_SIMULATED, 2 * layout.chunks) * layout.pp
    return count if count <= most + layout.pp else most + count % layout.pp


def stage_passes(blocks: Blocks, stage: Stage) -> Passes:
    """Seconds of a microbatch in a stage."""
    model = blocks.spec.model
    routed = sum(map(model.has_experts, stage.blocks))
    found = Passes()
    for count, wanted in ((len(stage.blocks) - routed, False), (routed, True)):
        if count:
            found = _added(found, blocks.passes(wanted), count)
    if stage.embed:
        found = _added(found, blocks.embedding(), 1)
    if stage.head:
        found = _added(found, blocks.head(), 1)
    return found


def held_by(blocks: Blocks, own: Sequence[Stage]) -> Held:
    """Parameters of these stages on one tensor rank."""
    layers = [layer for stage in own for layer in stage.blocks]
    routed = sum(map(blocks.spec.model.has_experts, layers))
    embed, head = (any(getattr(stage, end) for stage in own) for end in ("embed", "head"))
    return held(blocks, len(layers) - routed, routed, embed, head)


def held(blocks: Blocks, dense: int, routed: int, embed: bool, head: bool) -> Held:
    """The same of so many blocks, dense ones and with experts, and of the ends."""
    model = blocks.spec.model
    ends = 1 if model.tied and embed and head else embed + head
    whole, experts = float(ends * blocks.rows * model.hidden), 0.0
    for count, wanted in ((dense, False), (routed, True)):
        if count:
            mine = blocks.held(wanted)
            whole, experts = whole + count * mine[0], experts + count * mine[1]
    layers = dense + routed
    return Held(whole, experts, layers + ends, _TENSORS * layers + ends)


_TENSORS = 7
"""Large parameters of a block."""


def _added(one: Passes, other: Passes, times: float) -> Passes:
    return Passes(*(a.plus(b, times) for a, b in zip(one, other, strict=True)))


def rank_data(spec: RunSpec, on: Engines, mine: Held, work: Sequence[Passes]) -> DataSeconds:
    """What a rank that has `mine` spends on the data axis, where `work` is a microbatch's in its stages."""
    forward = sum(each.forward.total for each in work)
    backward = sum(each.total for each in work) - forward
    update = on.kernels.updated(_UPDATE_BYTES, _UPDATE_BYTES - _ADAMW_BYTES)
    unpack = on.kernels.moved(on.stack.unpacked)
    return data_seconds(spec, on.stack, on.links, mine, forward, backward, update, unpack)


def message(spec: RunSpec, on: Engines, blocks: Blocks) -> tuple[float, Link | None]:
    """Seconds of a message between stages, and the link that carries it beside compute, if one does."""
    layout, stack = spec.layout, on.stack
    if layout.pp == 1:
        return 0.0, Link()
    size = message_bytes(blocks)
    stride = axes(layout).pipeline.stride  # of this layout: `blocks` may serve others with other data ranks
    level = on.links.between(stride)
    each = on.links.message(size, stride)
    return each, Link(level.link.latency, on.links.rate(level)) if stack.overlap_pipeline else None


def message_bytes(blocks: Blocks) -> float:
    """Bytes of a microbatch from one stage to the next, on one rank."""
    layout = blocks.spec.layout
    size = blocks.own * blocks.spec.model.hidden * blocks.width
    return size / layout.tp if blocks.stack.scatter_pipeline and not layout.sequence_parallel else size


def stage_cost(
    work: Passes, waits: float, each: float, ends: tuple[bool, bool], on_path: bool, blocks: Blocks
) -> StageCost:
    """A stage's cost: a third of what a microbatch waits for on the data axis is in its forward."""
    before, after = (end * each if on_path else 0.0 for end in ends)
    return StageCost(
        forward=work.forward.total + waits / 3 + after,
        input=work.input.total + work.again.total + waits * 2 / 3 + before,
        weight=work.weight.total,
        output=0.0 if on_path else message_bytes(blocks),
    )
