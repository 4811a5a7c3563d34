"""The tree of a search: the order in which layouts are refined, and the least seconds of each branch.

    branch         adds                                           bound by
    token group    tensor axis, tokens on a rank                  compute and tensor messages
    layer          context axis, microbatch, recompute policy     and context messages
    experts        expert ranks                                   and messages to experts
    mesh           pipeline and data ranks                        the fullest rank's blocks
    cut            stages and schedule                            the ranks that may set the pace
    schedule       stages on their ranks                          every rank, and known paths of the schedule
    sharded        shardings whose states fit                     and what follows the last backward
    fitting        shardings that fit with activations            the same, and then the simulated schedule

Without a pipeline a mesh's shardings are timed at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import cache, cached_property, partial
from operator import add, mul
from typing import Any, NamedTuple

from meshwright.planner.cost import lower_bounds
from meshwright.planner.cost.layer import LayerCost
from meshwright.planner.cost.lower_bounds import Floor, StageShape, microbatch_seconds
from meshwright.planner.cost.model import CostModel
from meshwright.planner.cost.stages import (
    Contents,
    PlacedStages,
    message,
    model_contents,
    ranks_of,
    together,
)
from meshwright.planner.cost.step import ScheduleTimes, StepModel, StepTime
from meshwright.planner.layout_space import DataMesh, LayerLayout, LayoutSpace, Sharding, StageSplit
from meshwright.planner.memory.generic import Generic, held_microbatches
from meshwright.planner.memory.states import gradients_meet
from meshwright.planner.search.results import SearchResult, TimedLayout
from meshwright.spec import RunSpec
from meshwright.spec.layout import SPLIT, TWO_STAGES
from meshwright.spec.sections import NoRecompute
from meshwright.spec.stages import placed

_COMMON = 8
"""Most tensor ranks, and most context ranks, of common layouts."""

Branch = tuple[float, Callable[[], Iterable["Branch"]]]
"""Seconds that a step of each of its layouts takes at least, and a function that splits it further."""


class Option(NamedTuple):
    """A sharding of a pipeline's states."""

    sharding: Sharding
    states: tuple[float, ...]
    """Bytes without activations, for each group of ranks with equal stages."""
    final: tuple[float, ...]
    """Seconds of each rank after its last backward."""


class MeshBranch:
    """Layouts with the same ranks on all axes, and what they share."""

    def __init__(self, tree: SearchTree, inner: LayerLayout, mesh: DataMesh, blocks: LayerCost) -> None:
        self.tree, self.pp, self.blocks = tree, mesh.pp, blocks
        self.shardings = list(tree.space.shardings(inner, mesh))
        self.spec = cache(partial(tree.space.spec, inner, mesh))
        """The run with a sharding and a cut of this mesh."""
        self._states: dict[tuple[Sharding, Contents, bool], float] = {}
        self.final: dict[tuple[Sharding, Contents], float] = {}
        """Seconds after the last backward of ranks that hold such parts of the model."""

    def states(self, sharding: Sharding, held: Contents, met: bool) -> float:
        """Bytes of a rank that holds such a part of the model, but for activations that its schedule holds.

        `met` is true if gradients of all its stages wait at one time.
        """
        key = sharding, held, met
        if key not in self._states:
            needs = self.tree.memory.resident(self.spec(sharding), self.blocks, held, met)
            self._states[key] = needs.device
        return self._states[key]


