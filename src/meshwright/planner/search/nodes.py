"""The order in which the search refines layouts. Each node stands for all layouts that share its choices.

    node            adds                                           bound by
    TokenGroup      tensor axis, tokens on a rank                  compute and tensor messages
    LayerNode       context axis, microbatch, recompute policy     and context messages
    ExpertNode      expert ranks                                   and messages to experts
    MeshNode        pipeline and data ranks                        the fullest rank's blocks
    CutNode         stages and schedule                            the ranks that may set the pace
    ScheduleNode    stages on their ranks                          every rank, and known paths of the schedule
    ShardedNode     shardings whose states fit                     and what follows the last backward
    FittingNode     shardings that fit with activations            the same, and then the simulated schedule

Without a pipeline a `MeshNode` times each of its shardings.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from operator import add
from typing import Any

from meshwright.planner.cost.layer import LayerCost
from meshwright.planner.cost.lower_bounds import (
    ExpertMessages,
    Floor,
    SharedFloor,
    StageShape,
    microbatch_seconds,
    pace,
    pace_bound,
    pace_setters,
)
from meshwright.planner.cost.model import CostModel
from meshwright.planner.cost.stages import PlacedStages, message, model_contents, ranks_of, stored
from meshwright.planner.cost.step import ScheduleTimes, StepTime
from meshwright.planner.layout_space import (
    NO_CUT,
    NO_SHARDING,
    DataMesh,
    LayerLayout,
    LayoutSpace,
    Sharding,
    StageSplit,
)
from meshwright.planner.memory.generic import MemoryModel, stage_activations, working
from meshwright.planner.search.pipeline_branch import Option, PipelineBranch, ShardingCosts
from meshwright.planner.search.results import BestLayouts, timed_layout
from meshwright.spec import RunSpec
from meshwright.spec.layout import SPLIT, TWO_STAGES
from meshwright.spec.sections import NoRecompute
from meshwright.spec.stages import placed

_COMMON = 8
"""Most tensor ranks, and most context ranks, of common layouts."""


class Scope:
    """State and caches that all nodes of a search share."""

    def __init__(
        self,
        space: LayoutSpace,
        costs: CostModel,
        memory: MemoryModel,
        capacity: float,
        best: BestLayouts,
    ) -> None:
        self.space, self.costs, self.memory, self.best = space, costs, memory, best
        self.capacity = capacity * memory.slack / (1 - 1e-9)  # of sums in another order than the exact ones
        self.model = model_contents(space.base.model)
        self.step = costs.stack.step
        self.times = ScheduleTimes()
        self.experts = space.experts(space.ranks)
        self._cuts: dict[int, list[tuple[StageSplit, PlacedStages, list[StageShape]]]] = {}

    def floor(self, kind: type[Floor], inner: LayerLayout) -> Floor:
        """Least costs of blocks with such axes, without recomputation."""
        plain = inner._replace(recompute=NoRecompute())
        spec, costs = self.space.spec(plain, DataMesh(1, 1, 1, 1), NO_CUT, NO_SHARDING), self.costs
        format = costs.format or spec.precision.compute
        return kind(spec, format, costs.stack, costs.kernels, costs.links, costs.dense(spec.model))

    def microbatches(self, inner: LayerLayout) -> float:
        """Microbatches of a step through a whole model on the ranks of one stage."""
        ranks = self.space.ranks * inner.micro_batch
        return self.space.base.batch_sequences * inner.tp * inner.cp / ranks

    def cuts(self, pp: int) -> list[tuple[StageSplit, PlacedStages, list[StageShape]]]:
        """The cuts of a pipeline, with the ranks that may set the pace of each."""
        if pp not in self._cuts:
            found = self._cuts[pp] = []
            for cut in self.space.cuts(pp):
                stages = PlacedStages(placed(cut.blocks), ranks_of(cut, pp), self.space.routed_before)
                found.append((cut, stages, pace_setters(stages)))
        return self._cuts[pp]


@dataclass
class Node:
    """A branch of the search, whose layouts all take at least `bound` seconds a step."""

    bound: float

    def expand(self, scope: Scope) -> Iterator[Node]:
        """The next choice's branches; where none is left, the timed layouts go to `scope.best`."""
        raise NotImplementedError


