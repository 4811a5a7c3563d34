"""What each stage and rank of a layout costs, but for what ranks wait for each other.

A microbatch's seconds in a stage come from its operators and messages (`planner/cost/layer.py`); the data
axis and the optimiser follow each rank's last backward. Stages and ranks that hold as many blocks cost the
same, and are looked at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from meshwright.planner.cost.breakdown import PassSeconds
from meshwright.planner.cost.data_parallel import DataSeconds, StoredParameters, data_seconds
from meshwright.planner.cost.layer import LayerCost
from meshwright.planner.cost.model import CostModel
from meshwright.planner.group_shapes import GroupShape, axes
from meshwright.planner.layout_space import StageSplit
from meshwright.schedule import Link, StageCost
from meshwright.schedule.actions import looped, v_shape
from meshwright.spec import Layout, RunSpec
from meshwright.spec.layout import TWO_STAGES
from meshwright.spec.stages import Stage, stages

_UPDATE_BYTES = 38.0
"""AdamW reads the gradient, the master and both moments, and writes three of them and the copy that computes;
the norm reads gradients once more, and they are cleared."""
_ADAMW_BYTES = 28.0
"""Of them in fp32, AdamW's own."""
_TENSORS = 7
"""Large parameters of a block."""
NUMBER = 8
"""Bytes of a number that ranks agree on."""
Totals = tuple[int, int, bool, bool]
"""What a stage or a rank has: dense and routed blocks, whether the embedding, whether the head."""


@dataclass(frozen=True)
class RankTime:
    """What a pipeline rank does in a step, in seconds."""

    work: PassSeconds
    """All its microbatches."""
    data: DataSeconds
    sent: float
    """Messages between stages that the rank waits for itself."""


class RankCosts(NamedTuple):
    """Of a layout on some engines."""

    stages: list[StageCost]
    ranks: list[RankTime]
    link: Link
    """What carries messages beside compute."""
    hop: float
    """Seconds of a message on it; 0 where ranks wait for messages, which `stages` then count."""
    fixed: float
    """What belongs to no operator."""

    def each_rank(self, own: Sequence[Sequence[int]]) -> list[float]:
        """Seconds of a microbatch in the stages of each rank."""
        each = [cost.forward + cost.input + cost.weight for cost in self.stages]
        return [sum(each[stage] for stage in mine) for mine in own]


class StageCosts:
    """A layout's stages and what they hold, by rank of the pipeline, whatever they cost."""

    def __init__(self, spec: RunSpec) -> None:
        self.spec, layout, has_experts = spec, spec.layout, spec.model.has_experts
        self.stages = stages(spec.model, layout, spec.data.seq_len)
        self.own = ranks_of(layout, layout.pp)
        self.kinds: list[Totals] = []
        for stage in self.stages:
            routed = sum(map(has_experts, stage.blocks))
            self.kinds.append((len(stage.blocks) - routed, routed, stage.embed, stage.head))

    def costs(self, on: CostModel) -> RankCosts:
        """What they cost."""
        spec, blocks = self.spec, on.blocks(self.spec)
        each, link = message(spec, on, blocks)
        alike = dict(zip(self.kinds, self.stages, strict=True))
        passes = {kind: stage_passes(blocks, stage) for kind, stage in alike.items()}
        known: dict[tuple[Totals, ...], tuple[RankTime, list[StageCost]]] = {}
        costs, ranks = [StageCost(0.0, 0.0, 0.0)] * len(self.kinds), []
        for mine in self.own:
            key = tuple(self.kinds[stage] for stage in mine)
            if key not in known:
                work = [passes[kind] for kind in key]
                data = rank_data(spec, on, held_by(blocks, [self.stages[stage] for stage in mine]), work)
                waits = data.each_microbatch / len(mine)
                ends = [(not embed, not head) for _, _, embed, head in key]
                sent = spec.microbatches * each * sum(map(sum, ends)) if link is None else 0.0
                known[key] = (
                    RankTime(passed(work, spec.microbatches), data, sent),
                    [
                        stage_cost(own, waits, each, sides, link is None, blocks)
                        for own, sides in zip(work, ends, strict=True)
                    ],
                )
            rank, listed = known[key]
            ranks.append(rank)
            for stage, cost in zip(mine, listed, strict=True):
                costs[stage] = cost
        agreed = on.links.collective("all_reduce", NUMBER, GroupShape(spec.layout.world_size, 1))
        fixed = on.stack.step + on.stack.agreements * agreed
        return RankCosts(costs, ranks, link or Link(), 0.0 if link is None else each, fixed)