class PipelineBranch:
    """The stages of a mesh on their ranks, with what all their schedules and shardings share."""

    def __init__(self, mesh: MeshBranch, spec: RunSpec, placed: PlacedStages) -> None:
        costs = mesh.tree.costs
        self.mesh, self.placed = mesh, placed
        self.steps = StepModel(spec, costs, mesh.tree.times, placed, mesh.blocks)
        self._kept: dict[bool | None, dict[Contents, float]] = {}
        self._met = gradients_meet(spec)
        cuda = costs.cluster.device.kind != "cpu"
        self._fragmentation = 1 + costs.stack.fragmentation if cuda else 1.0

    def kept(self, split: bool | None) -> dict[Contents, float]:
        """Bytes that each kind of stage keeps of a microbatch; for `split` see `Generic.kept`."""
        if split not in self._kept:
            kinds, kept = set(self.placed.contents), self.mesh.tree.memory.kept
            self._kept[split] = {held: kept(self.mesh.blocks, held, split) for held in kinds}
        return self._kept[split]

    @cached_property
    def options(self) -> list[Option]:
        """The shardings whose states leave room for one microbatch at least."""
        kept, members, mesh = self.kept(None), self.placed.members, self.mesh
        totals = {member: together(member) for member in members}
        least = [(totals[held], self._fragmentation * sum(map(kept.__getitem__, held))) for held in members]
        options = []
        for sharding in mesh.shardings:
            states = []
            for total, flight in least:
                states.append(mesh.states(sharding, total, self._met))
                if states[-1] + flight > mesh.tree.capacity:
                    break
            else:
                for member, total in totals.items():
                    if (sharding, total) not in mesh.final:
                        spec = mesh.spec(sharding)
                        mesh.final[sharding, total] = self.steps.stages.data(spec, member).final
                final = tuple(mesh.final[sharding, totals[member]] for member in self.placed.by_rank)
                options.append(Option(sharding, tuple(states), final))
        return options

    def activations(self, spec: RunSpec) -> list[float]:
        """Most bytes of activations on each group of ranks with equal stages, under the run's schedule."""
        layout = spec.layout
        shapes = lower_bounds.shape(layout.schedule, layout.pp, layout.chunks, held_microbatches(spec))
        kept, found = self.kept(layout.schedule in SPLIT), []
        for member, ranks in self.placed.members.items():
            sizes = [kept[held] for held in member]
            if min(sizes) == max(sizes):
                most = max(shapes.most[rank] for rank in ranks) * sizes[0]
            else:
                most = max(sum(map(mul, each, sizes)) for rank in ranks for each in shapes.held[rank])
            found.append(self._fragmentation * most)
        return found

    def least_seconds(self, spec: RunSpec, options: Iterable[Option]) -> float:
        """Seconds of a step at least, under the run's schedule and the best of some shardings."""
        return min(self.steps.bound(spec, option.final) for option in options)


Pipelines = dict[tuple[tuple[int, ...], bool, bool], PipelineBranch]
"""(blocks of each stage, True if a rank has two stages in a V, True if gradients meet) -> the pipeline."""