def roots(scope: Scope, common: bool) -> Iterator[Node]:
    """The branches that a pass begins with: those of common layouts, or the others."""
    groups: dict[tuple[Any, ...], list[LayerLayout]] = {}
    for inner in scope.space.inner():
        if is_common(inner) == common:
            tokens = inner.micro_batch * scope.space.base.data.seq_len // inner.cp
            # Attention that was measured differs from ring to ring.
            key = inner[:-1] if scope.costs.cluster.measured else (inner.tp, inner.sequence_parallel, tokens)
            groups.setdefault(key, []).append(inner)
    for group in groups.values():
        if len(group) == 1:
            yield from TokenGroup(0.0, group).expand(scope)
            continue
        each = microbatch_seconds(scope.floor(SharedFloor, group[0]), scope.model)
        yield TokenGroup(scope.microbatches(group[0]) * each + scope.step, group)


def is_common(inner: LayerLayout) -> bool:
    """True for axes that many runs have."""
    return (
        inner.sequence_parallel
        and inner.tp <= _COMMON
        and inner.cp <= _COMMON
        and inner.micro_batch <= 2
        and inner.context_mode == "ring"
    )


@dataclass
class TokenGroup(Node):
    """Layouts with the same tensor axis and the same number of tokens on a rank."""

    group: list[LayerLayout]

    def expand(self, scope: Scope) -> Iterator[Node]:
        """One node for each layout of the group."""
        floors: dict[tuple[Any, ...], Floor] = {}
        for inner in self.group:
            key = inner[:-1]
            floor = floors[key] = floors.get(key) or scope.floor(Floor, inner)
            each = microbatch_seconds(floor, scope.model, inner.recompute.policy)
            yield LayerNode(scope.microbatches(inner) * each + scope.step, inner, floor, each)


@dataclass
class LayerNode(Node):
    """Layouts with the same axes inside a stage; a microbatch takes `each` seconds at least."""

    inner: LayerLayout
    floor: Floor
    each: float

    def expand(self, scope: Scope) -> Iterator[Node]:
        """One node for each way to deal out experts."""
        count, messages = scope.microbatches(self.inner), ExpertMessages(self.floor, scope.model)
        for ep, etp in scope.experts:
            bound = count * (self.each + messages.seconds(ep, etp)) + scope.step
            yield ExpertNode(bound, self.inner, ep, etp)


