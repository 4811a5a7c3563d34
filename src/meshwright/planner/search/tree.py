"""The tree of a search: the order in which layouts are refined, and the least seconds of each branch.

    branch         adds                                           bound by
    token group    tensor axis, tokens on a rank                  compute and tensor messages
    layer          context axis, microbatch, recompute policy     and context messages
    experts        expert ranks                                   and messages to experts
    mesh           pipeline and data ranks                        the fullest rank's blocks
    cut            stages and schedule                            the ranks that may set the pace
    schedule       stages on their ranks                          every rank, and known paths of the schedule
    fitting        shardings that fit                             and what follows the last backward

What still may be best then is simulated. Without a pipeline a mesh's shardings are timed at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import cache, partial
from typing import Any, NamedTuple

from meshwright.planner.cost import lower_bounds
from meshwright.planner.cost.breakdown import PassSeconds
from meshwright.planner.cost.layer import LayerCost
from meshwright.planner.cost.lower_bounds import Floor, StageShape, microbatch_seconds
from meshwright.planner.cost.model import CostModel
from meshwright.planner.cost.stages import (
    Contents,
    PlacedStages,
    StageCosts,
    blocks_before,
    message,
    model_contents,
    ranks_of,
    together,
)
from meshwright.planner.cost.step import ScheduleTimes, StepModel, StepTime
from meshwright.planner.layout_space import (
    NO_CUT,
    DataMesh,
    LayerLayout,
    LayoutSpace,
    Sharding,
    StageSplit,
)
from meshwright.planner.memory.generic import Generic, held_microbatches
from meshwright.planner.memory.states import gradients_meet
from meshwright.planner.search.results import SearchResult, Simplest, TimedLayout
from meshwright.planner.search.simplest import Changes, Ordering, oddities
from meshwright.schedule.in_flight import in_flight
from meshwright.spec import RunSpec
from meshwright.spec.pipeline_schedules import SCHEDULES
from meshwright.spec.sections import NoRecompute
from meshwright.spec.stages import placed

_COMMON = 8
"""Most tensor ranks, and most context ranks, of common layouts."""

Branch = tuple[float, Changes, Callable[[], Iterable["Branch"]]]
"""Seconds that a step of each of its layouts takes at least, the changes that each makes at least, and a
function that splits it further."""


class Cut(NamedTuple):
    """The stages and the schedule of a pipeline."""

    split: StageSplit
    placed: PlacedStages
    setters: list[StageShape]
    """The ranks that may set the pace."""
    groups: list[tuple[Contents, tuple[Contents, ...], list[int]]]
    """Contents of ranks with equal stages, in all and of each stage, and these ranks."""


class MeshBranch:
    """Layouts with the same ranks on all axes, and what they share."""

    def __init__(self, tree: SearchTree, inner: LayerLayout, mesh: DataMesh, blocks: LayerCost) -> None:
        self.tree, self.pp, self.blocks = tree, mesh.pp, blocks
        self._changes = partial(tree.changes, inner, mesh.ep * mesh.etp, mesh)
        self.shardings = list(tree.space.shardings(inner, mesh))
        self.most_shared = list(tree.space.shardings(inner, mesh, most_shared=True))
        """The shardings of each stage of ZeRO with the least memory."""
        self.spec = cache(partial(tree.space.spec, inner, mesh))
        """The run with a sharding and a cut of this mesh."""
        self.pipelines: dict[tuple[tuple[int, ...], bool], PipelineBranch] = {}
        """(blocks of each stage, True if a rank has two stages in a V) -> what their schedules share."""
        self._kept = cache(partial(tree.memory.kept, blocks))
        self._deferred = cache(partial(tree.memory.deferred, blocks))
        self._states: dict[tuple[Sharding, Contents, bool], float] = {}
        self._finals: dict[tuple[Sharding, Contents], float] = {}
        cuda = tree.costs.cluster.device.kind != "cpu"
        self._fragmentation = 1 + tree.costs.stack.numbers.fragmentation if cuda else 1.0

    def changes(self, cut: Cut) -> Changes:
        """The changes that its layouts with a cut make."""
        return self._changes(cut=cut.split)

    def states(self, sharding: Sharding, held: Contents, met: bool) -> float:
        """Bytes of a rank that holds such a part of the model, but for activations that its schedule holds.

        `met` is true if gradients of all its stages wait at one time.
        """
        key = sharding, held, met
        if key not in self._states:
            needs = self.tree.memory.resident(self.spec(sharding), self.blocks, held, met)
            self._states[key] = needs.device
        return self._states[key]

    def final(self, sharding: Sharding, member: tuple[Contents, ...], stages: StageCosts) -> float:
        """Seconds after the last backward of a rank with these stages."""
        key = sharding, together(member)
        if key not in self._finals:
            self._finals[key] = stages.data(self.spec(sharding), member).final
        return self._finals[key]

    def fitting(
        self, cut: Cut, spec: RunSpec, shardings: Iterable[Sharding], one: bool = False
    ) -> dict[Sharding, float]:
        """The bytes of the fullest rank at least under those of some shardings that fit.

        With `one` they are those of one microbatch, for which the schedule is not made.
        """
        held, met = self._activations(cut, spec, one), gradients_meet(spec)
        found = {}
        for sharding in shardings:
            most = 0.0
            for total, activations in held:
                most = max(most, self.states(sharding, total, met) + activations)
                if most > self.tree.capacity:
                    break
            else:
                found[sharding] = most
        return found

    def _activations(self, cut: Cut, spec: RunSpec, one: bool) -> list[tuple[Contents, float]]:
        """Contents of each group of ranks, and its most bytes of activations, of one microbatch or of all."""
        found, split = [], spec.layout.splits_backward
        flights = None if one else in_flight(spec.layout, held_microbatches(spec))
        for total, member, ranks in cut.groups:
            whole = [self._kept(held, None if one else split) for held in member]
            deferred = [self._deferred(held) if split else 0.0 for held in member]
            if flights is None:
                most = sum(whole)
            else:
                most = max(flights[rank].most(whole, deferred) for rank in ranks)
            found.append((total, self._fragmentation * most))
        return found


class PipelineBranch:
    """The stages of a mesh on their ranks, with what all their schedules and shardings share."""

    def __init__(self, mesh: MeshBranch, spec: RunSpec, placed: PlacedStages) -> None:
        tree = mesh.tree
        self.mesh, self.placed = mesh, placed
        self.steps = StepModel(spec, tree.costs, tree.times, placed, mesh.blocks)
        self._final: dict[Sharding, tuple[float, ...]] = {}

    def final(self, sharding: Sharding) -> tuple[float, ...]:
        """Seconds of each rank after its last backward."""
        if sharding not in self._final:
            stages, placed = self.steps.stages, self.placed
            known = {member: self.mesh.final(sharding, member, stages) for member in placed.members}
            self._final[sharding] = tuple(known[member] for member in placed.by_rank)
        return self._final[sharding]

    def least_seconds(self, spec: RunSpec, shardings: Iterable[Sharding]) -> float:
        """Seconds of a step at least, under the run's schedule and the best of some shardings."""
        return min(self.steps.bound(spec, self.final(sharding)) for sharding in shardings)