class SearchTree:
    """The branches of a search, with the state and the caches that they share.

    Each private method splits one kind of branch by the next choice; where none is left, the timed layouts go
    to `found`.
    """

    def __init__(
        self, space: LayoutSpace, costs: CostModel, memory: Generic, capacity: float, found: SearchResult
    ) -> None:
        self.space, self.costs, self.memory, self.found = space, costs, memory, found
        self.capacity = capacity / (1 - 1e-9)  # of sums in another order than the exact ones
        self.model = model_contents(space.base.model)
        self.times = ScheduleTimes()
        self._experts = space.experts(space.ranks)
        self._cuts: dict[int, list[tuple[StageSplit, PlacedStages, list[StageShape]]]] = {}

    def roots(self, common: bool) -> Iterator[Branch]:
        """The branches that a pass begins with: those of common layouts, or the others."""
        groups: dict[tuple[Any, ...], list[LayerLayout]] = {}
        for inner in self.space.inner():
            if _is_common(inner) == common:
                tokens = inner.micro_batch * self.space.base.data.seq_len // inner.cp
                # Attention that was measured differs from ring to ring.
                measured = self.costs.cluster.measured
                key = inner[:-1] if measured else (inner.tp, inner.sequence_parallel, tokens)
                groups.setdefault(key, []).append(inner)
        for group in groups.values():
            if len(group) == 1:
                yield from self._split_tokens(group)
            else:
                seconds = microbatch_seconds(self._floor(lower_bounds.SharedFloor, group[0]), self.model)
                yield self._step(group[0], seconds), partial(self._split_tokens, group)

    def _floor(self, kind: type[Floor], inner: LayerLayout) -> Floor:
        """Least costs of blocks with such axes, without recomputation."""
        plain = inner._replace(recompute=NoRecompute())
        spec, costs = self.space.spec(plain, DataMesh(1, 1, 1, 1)), self.costs
        format = costs.format or spec.precision.compute
        return kind(spec, format, costs.stack, costs.kernels, costs.links, costs.dense(spec.model))

    def _step(self, inner: LayerLayout, microbatch: float) -> float:
        """Seconds of a step whose microbatches through a whole model take so long on one stage's ranks."""
        ranks = self.space.ranks * inner.micro_batch
        count = self.space.base.batch_sequences * inner.tp * inner.cp / ranks
        return count * microbatch + self.costs.stack.step

    def _split_tokens(self, group: list[LayerLayout]) -> Iterator[Branch]:
        """Layouts with the same tensor axis and tokens on a rank, by all axes inside a stage."""
        floors: dict[tuple[Any, ...], Floor] = {}
        for inner in group:
            floor = floors[inner[:-1]] = floors.get(inner[:-1]) or self._floor(Floor, inner)
            seconds = microbatch_seconds(floor, self.model, inner.recompute.policy)
            yield self._step(inner, seconds), partial(self._split_layer, inner, floor, seconds)

    def _split_layer(self, inner: LayerLayout, floor: Floor, seconds: float) -> Iterator[Branch]:
        """Layouts whose microbatches take `seconds` at least, by the ranks that experts are dealt out to."""
        messages = lower_bounds.ExpertMessages(floor, self.model)
        for ep, etp in self._experts:
            bound = self._step(inner, seconds + messages.seconds(ep, etp))
            yield bound, partial(self._split_experts, inner, ep, etp)

    def _split_experts(self, inner: LayerLayout, ep: int, etp: int) -> Iterator[Branch]:
        """Layouts with the same expert ranks, by meshes in which a rank with an equal share fits."""
        base = self.space.base
        known: dict[tuple[str, int], tuple[LayerCost, float, float]] = {}
        for mesh in self.space.meshes(inner, ep, etp):
            sharding = next(self.space.shardings(inner, mesh), None)
            if sharding is None:
                continue
            key = ("", 0)
            if inner.cp > 1:  # blocks depend on how far apart context ranks are
                key = mesh.order, mesh.pp if mesh.order == "replicate-dp-pp-tp" else 0
            if key not in known:
                blocks = self.costs.blocks(self.space.spec(inner, mesh, sharding))
                quickest = min(blocks.passes(kind).total for _, kind in self.model.kinds)
                known[key] = blocks, microbatch_seconds(blocks, self.model), quickest
            blocks, seconds, block = known[key]
            count = base.batch_sequences // (mesh.data * inner.micro_batch)
            most = -(-base.model.layers // mesh.pp) * block
            bound = count * max(seconds / mesh.pp, most) + self.costs.stack.step
            if self.found.hopeful(bound) and self._fits(inner, mesh, blocks):
                yield bound, partial(self._split_mesh, inner, mesh, blocks)

    def _fits(self, inner: LayerLayout, mesh: DataMesh, blocks: LayerCost) -> bool:
        """True if a rank with an equal share of the model fits under some sharding of a mesh."""
        if self.memory.kept(blocks, self.model) / mesh.pp > self.capacity:  # activations alone
            return False
        most_shared = self.space.shardings(inner, mesh, most_shared=True)
        specs = (self.space.spec(inner, mesh, sharding) for sharding in most_shared)
        return any(self.memory.lower_bound(s, blocks, self.model).device <= self.capacity for s in specs)

    def _split_mesh(self, inner: LayerLayout, mesh: DataMesh, blocks: LayerCost) -> Iterator[Branch]:
        """Layouts with the same ranks on all axes, by cut and schedule, or timed without a pipeline."""
        branch = MeshBranch(self, inner, mesh, blocks)
        if mesh.pp == 1:
            self._time(branch)
            return
        spec = branch.spec(branch.shardings[0])
        each, link = message(spec, self.costs, blocks)
        speed = lower_bounds.pace(blocks, self.model, 0.0 if link is None else each)
        pipelines: Pipelines = {}
        for cut, stages, shapes in self._cuts_of(mesh.pp):
            bound = lower_bounds.pace_bound(shapes, speed, spec.microbatches, cut.schedule not in SPLIT)
            bound += self.costs.stack.step
            if self.found.hopeful(bound):
                yield bound, partial(self._split_cut, branch, pipelines, cut, stages)

    def _cuts_of(self, pp: int) -> list[tuple[StageSplit, PlacedStages, list[StageShape]]]:
        """The cuts of a pipeline, with the ranks that may set the pace of each."""
        if pp not in self._cuts:
            found = self._cuts[pp] = []
            for cut in self.space.cuts(pp):
                stages = PlacedStages(placed(cut.blocks), ranks_of(cut, pp), self.space.routed_before)
                found.append((cut, stages, lower_bounds.pace_setters(stages)))
        return self._cuts[pp]

    def _time(self, mesh: MeshBranch) -> None:
        """Time each sharding of a mesh without a pipeline."""
        ((cut, stages, _),) = self._cuts_of(1)
        for sharding in mesh.shardings:
            spec = mesh.spec(sharding, cut)
            needs = self.memory.resident(spec, mesh.blocks, self.model).device
            if needs <= self.capacity:
                step = StepTime(spec, self.costs, self.times, stages)
                if self.found.hopeful(step.bound):
                    self.found.offer(TimedLayout(step.seconds, needs, spec))

    def _split_cut(
        self, mesh: MeshBranch, pipelines: Pipelines, cut: StageSplit, stages: PlacedStages
    ) -> Iterator[Branch]:
        """Layouts with the same stages and schedule, on their ranks, which schedules share as `pipelines`."""
        spec = mesh.spec(mesh.shardings[0], cut)
        key = cut.blocks, cut.schedule in TWO_STAGES, gradients_meet(spec)
        if key not in pipelines:
            pipelines[key] = PipelineBranch(mesh, spec, stages)
        pipeline = pipelines[key]
        yield pipeline.steps.bound(spec, [0.0] * mesh.pp), partial(self._split_schedule, pipeline, cut, spec)

    def _split_schedule(self, pipeline: PipelineBranch, cut: StageSplit, spec: RunSpec) -> Iterator[Branch]:
        """The shardings of one schedule whose states leave room for one microbatch."""
        if pipeline.options:
            yield (
                pipeline.least_seconds(spec, pipeline.options),
                partial(self._split_sharded, pipeline, cut, spec),
            )

    def _split_sharded(self, pipeline: PipelineBranch, cut: StageSplit, spec: RunSpec) -> Iterator[Branch]:
        """The shardings that fit with the activations that the schedule holds."""
        held = pipeline.activations(spec)
        needs = {option: max(map(add, option.states, held)) for option in pipeline.options}
        fitting = {option: size for option, size in needs.items() if size <= self.capacity}
        if fitting:
            yield pipeline.least_seconds(spec, fitting), partial(self._simulate, pipeline, cut, spec, fitting)

    def _simulate(
        self, pipeline: PipelineBranch, cut: StageSplit, spec: RunSpec, fitting: dict[Option, float]
    ) -> Iterator[Branch]:
        """Simulate a schedule, unless paths found since this was queued exclude it, and time shardings."""
        if self.found.hopeful(pipeline.least_seconds(spec, fitting)):
            self.found.counts.simulated += 1
            for option, needs in fitting.items():
                spec = pipeline.mesh.spec(option.sharding, cut)
                seconds = pipeline.steps.exact(spec, option.final)
                self.found.offer(TimedLayout(seconds, needs, spec))
        return iter(())


def _is_common(inner: LayerLayout) -> bool:
    """True for axes that many runs have."""
    narrow = inner.tp <= _COMMON and inner.cp <= _COMMON and inner.micro_batch <= 2
    return inner.sequence_parallel and narrow and inner.context_mode == "ring"
