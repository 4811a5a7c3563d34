"""Seconds of the stages and ranks of a pipeline, before ranks wait for each other.

A microbatch's seconds in a stage come from its operators and messages (`planner/cost/layer.py`); messages of
the data axis and the optimiser follow each rank's last backward. Stages and ranks that hold equal parts of
the model cost the same and are priced once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, reduce
from operator import sub
from typing import NamedTuple

from meshwright.planner.cost.breakdown import PassSeconds, weighted_sum
from meshwright.planner.cost.data_parallel import DataSeconds, StoredParameters, data_seconds
from meshwright.planner.cost.exchange import ExchangeSeconds, RankParts, exchange_seconds
from meshwright.planner.cost.layer import LayerCost
from meshwright.planner.cost.model import CostModel
from meshwright.planner.cost.muon import muon_seconds
from meshwright.planner.cost.trained import Trained, trained_in
from meshwright.planner.group_shapes import axes, step_world
from meshwright.planner.layout_levels import StageSplit
from meshwright.schedule import StageCost, StageLink
from meshwright.schedule.actions import looped, v_shape
from meshwright.spec import Layout, ModelSpec, RunSpec
from meshwright.spec.layers import LayerKind
from meshwright.spec.pipeline_schedules import SCHEDULES
from meshwright.spec.stages import Stage, stages

_TENSORS = 7
"""Large parameters of a block."""
NUMBER = 8
"""Bytes of a number that ranks agree on."""


class Contents(NamedTuple):
    """The part of the model that a stage or a rank holds."""

    counts: tuple[int, ...]
    """Layers of each of the model's kinds, in their order, with those that predict further tokens."""
    embed: bool
    head: bool
    trained: Trained | None = None
    """The part of it that is trained; None where no parameter of the run is frozen."""

    @property
    def blocks(self) -> int:
        """Number of blocks."""
        return sum(self.counts)

    @property
    def parts(self) -> tuple[int, ...]:
        """Number of blocks of each kind, of embeddings and of heads."""
        return (*self.counts, self.embed, self.head)

    def by_kind(self, kinds: Sequence[LayerKind]) -> list[tuple[int, LayerKind]]:
        """(number of blocks, their kind), without kinds that are absent; `kinds` are the model's."""
        return [(count, kind) for count, kind in zip(self.counts, kinds, strict=True) if count]

    def backward(self, kinds: Sequence[LayerKind]) -> list[tuple[int, LayerKind]]:
        """`by_kind` of the blocks that have a backward."""
        if self.trained is None:
            return self.by_kind(kinds)
        counts = [work.input for work in self.trained.works[: len(kinds)]]
        return [(count, kind) for count, kind in zip(counts, kinds, strict=True) if count]


def model_contents(spec: RunSpec) -> Contents:
    """The whole model of a run."""
    whole = Stage(0, 0, spec.model.layers, True, True, spec.model.mtp_layers)
    return _contents(spec, whole, blocks_before(spec.model))


def _contents(spec: RunSpec, stage: Stage, before: Sequence[tuple[int, ...]]) -> Contents:
    """The part of the model in a stage; `before` are `blocks_before`."""
    counts = list(map(sub, before[stage.last], before[stage.first]))
    for layer in stage.beyond:
        counts[spec.model.kinds.index(spec.model.kind_of(layer))] += 1
    return Contents(tuple(counts), stage.embed, stage.head, trained_in(spec, stage))


def blocks_before(model: ModelSpec) -> list[tuple[int, ...]]:
    """The number of blocks of each kind before each block, and in all."""
    numbers = {kind: number for number, kind in enumerate(model.kinds)}
    found = [[0] * len(numbers)]
    for kind in model.layer_kinds:
        found.append(found[-1].copy())
        found[-1][numbers[kind]] += 1
    return [*map(tuple, found)]


class PlacedStages:
    """The stages of a pipeline on its ranks: `own` lists each rank's stages, by index, and `before` are
    `blocks_before`."""

    def __init__(
        self,
        spec: RunSpec,
        stages: Sequence[Stage],
        own: Sequence[Sequence[int]],
        before: Sequence[tuple[int, ...]],
    ) -> None:
        self.own = own
        self.contents = [_contents(spec, stage, before) for stage in stages]

    @cached_property
    def by_rank(self) -> list[tuple[Contents, ...]]:
        """Contents of the stages of each rank."""
        return [tuple(self.contents[stage] for stage in mine) for mine in self.own]

    @cached_property
    def members(self) -> dict[tuple[Contents, ...], list[int]]:
        """Contents of a rank's stages -> the ranks whose stages hold the same."""
        found: dict[tuple[Contents, ...], list[int]] = {}
        for rank, held in enumerate(self.by_rank):
            found.setdefault(held, []).append(rank)
        return found