def ranks_of(cut: StageSplit | Layout, ranks: int) -> list[list[int]]:
    """Rank -> its stages."""
    found: list[list[int]] = [[] for _ in range(ranks)]
    in_v = cut.schedule in TWO_STAGES and cut.chunks == 2  # one rank has one stage, whatever is named
    order = v_shape(ranks) if in_v else looped(ranks, cut.chunks)
    for stage, rank in enumerate(order):
        found[rank].append(stage)
    return found


def passed(passes: Sequence[PassSeconds], times: float) -> PassSeconds:
    """What `times` microbatches take in stages of these passes."""
    whole = PassSeconds()
    for each in passes:
        whole = _added(whole, each, times)
    return whole


def stage_passes(blocks: LayerCost, stage: Stage) -> PassSeconds:
    """Seconds of a microbatch in a stage."""
    model = blocks.spec.model
    routed = sum(map(model.has_experts, stage.blocks))
    found = PassSeconds()
    for count, wanted in ((len(stage.blocks) - routed, False), (routed, True)):
        if count:
            found = _added(found, blocks.passes(wanted), count)
    if stage.embed:
        found = _added(found, blocks.embedding(), 1)
    if stage.head:
        found = _added(found, blocks.head(), 1)
    return found


def held_by(blocks: LayerCost, own: Sequence[Stage]) -> StoredParameters:
    """Parameters of these stages on one tensor rank."""
    layers = [layer for stage in own for layer in stage.blocks]
    routed = sum(map(blocks.spec.model.has_experts, layers))
    embed, head = (any(getattr(stage, end) for stage in own) for end in ("embed", "head"))
    return held(blocks, len(layers) - routed, routed, embed, head)


def held(blocks: LayerCost, dense: int, routed: int, embed: bool, head: bool) -> StoredParameters:
    """The same of so many blocks, dense ones and with experts, and of the ends."""
    model = blocks.spec.model
    ends = 1 if model.tied and embed and head else embed + head
    whole, experts = float(ends * blocks.rows * model.hidden), 0.0
    for count, wanted in ((dense, False), (routed, True)):
        if count:
            mine = blocks.held(wanted)
            whole, experts = whole + count * mine[0], experts + count * mine[1]
    layers = dense + routed
    return StoredParameters(whole, experts, layers + ends, _TENSORS * layers + ends)


def _added(one: PassSeconds, other: PassSeconds, times: float) -> PassSeconds:
    return PassSeconds(*(a.plus(b, times) for a, b in zip(one, other, strict=True)))


def rank_data(
    spec: RunSpec, on: CostModel, mine: StoredParameters, work: Sequence[PassSeconds]
) -> DataSeconds:
    """What a rank that has `mine` spends on the data axis, where `work` is a microbatch's in its stages."""
    forward = sum(each.forward.total for each in work)
    backward = sum(each.total for each in work) - forward
    update = on.kernels.updated(_UPDATE_BYTES, _UPDATE_BYTES - _ADAMW_BYTES)
    unpack = on.kernels.moved(on.stack.unpacked)
    return data_seconds(spec, on.stack, on.links, mine, forward, backward, update, unpack)


def message(spec: RunSpec, on: CostModel, blocks: LayerCost) -> tuple[float, Link | None]:
    """Seconds of a message between stages, and the link that carries it beside compute, if one does."""
    layout, stack = spec.layout, on.stack
    if layout.pp == 1:
        return 0.0, Link()
    size = message_bytes(blocks)
    stride = axes(layout).pipeline.stride  # of this layout: `blocks` may serve others with other data ranks
    if not stack.overlap_pipeline:
        return on.links.message(size, stride), None
    level = on.links.between(stride)
    link = Link(level.link.latency, on.links.rate(level))
    return link.latency + size / link.bandwidth, link


def message_bytes(blocks: LayerCost) -> float:
    """Bytes of a microbatch from one stage to the next, on one rank."""
    layout = blocks.spec.layout
    size = blocks.own * blocks.spec.model.hidden * blocks.width
    return size / layout.tp if blocks.stack.scatter_pipeline and not layout.sequence_parallel else size


def stage_cost(
    work: PassSeconds, waits: float, each: float, ends: tuple[bool, bool], on_path: bool, blocks: LayerCost
) -> StageCost:
    """A stage's cost: a third of what a microbatch waits for on the data axis is in its forward."""
    before, after = (end * each if on_path else 0.0 for end in ends)
    return StageCost(
        forward=work.forward.total + waits / 3 + after,
        input=work.input.total + work.again.total + waits * 2 / 3 + before,
        weight=work.weight.total,
        output=0.0 if on_path else message_bytes(blocks),
    )