class SearchTree:
    """The branches of a search, with the state and the caches that they share.

    Each private method splits one kind of branch by the next choice; where none is left, the timed layouts go
    to `found`.
    """

    def __init__(
        self, space: LayoutSpace, costs: CostModel, memory: Generic, capacity: float, found: SearchResult
    ) -> None:
        self.space, self.costs, self.memory = space, costs, memory
        self.found: SearchResult | Simplest = found
        self.ordering = Ordering(costs.cluster)
        self.capacity = capacity / (1 - 1e-9)  # of sums in another order than the exact ones
        self.model = model_contents(space.base)
        self._before = blocks_before(space.base.model)
        self.times = ScheduleTimes()
        self._experts = space.experts(space.ranks)
        self._cuts: dict[int, list[Cut]] = {}

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
                changes = self.ordering.least(group[0].tp)
                yield self._step(group[0], seconds), changes, partial(self._split_tokens, group)

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
        return count * microbatch + self.costs.stack.numbers.step

    def _split_tokens(self, group: list[LayerLayout]) -> Iterator[Branch]:
        """Layouts with the same tensor axis and tokens on a rank, by all axes inside a stage."""
        floors: dict[tuple[Any, ...], Floor] = {}
        for inner in group:
            floor = floors[inner[:-1]] = floors.get(inner[:-1]) or self._floor(Floor, inner)
            seconds = microbatch_seconds(floor, self.model, inner.recompute.policy)
            changes = self.changes(inner)
            yield self._step(inner, seconds), changes, partial(self._split_layer, inner, floor, seconds)

    def _split_layer(self, inner: LayerLayout, floor: Floor, seconds: float) -> Iterator[Branch]:
        """Layouts whose microbatches take `seconds` at least, by the ranks that experts are dealt out to."""
        messages = lower_bounds.ExpertMessages(floor, self.model)
        for ep, etp in self._experts:
            bound = self._step(inner, seconds + messages.seconds(ep, etp))
            yield bound, self.changes(inner, ep * etp), partial(self._split_experts, inner, ep, etp)

    def _split_experts(self, inner: LayerLayout, ep: int, etp: int) -> Iterator[Branch]:
        """Layouts with the same expert ranks, by meshes in which a rank with an equal share fits."""
        base = self.space.base
        known: dict[tuple[bool, str, int], tuple[LayerCost, float, float]] = {}
        for mesh in self.space.meshes(inner, ep, etp):
            sharding = next(self.space.shardings(inner, mesh), None)
            if sharding is None:
                continue
            key = mesh.pp > 1, "", 0  # pipelines put gradients off that would hide messages
            if inner.cp > 1:  # blocks depend on how far apart context ranks are
                key = mesh.pp > 1, mesh.order, mesh.pp if mesh.order == "replicate-dp-pp-tp" else 0
            if key not in known:
                blocks = self.costs.blocks(self.space.spec(inner, mesh, sharding))
                quickest = min(self._least_of_block(blocks.seconds(kind)) for kind in blocks.kinds)
                known[key] = blocks, microbatch_seconds(blocks, self.model), quickest
            blocks, seconds, block = known[key]
            count = base.batch_sequences // (mesh.data * inner.micro_batch)
            most = -(-base.model.layers // mesh.pp) * block
            bound = count * max(seconds / mesh.pp, most) + self.costs.stack.numbers.step
            changes = self.changes(inner, ep * etp, mesh)
            if self.found.hopeful(bound, changes) and self._fits(inner, mesh, blocks):
                yield bound, changes, partial(self._split_mesh, inner, mesh, blocks)

    def _least_of_block(self, passes: PassSeconds) -> float:
        """Seconds of a block at least, of which frozen parameters may leave no backward."""
        return passes.total if self.model.trained is None else passes.forward.total

    def changes(
        self, inner: LayerLayout, experts: int = 1, mesh: DataMesh | None = None, cut: StageSplit = NO_CUT
    ) -> Changes:
        """The changes that each layout with such choices makes at least."""
        if mesh is None:
            return self.ordering.least(inner.tp, inner.cp, inner.recompute.policy, experts=experts)
        odd = oddities(mesh.pp, cut.schedule, cut.stages, mesh.order)
        return self.ordering.least(inner.tp, inner.cp, inner.recompute.policy, mesh.pp, experts, odd)

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
        for cut in self._cuts_of(mesh.pp):
            whole = not SCHEDULES[cut.split.schedule].splits
            bound = lower_bounds.pace_bound(cut.setters, speed, spec.microbatches, whole)
            bound += self.costs.stack.numbers.step
            changes = branch.changes(cut)
            if self.found.hopeful(bound, changes):
                yield bound, changes, partial(self._split_cut, branch, cut)

    def _cuts_of(self, pp: int) -> list[Cut]:
        """The cuts of a pipeline."""
        if pp not in self._cuts:
            found = self._cuts[pp] = []
            for split in self.space.cuts(pp):
                own = ranks_of(split, pp)
                made = placed(split.blocks, self.space.base.model.mtp_layers)
                stages = PlacedStages(self.space.base, made, own, self._before)
                groups = [(together(member), member, ranks) for member, ranks in stages.members.items()]
                found.append(Cut(split, stages, lower_bounds.pace_setters(stages), groups))
        return self._cuts[pp]

    def _time(self, mesh: MeshBranch) -> None:
        """Time each sharding of a mesh without a pipeline."""
        (cut,) = self._cuts_of(1)
        for sharding in mesh.shardings:
            spec = mesh.spec(sharding, cut.split)
            needs = self.memory.resident(spec, mesh.blocks, self.model).device
            if needs <= self.capacity:
                step = StepTime(spec, self.costs, self.times, cut.placed)
                if self.found.hopeful(step.bound, mesh.changes(cut)):
                    self.found.offer(TimedLayout(step.seconds, needs, spec))

    def _split_cut(self, mesh: MeshBranch, cut: Cut) -> Iterator[Branch]:
        """Layouts with the same stages and schedule, on their ranks, if some sharding of them fits."""
        spec = mesh.spec(mesh.shardings[0], cut.split)
        fitting = partial(mesh.fitting, cut, spec, mesh.most_shared)
        if fitting(one=True) and fitting():
            key = cut.split.blocks, SCHEDULES[cut.split.schedule].stages == 2
            if key not in mesh.pipelines:
                mesh.pipelines[key] = PipelineBranch(mesh, spec, cut.placed)
            pipeline = mesh.pipelines[key]
            bound = pipeline.steps.bound(spec, [0.0] * mesh.pp)
            yield bound, mesh.changes(cut), partial(self._split_schedule, pipeline, cut, spec)

    def _split_schedule(self, pipeline: PipelineBranch, cut: Cut, spec: RunSpec) -> Iterator[Branch]:
        """The shardings of one schedule that fit."""
        fitting = pipeline.mesh.fitting(cut, spec, pipeline.mesh.shardings)
        bound, changes = pipeline.least_seconds(spec, fitting), pipeline.mesh.changes(cut)
        yield bound, changes, partial(self._simulate, pipeline, cut, spec, fitting)

    def _simulate(
        self, pipeline: PipelineBranch, cut: Cut, spec: RunSpec, fitting: dict[Sharding, float]
    ) -> Iterator[Branch]:
        """Simulate a schedule, unless paths found since this was queued exclude it, and time shardings."""
        changes = pipeline.mesh.changes(cut)
        if self.found.hopeful(pipeline.least_seconds(spec, fitting), changes):
            self.found.counts.simulated += 1
            for sharding, needs in fitting.items():
                spec = pipeline.mesh.spec(sharding, cut.split)
                seconds = pipeline.steps.exact(spec, pipeline.final(sharding))
                self.found.offer(TimedLayout(seconds, needs, spec))
        return iter(())


def _is_common(inner: LayerLayout) -> bool:
    """True for axes that many runs have."""
    narrow = inner.tp <= _COMMON and inner.cp <= _COMMON and inner.micro_batch <= 2
    return inner.sequence_parallel and narrow and inner.context_mode == "ring"