def placed_stages(spec: RunSpec) -> PlacedStages:
    """The stages of a run's pipeline."""
    made = stages(spec.model, spec.layout, spec.data.seq_len)
    return PlacedStages(spec, made, ranks_of(spec.layout, spec.layout.pp), blocks_before(spec.model))


def ranks_of(cut: StageSplit | Layout, ranks: int) -> list[list[int]]:
    """The stages of each pipeline rank, by index."""
    found: list[list[int]] = [[] for _ in range(ranks)]
    in_v = SCHEDULES[cut.schedule].stages == 2 and cut.chunks == 2  # without a pipeline there is one stage
    for stage, rank in enumerate(v_shape(ranks) if in_v else looped(ranks, cut.chunks)):
        found[rank].append(stage)
    return found


def together(held: Sequence[Contents]) -> Contents:
    """The contents of several stages."""
    counts, embed, head, trained = zip(*held, strict=True)
    known = [each for each in trained if each is not None]
    total = reduce(Trained.plus, known) if known else None
    return Contents(tuple(map(sum, zip(*counts, strict=True))), any(embed), any(head), total)


@dataclass(frozen=True)
class RankTime:
    """Seconds of a pipeline rank in one step."""

    work: PassSeconds
    """All its microbatches."""
    data: DataSeconds
    sent: float
    """Messages between stages that the rank itself waits for."""


class StageCosts:
    """Seconds of the stages of a pipeline, for every schedule and every sharding of states.

    Without a pipeline they hold for the sharding of `spec` alone: each microbatch may wait for its messages.
    """

    def __init__(self, spec: RunSpec, costs: CostModel, placed: PlacedStages, blocks: LayerCost) -> None:
        self._costs, self.placed, self.blocks = costs, placed, blocks
        self._hop, link = message(spec, costs, blocks)
        self.link, self._on_path = link or StageLink(), link is None
        self.hop = 0.0 if self._on_path else self._hop
        """Seconds of a message that overlaps compute; 0 where `stages` include waiting for messages."""
        self.passes = {held: weighted_sum(parts(blocks, held)) for held in set(placed.contents)}
        waits = self.data(spec, placed.by_rank[0]).microbatch if spec.layout.pp == 1 else 0.0
        known = {held: self._stage(held, waits) for held in self.passes}
        self.stages = tuple(known[held] for held in placed.contents)
        seconds = {held: cost.forward + cost.input + cost.weight for held, cost in known.items()}
        self.by_rank = [sum(seconds[held] for held in mine) for mine in placed.by_rank]
        """Seconds of one microbatch in the stages of each rank."""
        agreed = costs.links.collective("all_reduce", NUMBER, step_world(spec))
        self.fixed = costs.stack.numbers.step + costs.stack.agreements * agreed
        """Seconds of a step that belong to no operator."""
        self._ahead = [self._forwards(spec.in_forward(each), waits / 3) for each in spec.forwards_ahead]
        """Seconds of a microbatch in each stage of each forward ahead of a step."""

    def _stage(self, held: Contents, waits: float) -> StageCost:
        """A stage's cost; a third of what a microbatch waits for on the data axis is in its forward."""
        work, hop = self.passes[held], self._hop if self._on_path else 0.0
        return StageCost(
            forward=work.forward.total + waits / 3 + (0.0 if held.head else hop),
            input=work.input.total + work.again.total + waits * 2 / 3 + (0.0 if held.embed else hop),
            weight=work.weight.total,
            output=0.0 if self._on_path else message_bytes(self.blocks),
        )

    def _forwards(self, spec: RunSpec, waits: float) -> list[float]:
        """Seconds of a forward of a microbatch in each stage of a run's model, which `waits` for its
        units."""
        blocks, placed = self._costs.blocks(spec), placed_stages(spec)
        works = {held: weighted_sum(parts(blocks, held)) for held in set(placed.contents)}
        return [works[held].forward.total + waits + self._hop * (not held.head) for held in placed.contents]

    def ahead(self, spec: RunSpec) -> float:
        """Seconds of the forwards that a step takes before it: breadth first, so that ranks wait for each
        other's first microbatch alone."""
        found = 0.0
        for seconds in self._ahead:
            ranks = [sum(seconds[stage] for stage in mine) for mine in self.placed.own]
            found += sum(seconds) + (spec.microbatches - 1) * max(ranks)
        return found

    def data(self, spec: RunSpec, mine: Sequence[Contents]) -> DataSeconds:
        """Seconds on the data axis and of the optimiser for a rank with these stages."""
        work = [self.passes[held] for held in mine]
        forward = sum(passes.forward.total for passes in work)
        backward = sum(passes.total for passes in work) - forward
        found = data_seconds(spec, self._costs, stored(self.blocks, together(mine)), forward, backward)
        if spec.train.optimiser_kind.orthogonalises:
            kinds = together(mine).backward(self.blocks.kinds)
            more = sum(count * muon_seconds(spec, self._costs, kind) for count, kind in kinds)
            found = replace(found, optimiser=found.optimiser + more)
        return found

    def exchange(self, spec: RunSpec, alone: float) -> ExchangeSeconds:
        """Seconds of a step for exchanges of parameters, where steps take `alone` seconds without them."""
        ranks = (self._parts(together(mine)) for mine in self.placed.members)
        return exchange_seconds(spec, self._costs, ranks, alone)

    def _parts(self, held: Contents) -> RankParts:
        both = stored(self.blocks, held._replace(embed=False, head=False)).trained
        end, model = self.blocks.rows * self.blocks.spec.model.hidden, self.blocks.spec.model
        embed = head = 1.0
        if held.trained is not None:
            embed, head = min(1.0, held.trained.embed.weight), held.trained.head.weight  # of both ends
        embeds = held.embed or (held.head and model.head_embeds)
        return RankParts(both, embeds * end * embed, (held.head and not model.tied) * end * head)

    def rank_times(self, spec: RunSpec) -> tuple[RankTime, ...]:
        """Seconds of each rank in a step."""
        known: dict[tuple[Contents, ...], RankTime] = {}
        for mine in self.placed.members:
            work = weighted_sum((spec.microbatches, self.passes[held]) for held in mine)
            ends = sum((not held.embed) + (not held.head) for held in mine)
            sent = spec.microbatches * self._hop * ends if self._on_path else 0.0
            known[mine] = RankTime(work, self.data(spec, mine), sent)
        return tuple(known[mine] for mine in self.placed.by_rank)