@dataclass
class ExpertNode(Node):
    """Layouts with the same axes inside a stage, and the same expert ranks."""

    inner: LayerLayout
    ep: int
    etp: int

    def expand(self, scope: Scope) -> Iterator[Node]:
        """One node for each mesh in which a rank with an equal share of the model fits."""
        base, inner = scope.space.base, self.inner
        known: dict[tuple[str, int], tuple[LayerCost, float, float]] = {}
        for mesh in scope.space.meshes(inner, self.ep, self.etp):
            sharding = next(scope.space.shardings(inner, mesh), None)
            if sharding is None:
                continue
            key = ("", 0)
            if inner.cp > 1:  # blocks depend on how far apart context ranks are
                key = mesh.order, mesh.pp if mesh.order == "replicate-dp-pp-tp" else 0
            if key not in known:
                blocks = scope.costs.blocks(scope.space.spec(inner, mesh, NO_CUT, sharding))
                block = min(blocks.passes(kind).total for _, kind in scope.model.kinds)
                known[key] = blocks, microbatch_seconds(blocks, scope.model), block
            blocks, each, block = known[key]
            count = base.batch_sequences // (mesh.data * inner.micro_batch)
            most = -(-base.model.layers // mesh.pp) * block
            bound = count * max(each / mesh.pp, most) + scope.step
            if scope.best.hopeful(bound) and self._fits(scope, mesh, blocks):
                yield MeshNode(bound, inner, mesh, blocks)

    def _fits(self, scope: Scope, mesh: DataMesh, blocks: LayerCost) -> bool:
        if scope.memory.generic.equal_share(blocks, mesh.pp)[1] > scope.capacity:  # activations alone
            return False
        specs = (
            scope.space.spec(self.inner, mesh, NO_CUT, sharding)
            for sharding in scope.space.most_shared(self.inner, mesh)
        )
        return any(scope.memory.lower_bound(spec, blocks).device <= scope.capacity for spec in specs)


@dataclass
class MeshNode(Node):
    """Layouts with the same ranks on all axes."""

    inner: LayerLayout
    mesh: DataMesh
    blocks: LayerCost

    def expand(self, scope: Scope) -> Iterator[Node]:
        """One node for each cut and schedule; without a pipeline, each sharding is timed."""
        if self.mesh.pp == 1:
            self._time(scope)
            return
        sharding = next(scope.space.shardings(self.inner, self.mesh))
        spec = scope.space.spec(self.inner, self.mesh, NO_CUT, sharding)
        each, link = message(spec, scope.costs, self.blocks)
        speed = pace(self.blocks, scope.model, 0.0 if link is None else each)
        pipes: dict[tuple[tuple[int, ...], bool], PipelineBranch] = {}
        shares: dict[Sharding, ShardingCosts] = {}
        for cut, stages, shapes in scope.cuts(self.mesh.pp):
            bound = pace_bound(shapes, speed, spec.microbatches, cut.schedule not in SPLIT) + scope.step
            if scope.best.hopeful(bound):
                yield CutNode(bound, self, cut, stages, pipes, shares)

    def _time(self, scope: Scope) -> None:
        ((cut, stages, _),) = scope.cuts(1)
        held, (contents,) = stored(self.blocks, scope.model), stages.contents
        kept = stage_activations(self.blocks, contents) + working(self.blocks, contents)
        for sharding in scope.space.shardings(self.inner, self.mesh):
            spec = scope.space.spec(self.inner, self.mesh, cut, sharding)
            needs = scope.memory.generic.rank(spec, self.blocks, held, kept, True, 0).device
            if needs <= scope.capacity:
                step = StepTime(spec, scope.costs, scope.times, stages)
                if scope.best.hopeful(step.bound):
                    scope.best.offer(timed_layout(step.seconds, needs, spec))


@dataclass
class CutNode(Node):
    """Layouts with the same mesh, stages and schedule; `pipes` and `shares` are known to the whole mesh."""

    mesh: MeshNode
    cut: StageSplit
    stages: PlacedStages
    pipes: dict[tuple[tuple[int, ...], bool], PipelineBranch]
    shares: dict[Sharding, ShardingCosts]

    def expand(self, scope: Scope) -> Iterator[Node]:
        """The stages on their ranks, which schedules share."""
        inner, mesh, cut = self.mesh.inner, self.mesh.mesh, self.cut
        spec = scope.space.spec(inner, mesh, cut, next(scope.space.shardings(inner, mesh)))
        key = cut.blocks, cut.schedule in TWO_STAGES
        if key not in self.pipes:
            blocks = self.mesh.blocks
            self.pipes[key] = PipelineBranch(
                spec, scope.costs, scope.memory.generic, scope.times, self.stages, blocks, self.shares
            )
        pipe = self.pipes[key]
        yield ScheduleNode(pipe.steps.bound(spec, [0.0] * mesh.pp), self, pipe, spec)


@dataclass
class ScheduleNode(Node):
    """The shardings of one schedule; `spec` has the first of them."""

    cut: CutNode
    pipe: PipelineBranch
    spec: RunSpec

    def sharded(self, scope: Scope, sharding: Sharding) -> RunSpec:
        """The run with one of the shardings."""
        return scope.space.spec(self.cut.mesh.inner, self.cut.mesh.mesh, self.cut.cut, sharding)

    def least(self, options: Sequence[Option]) -> float:
        """Seconds of a step at least, with the best of some shardings."""
        return min(self.pipe.steps.bound(self.spec, option.final) for option in options)

    def expand(self, scope: Scope) -> Iterator[Node]:
        """The shardings whose states leave room for one microbatch."""
        if self.pipe.options is None:
            shares = self.cut.shares
            every = list(scope.space.shardings(self.cut.mesh.inner, self.cut.mesh.mesh))
            for each in every:
                if each not in shares:
                    shares[each] = ShardingCosts(self.sharded(scope, each), {}, {})
            self.pipe.options = list(self.pipe.sharded(every, scope.capacity))
        if self.pipe.options:
            yield ShardedNode(self.least(self.pipe.options), self, self.pipe.options)


@dataclass
class ShardedNode(Node):
    """The shardings of one schedule whose states fit."""

    schedule: ScheduleNode
    options: list[Option]

    def expand(self, scope: Scope) -> Iterator[Node]:
        """The shardings that fit with the activations that the schedule holds."""
        held = self.schedule.pipe.activations(self.schedule.spec)
        fitting = [
            (option, needs)
            for option in self.options
            if (needs := max(map(add, option.states, held))) <= scope.capacity
        ]
        if fitting:
            least = self.schedule.least([option for option, _ in fitting])
            yield FittingNode(least, self.schedule, fitting)


@dataclass
class FittingNode(Node):
    """The shardings of one schedule that fit, with the bytes that they need."""

    schedule: ScheduleNode
    fitting: list[tuple[Option, float]]

    def expand(self, scope: Scope) -> Iterator[Node]:
        """Simulate the schedule, unless paths found since this was queued exclude it, and time shardings."""
        if scope.best.hopeful(self.schedule.least([option for option, _ in self.fitting])):
            scope.best.counts.simulated += 1
            for option, needs in self.fitting:
                spec = self.schedule.sharded(scope, option.sharding)
                seconds = self.schedule.pipe.steps.exact(spec, option.final)
                scope.best.offer(timed_layout(seconds, needs, spec))
        return iter(())
