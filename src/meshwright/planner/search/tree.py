"""The tree of a search: the order in which layouts are refined, and the least seconds of each branch.

    branch         adds                                           bound by
    token group    tensor axis, tokens on a rank                  compute and tensor messages
    layer          context axis, microbatch, recompute policy     and context messages
    pipeline       pipeline and data ranks                        and how a pipeline fills, at its quickest
    experts        expert ranks                                   and experts with messages, and the data axis
    mesh           the order of the axes                          the blocks of its ranks
    cut            stages and schedule                            the ranks that may set the pace
    schedule       stages on their ranks                          every rank, and known paths of the schedule
    fitting        shardings that fit                             and what follows the last backward

What still may be best then is simulated. Without a pipeline a mesh's shardings are timed at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import cache, cached_property, partial
from itertools import chain
from math import prod
from typing import Any

from meshwright.planner.cost import lower_bounds
from meshwright.planner.cost.layer import LayerCost
from meshwright.planner.cost.lower_bounds import Floor, microbatch_seconds, pace_bound
from meshwright.planner.cost.model import CostModel
from meshwright.planner.cost.stages import Contents, PlacedStages, StageCosts, message
from meshwright.planner.cost.step import ScheduleTimes, StepModel, StepTime
from meshwright.planner.layout_levels import NO_CUT, DataMesh, LayerLayout, Sharding
from meshwright.planner.layout_space import LayoutSpace
from meshwright.planner.memory.generic import Generic, held_microbatches
from meshwright.planner.memory.states import gradients_meet
from meshwright.planner.search.branch_bounds import BranchBounds, Cut, LayerBounds, PipelineBounds
from meshwright.planner.search.results import SearchResult, Simplest, TimedLayout
from meshwright.planner.search.simplest import Changes, Ordering, oddities
from meshwright.schedule.in_flight import most_in_flight
from meshwright.spec import RunSpec
from meshwright.spec.pipeline_schedules import SCHEDULES

_COMMON = 8
"""Most tensor ranks, and most context ranks, of common layouts."""

Branch = tuple[float, Changes, Callable[[], Iterable["Branch"]]]
"""Seconds that a step of each of its layouts takes at least, the changes that each makes at least, and a
function that splits it further."""


def stages_key(cut: Cut) -> tuple[tuple[int, ...], bool]:
    """(blocks of each stage, True if a rank has two stages in a V), which tell cuts of a mesh apart but for
    their schedules."""
    return cut.split.blocks, SCHEDULES[cut.split.schedule].stages == 2


class MeshBranch:
    """Layouts with the same ranks on all axes, and what they share."""

    def __init__(
        self, tree: SearchTree, inner: LayerLayout, mesh: DataMesh, blocks: LayerCost, once: float = 0.0
    ) -> None:
        self.tree, self.pp, self.blocks, self.once = tree, mesh.pp, blocks, once
        self._order = mesh.order
        self._changes = cache(partial(tree.changes_of, inner, mesh.pp, mesh.ep * mesh.etp))
        self.shardings = list(tree.space.shardings(inner, mesh))
        self.most_shared = list(tree.space.shardings(inner, mesh, most_shared=True))
        """The shardings of each stage of ZeRO with the least memory."""
        self.spec = cache(partial(tree.space.spec, inner, mesh))
        """The run with a sharding and a cut of this mesh."""
        self.pipelines: dict[tuple[tuple[int, ...], bool], PipelineBranch] = {}
        """`stages_key` -> what schedules share."""
        self._kept = cache(partial(tree.memory.kept, blocks))
        self._deferred = cache(partial(tree.memory.deferred, blocks))
        self._states: dict[tuple[Sharding, Contents, bool], float] = {}
        self._finals: dict[tuple[Sharding, tuple[Contents, ...]], float] = {}
        self._fit_one: dict[tuple[Any, ...], bool] = {}
        self._microbatches = self.spec(self.shardings[0]).microbatches
        self._reserved = 1 + tree.memory.fragmentation

    def changes(self, cut: Cut) -> Changes:
        """The changes that its layouts with a cut make."""
        return self._changes(oddities(self.pp, cut.split.schedule, cut.split.stages, self._order))

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
        key = sharding, member
        if key not in self._finals:
            self._finals[key] = stages.data(self.spec(sharding), member).final
        return self._finals[key]

    def fits_one(self, cut: Cut) -> bool:
        """True if one microbatch fits under some sharding; no schedule is made for it."""
        key = *stages_key(cut), self._meet(cut)
        if key not in self._fit_one:
            held = ((total, [self._kept(each, None) for each in member]) for total, member, _ in cut.groups)
            sizes = ((total, self._reserved * sum(kept)) for total, kept in held)
            self._fit_one[key] = self._fit(sizes, self._meet(cut))
        return self._fit_one[key]

    def fits(self, cut: Cut) -> bool:
        """True if all microbatches that its schedule holds fit under some sharding."""
        return self._fit(self._activations(cut), self._meet(cut))

    def _fit(self, held: Iterator[tuple[Contents, float]], met: bool) -> bool:
        """`fits`, for contents of each group of ranks with bytes of their activations."""
        known: list[tuple[Contents, float]] = []

        def following() -> Iterator[tuple[Contents, float]]:
            for each in held:
                known.append(each)
                yield each

        most = self.tree.capacity
        return any(
            all(self.states(each, total, met) + size <= most for total, size in chain([*known], following()))
            for each in self.most_shared
        )

    def fitting(self, cut: Cut, shardings: Iterable[Sharding]) -> dict[Sharding, float]:
        """The bytes of the fullest rank at least under those of some shardings that fit."""
        held, met = list(self._activations(cut)), self._meet(cut)
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

    def _activations(self, cut: Cut) -> Iterator[tuple[Contents, float]]:
        """Contents of each group of ranks, and the most bytes of activations that its schedule holds."""
        spec = self.spec(self.shardings[0], cut.split)
        split, count = spec.layout.splits_backward, held_microbatches(spec)
        for total, member, ranks in cut.groups:
            whole = [self._kept(held, split) for held in member]
            deferred = [self._deferred(held) if split else 0.0 for held in member]
            flight = most_in_flight(spec.layout, count, ranks)
            yield total, self._reserved * flight.most(whole, deferred)

    def _meet(self, cut: Cut) -> bool:
        return gradients_meet(cut.split.schedule, self.pp, cut.split.chunks, self._microbatches)


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
        self.capacity = with_rounding(capacity)
        self.bounds = BranchBounds(space, costs)
        self.model = self.bounds.model
        self.times = ScheduleTimes()

    def roots(self, common: bool) -> Iterator[Branch]:
        """The branches that a pass begins with: those of common layouts, or the others."""
        for group in self._groups[common]:
            if len(group) == 1:
                yield from self._split_tokens(group)
            else:
                seconds = microbatch_seconds(
                    self.bounds.floor(lower_bounds.SharedFloor, group[0]), self.model
                )
                changes = self.ordering.least(group[0].tp)
                yield self._step(group[0], seconds), changes, partial(self._split_tokens, group)

    @cached_property
    def _groups(self) -> dict[bool, list[list[LayerLayout]]]:
        """Layouts with the same tensor axis and tokens on a rank: True -> common ones, False -> others."""
        found: dict[bool, dict[tuple[Any, ...], list[LayerLayout]]] = {True: {}, False: {}}
        measured = self.costs.cluster.measured  # attention that was measured differs from ring to ring
        for inner in self.space.inner():
            tokens = inner.micro_batch * self.space.base.data.seq_len // inner.cp
            key = inner[:-1] if measured else (inner.tp, inner.sequence_parallel, tokens)
            found[_is_common(inner)].setdefault(key, []).append(inner)
        return {common: list(groups.values()) for common, groups in found.items()}

    def _step(self, inner: LayerLayout, microbatch: float) -> float:
        """Seconds of a step whose microbatches through a whole model take so long on one stage's ranks."""
        ranks = self.space.ranks * inner.micro_batch
        count = self.space.base.batch_sequences * inner.tp * inner.cp / ranks
        return count * microbatch + self.costs.stack.numbers.step

    def _split_tokens(self, group: list[LayerLayout]) -> Iterator[Branch]:
        """Layouts with the same tensor axis and tokens on a rank, by all axes inside a stage."""
        for inner in group:
            floor = self.bounds.floor(Floor, inner)
            seconds = microbatch_seconds(floor, self.model, inner.recompute.policy)
            changes = self.changes_of(inner)
            yield self._step(inner, seconds), changes, partial(self._split_layer, inner, floor, seconds)

    def _split_layer(self, inner: LayerLayout, floor: Floor, seconds: float) -> Iterator[Branch]:
        """Layouts whose microbatches take `seconds` at least, by the ranks of a pipeline and of its data."""
        folded = self.bounds.folded(floor)
        least = min(folded.values(), default=0.0)
        layer = self.bounds.layer(floor, seconds, inner.recompute.policy)
        for pp, data in self.space.pipelines(inner):
            changes = self.changes_of(inner, pp)
            if not self.found.hopeful(self.bounds.evenly(inner, pp, data, layer).step(least), changes):
                continue
            pipeline = self.bounds.pipeline(inner, pp, data, layer)
            bound = pipeline.step(least)
            if self.found.hopeful(bound, changes):
                yield bound, changes, partial(self._split_pipeline, inner, pipeline, layer, folded)

    def _split_pipeline(
        self,
        inner: LayerLayout,
        pipeline: PipelineBounds,
        layer: LayerBounds,
        folded: dict[tuple[int, int], float],
    ) -> Iterator[Branch]:
        """Layouts with the same pipeline, by the ranks that experts are dealt out to, by whose seconds in a
        microbatch `folded` are."""
        pp, data = ranks = pipeline[:2]
        for (ep, etp), more in folded.items():
            if data * inner.cp * inner.tp % (ep * etp) == 0:
                changes = self.changes_of(inner, pp, ep * etp)
                if not self.found.hopeful(pipeline.step(more), changes):
                    continue
                axes = self.bounds.data.of_pipeline(inner, ep, etp, ranks)
                once = self.bounds.beside(axes, layer, pipeline.microbatches, more)
                bound = pipeline.step(more, once)
                if self.found.hopeful(bound, changes):
                    floor = pipeline, layer, more
                    yield bound, changes, partial(self._split_experts, inner, (ep, etp), floor)

    def _split_experts(
        self, inner: LayerLayout, experts: tuple[int, int], floor: tuple[PipelineBounds, LayerBounds, float]
    ) -> Iterator[Branch]:
        """Layouts with the same ranks but for their order, by orders in which a rank's equal share fits.

        `floor` are bounds on them without their blocks, and seconds that experts add to a microbatch.
        """
        quick, least, more = floor
        count = quick.microbatches
        for mesh in self.space.meshes(inner, *experts, quick[:2]):
            odd = oddities(mesh.pp, NO_CUT.schedule, NO_CUT.stages, mesh.order)
            changes = self.changes_of(inner, mesh.pp, prod(experts), odd)
            axes = self.bounds.data.of_mesh(inner, mesh)
            if not self.found.hopeful(
                quick.step(more, self.bounds.beside(axes, least, count, more)), changes
            ):
                continue
            sharding = next(self.space.shardings(inner, mesh), None)
            if sharding is None:
                continue
            blocks, layer = self.bounds.blocks(inner, mesh, sharding)
            pipeline = self.bounds.pipeline(inner, mesh.pp, mesh.data, layer)
            once = self.bounds.beside(axes, layer, count)
            bound = pipeline.step(once=once)
            if self.found.hopeful(bound, changes) and self._fits(inner, mesh, blocks):
                yield bound, changes, partial(self._split_mesh, inner, mesh, blocks, once)

    def changes_of(self, inner: LayerLayout, pp: int = 1, experts: int = 1, odd: int = 0) -> Changes:
        """The changes that each layout with such choices makes at least."""
        return self.ordering.least(inner.tp, inner.cp, inner.recompute.policy, pp, experts, odd)

    def _fits(self, inner: LayerLayout, mesh: DataMesh, blocks: LayerCost) -> bool:
        """True if a rank with an equal share of the model fits under some sharding of a mesh."""
        if self.memory.kept(blocks, self.model) / mesh.pp > self.capacity:  # activations alone
            return False
        most_shared = self.space.shardings(inner, mesh, most_shared=True)
        specs = (self.space.spec(inner, mesh, sharding) for sharding in most_shared)
        return any(self.memory.lower_bound(s, blocks, self.model).device <= self.capacity for s in specs)

    def _split_mesh(
        self, inner: LayerLayout, mesh: DataMesh, blocks: LayerCost, once: float
    ) -> Iterator[Branch]:
        """Layouts with the same ranks on all axes, by cut and schedule, or timed without a pipeline."""
        branch = MeshBranch(self, inner, mesh, blocks, once)
        if mesh.pp == 1:
            self._time(branch)
            return
        spec = branch.spec(branch.shardings[0])
        each, link = message(spec, self.costs, blocks)
        speed = lower_bounds.pace(blocks, self.model, 0.0 if link is None else each)
        bounds: dict[int, float] = {}  # of each shape
        for cut in self.bounds.cuts(mesh.pp):
            if not self.space.takes(cut.split, mesh.pp, spec.microbatches):
                continue
            if (shape := id(cut.shape)) not in bounds:
                pace = pace_bound(cut.shape, speed, spec.microbatches, once / mesh.pp)
                bounds[shape] = pace + self.costs.stack.numbers.step
            bound = bounds[shape]
            changes = branch.changes(cut)
            if self.found.hopeful(bound, changes):
                yield bound, changes, partial(self._split_cut, branch, cut)

    def _time(self, mesh: MeshBranch) -> None:
        """Time each sharding of a mesh without a pipeline."""
        (cut,) = self.bounds.cuts(1)
        for sharding in mesh.shardings:
            spec = mesh.spec(sharding, cut.split)
            needs = self.memory.resident(spec, mesh.blocks, self.model).device
            if needs <= self.capacity:
                step = StepTime(spec, self.costs, self.times, cut.placed)
                if self.found.hopeful(step.bound, mesh.changes(cut)):
                    self.found.offer(TimedLayout(step.seconds, needs, spec))

    def _split_cut(self, mesh: MeshBranch, cut: Cut) -> Iterator[Branch]:
        """Layouts with the same stages and schedule, on their ranks, if some sharding of them fits."""
        if mesh.fits_one(cut) and mesh.fits(cut):
            spec, key = mesh.spec(mesh.shardings[0], cut.split), stages_key(cut)
            if key not in mesh.pipelines:
                mesh.pipelines[key] = PipelineBranch(mesh, spec, cut.placed)
            pipeline = mesh.pipelines[key]
            bound = pipeline.steps.bound(spec, [0.0] * mesh.pp, mesh.once / mesh.pp)
            yield bound, mesh.changes(cut), partial(self._split_schedule, pipeline, cut, spec)

    def _split_schedule(self, pipeline: PipelineBranch, cut: Cut, spec: RunSpec) -> Iterator[Branch]:
        """The shardings of one schedule that fit."""
        fitting = pipeline.mesh.fitting(cut, pipeline.mesh.shardings)
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


def with_rounding(capacity: float) -> float:
    """Bytes that sums in another order than the exact ones may have, where those have at most `capacity`."""
    return capacity / (1 - 1e-9)


def _is_common(inner: LayerLayout) -> bool:
    """True for axes that many runs have."""
    narrow = inner.tp <= _COMMON and inner.cp <= _COMMON and inner.micro_batch <= 2
    return inner.sequence_parallel and narrow and inner.context_mode == "ring"