def parts(blocks: LayerCost, held: Contents) -> Iterator[tuple[int, PassSeconds]]:
    """(number, seconds of a microbatch in one) of the blocks of each kind, the embedding and the head."""
    works = [None] * len(held.parts) if held.trained is None else held.trained.works
    for count, part, work in zip(held.parts, blocks.parts, works, strict=True):
        if count and work is None:
            yield count, blocks.seconds(part)
        elif count and work is not None:
            yield 1, work.of(count, blocks.seconds(part))


def stored(blocks: LayerCost, held: Contents) -> StoredParameters:
    """Parameters on one tensor rank."""
    model = blocks.spec.model
    ends = (held.embed or (held.head and model.head_embeds)) + (held.head and not model.tied)
    at_ends = float(ends * blocks.rows * model.hidden)
    whole, experts = at_ends, 0.0
    whole += held.head * model.mtp_num_layers * 2 * model.hidden**2
    for count, kind in held.by_kind(blocks.kinds):
        mine = blocks.held(kind)
        whole, experts = whole + count * mine[0], experts + count * mine[1]
    found = StoredParameters(whole, experts, held.blocks + ends, _TENSORS * held.blocks + ends, at_ends)
    if (trained := held.trained) is None:
        return found
    layout, weights = blocks.spec.layout, []
    if held.embed or (held.head and model.head_embeds):
        weights.append(trained.embed.weight)
    if held.head and len(weights) < ends:
        weights.append(trained.head.weight)
    dense = trained.frozen_split // layout.tp + trained.frozen_whole
    dense += weights.count(0.0) * blocks.rows * model.hidden
    added = trained.added_split // layout.tp + trained.added_whole
    return replace(
        found,
        dense=found.dense + added,
        routed=found.routed + trained.added_experts / (layout.ep * layout.etp),
        frozen=dense,
        quantised=float(trained.quantised_split // layout.tp + trained.quantised_whole),
        frozen_routed=trained.frozen_experts / (layout.ep * layout.etp),
    )


def message(spec: RunSpec, costs: CostModel, blocks: LayerCost) -> tuple[float, StageLink | None]:
    """Seconds of a message between stages, and its link if the message overlaps compute."""
    if spec.layout.pp == 1:
        return 0.0, StageLink()
    size = message_bytes(blocks)
    group = axes(spec.layout).pipeline  # not of `blocks`, which other layouts may share
    if "pipeline" not in costs.stack.overlaps:
        return costs.links.to_next("send", size, group), None
    level = costs.links.outermost(group)
    link = StageLink(level.link.latency, costs.links.rate(level))
    return link.latency + size / link.bandwidth, link


def message_bytes(blocks: LayerCost) -> float:
    """Bytes of a microbatch from one stage to the next, on one rank."""
    layout = blocks.spec.layout
    size = blocks.own * blocks.spec.model.hidden * blocks.width
    return size / layout.tp if blocks.stack.scatter_pipeline and not layout.sequence_parallel else size
