"""The best layouts of a run on a cluster, and no better one left out: best-first branch and bound.

Branches wait in a queue in the order of their least seconds (`planner/cost/lower_bounds.py`), and the first
is split into its choices, until it is a pipeline whose schedule is simulated, which times all its shardings
at once. When the least of the first branch is above the k-th best time that is known, no other can be among
the best k (Land & Doig 1960). Branches whose least memory is above the device's are dropped as they come up.
A first pass over the layouts that are common finds good plans early, which cut most of the second pass.
"""

from __future__ import annotations

import gc
import heapq
import time
from bisect import insort
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from operator import add
from typing import Any, NamedTuple

from meshwright.planner.cost.layer import LayerCost
from meshwright.planner.cost.lower_bounds import (
    Floor,
    Ground,
    StageShape,
    Trips,
    kinds,
    microbatch_seconds,
    pace,
    paced,
    rows,
)
from meshwright.planner.cost.model import CostModel
from meshwright.planner.cost.stages import held_by, message, rank_data, ranks_of, stage_passes
from meshwright.planner.cost.step import step_time
from meshwright.planner.layout_space import (
    NO_CUT,
    NO_SHARDING,
    WHOLE,
    DataMesh,
    LayerLayout,
    LayoutSpace,
    Sharding,
    StageSplit,
)
from meshwright.planner.memory.generic import rank_memory, stage_activations, working
from meshwright.planner.search.least_memory import fair_shares
from meshwright.planner.search.pipeline_branch import Option, PipelineBranch, ShardingCosts
from meshwright.schedule import Path
from meshwright.spec import RunSpec
from meshwright.spec.layout import TWO_STAGES
from meshwright.spec.sections import NoRecompute
from meshwright.spec.stages import placed

_ROUNDING = 1 - 1e-9
"""Bounds, times and bytes are sums in another order."""


class TimedLayout(NamedTuple):
    """A layout that fits, timed; in the order in which plans are given."""

    seconds: float
    memory: float
    """Bytes of the device on its fullest rank."""
    name: tuple[Any, ...]
    """Of equal plans, the one that comes first."""
    spec: RunSpec


@dataclass
class SearchCounts:
    """What a search did."""

    branches: int = 0
    simulated: int = 0
    timed: int = 0
    """Layouts whose time and memory are known exactly."""
    seconds: float = 0.0
    first_seconds: float | None = None
    """Until the first plan was known."""


@dataclass
class SearchResult:
    """The best plans, best first, and what finding them took."""

    best: list[TimedLayout]
    counts: SearchCounts
    seen: list[TimedLayout] = field(default_factory=list)
    """Of everything timed, what nothing else timed is better than in time and in memory, fastest first."""


Progress = Callable[[TimedLayout, SearchCounts], None]


def search(
    space: LayoutSpace,
    on: CostModel,
    capacity: float,
    top: int = 5,
    progress: Progress | None = None,
    any_will_do: bool = False,
    accept: Callable[[RunSpec], bool] | None = None,
) -> SearchResult:
    """The `top` fastest layouts of `space` that need at most `capacity` bytes of a device.

    `accept` has the last word on those that are fast enough: a closer look at their memory.
    `progress` is called with each plan that is better than all before. Where `any_will_do`, the first one
    that is found is the answer.
    """
    run = _Search(space, on, capacity, 1 if any_will_do else top, progress, any_will_do, accept)
    collects = gc.isenabled()
    gc.disable()  # many small objects are made, and few that refer to each other
    try:
        return run.result()
    finally:
        if collects:
            gc.enable()


class _Search:
    def __init__(
        self,
        space: LayoutSpace,
        on: CostModel,
        capacity: float,
        top: int,
        progress: Progress | None,
        any_will_do: bool,
        accept: Callable[[RunSpec], bool] | None,
    ) -> None:
        self.accept = accept
        self.space, self.on, self.capacity, self.top = space, on, capacity / _ROUNDING, top
        self.progress, self.cutoff = progress, float("inf")
        self.any_will_do = any_will_do
        self.counts, self.start = SearchCounts(), time.perf_counter()
        self.best: list[TimedLayout] = []
        self.front: list[TimedLayout] = []
        self.queue: list[tuple[float, int, Callable[[], None]]] = []
        self._row_cache: dict[int, list[tuple[StageSplit, list[StageShape]]]] = {}
        self.paths: dict[tuple[str, int, int, int], list[Path]] = {}
        self.kinds = kinds(space.base.model)
        self.dealt = space.experts(space.ranks)
        # Bounds are of ranks that all compute; where they share cores, one that is left alone is faster.
        self.quickest = _ROUNDING / (on.shared.speed(1) if on.shared is not None else 1.0)

    def result(self) -> SearchResult:
        for common in (True, False):
            self.queue.clear()
            for alike in self._alike(common):
                self._ground(alike)
            while self.queue:
                bound, _, split = heapq.heappop(self.queue)
                if not self._hopeful(bound) or (self.best and self.any_will_do):
                    break
                split()
            if self.best and self.any_will_do:
                break
        self.counts.seconds = time.perf_counter() - self.start
        return SearchResult(self.best, self.counts, sorted(self.front, key=lambda each: each[:3]))

    def _hopeful(self, bound: float) -> bool:
        return bound * self.quickest <= self.cutoff

    def _push(self, bound: float, split: Callable[[], None]) -> None:
        if self._hopeful(bound):
            self.counts.branches += 1
            heapq.heappush(self.queue, (bound, self.counts.branches, split))

    def _offer(self, found: TimedLayout) -> None:
        self.counts.timed += 1
        if found.seconds > self.cutoff or (self.accept is not None and not self.accept(found.spec)):
            if self.accept is None:
                self._compare(found)
            return
        self._compare(found)
        if self.counts.first_seconds is None:
            self.counts.first_seconds = time.perf_counter() - self.start
        insort(self.best, found, key=lambda each: each[:3])
        del self.best[self.top :]
        if len(self.best) == self.top:
            self.cutoff = min(self.cutoff, self.best[-1].seconds)
        if self.progress is not None and self.best[0] is found:
            self.progress(found, self.counts)

    def _compare(self, found: TimedLayout) -> None:
        """Keep what nothing else that was timed is better than both in time and in memory."""
        if all(each.seconds > found.seconds or each.memory > found.memory for each in self.front):
            self.front = [
                each for each in self.front if each.seconds < found.seconds or each.memory < found.memory
            ]
            self.front.append(found)

    # The levels.

    def _alike(self, common: bool) -> Iterable[list[LayerLayout]]:
        """What is inside a stage, together where ranks have as many tokens and the same tensor axis."""
        found: dict[tuple[Any, ...], list[LayerLayout]] = {}
        for inner in self.space.inner():
            if is_common(inner) == common:
                tokens = inner.micro_batch * self.space.base.data.seq_len // inner.cp
                # Attention that was measured differs from ring to ring.
                key = inner[:-1] if self.on.cluster.measured else (inner.tp, inner.sequence_parallel, tokens)
                found.setdefault(key, []).append(inner)
        return found.values()

    def _ground(self, alike: Sequence[LayerLayout]) -> None:
        """Queue what has as many tokens on a rank: what it takes without messages between context ranks."""
        if len(alike) == 1:
            self._inners(alike)
            return
        each = microbatch_seconds(self._least(Ground, alike[0]), self.kinds)
        bound = self._count(alike[0]) * each + self.on.stack.step
        if self._hopeful(bound):
            self._push(bound, lambda: self._inners(alike))

    def _inners(self, alike: Sequence[LayerLayout]) -> None:
        """Queue each of these axes inside a stage, for each way to deal out experts."""
        known: dict[tuple[Any, ...], Floor] = {}
        for inner in alike:
            if inner[:-1] not in known:
                known[inner[:-1]] = self._least(Floor, inner)
            self._inner(inner, known[inner[:-1]])

    def _inner(self, inner: LayerLayout, floor: Floor) -> None:
        each, count = microbatch_seconds(floor, self.kinds, inner.recompute.policy), self._count(inner)
        bound = count * each + self.on.stack.step
        if self._hopeful(bound):
            self._push(bound, lambda: self._experts(inner, floor, each, count))

    def _least(self, kind: type[Floor], inner: LayerLayout) -> Floor:
        """What blocks cost at least on such ranks, where nothing is computed again."""
        plain = inner._replace(recompute=NoRecompute())
        spec, on = self.space.spec(plain, DataMesh(1, 1, 1, 1), NO_CUT, NO_SHARDING), self.on
        dense = on.dense(spec.model)
        return kind(spec, on.format or spec.precision.compute, on.stack, on.kernels, on.links, dense)

    def _count(self, inner: LayerLayout) -> float:
        """Microbatches of a step through a whole model on the ranks of one stage."""
        ranks = self.space.ranks * inner.micro_batch
        return self.space.base.batch_sequences * inner.tp * inner.cp / ranks

    def _experts(self, inner: LayerLayout, floor: Floor, each: float, count: float) -> None:
        """Queue the ways to deal out experts: microbatches of `each` seconds, and their trips."""
        trips = Trips(floor, self.kinds)
        for ep, etp in self.dealt:
            bound = count * (each + trips.seconds(ep * etp, etp)) + self.on.stack.step
            if self._hopeful(bound):
                self._push(bound, self._then_meshes(inner, ep, etp))

    def _then_meshes(self, inner: LayerLayout, ep: int, etp: int) -> Callable[[], None]:
        return lambda: self._meshes(inner, ep, etp)

    def _meshes(self, inner: LayerLayout, ep: int, etp: int) -> None:
        base, known = self.space.base, dict[tuple[str, int], tuple[LayerCost, float, float]]()
        for mesh in self.space.meshes(inner, ep, etp):
            sharding = next(self.space.shardings(inner, mesh), None)
            if sharding is None:
                continue
            # How far apart context ranks are.
            key = (
                (mesh.order, mesh.pp if mesh.order == "replicate-dp-pp-tp" else 0)
                if inner.cp > 1
                else ("", 0)
            )
            if key not in known:
                blocks = self.on.blocks(self.space.spec(inner, mesh, NO_CUT, sharding))
                block = min(blocks.passes(kind).total for _, kind in self.kinds)
                known[key] = blocks, microbatch_seconds(blocks, self.kinds), block
            blocks, each, block = known[key]
            count = base.batch_sequences // (mesh.data * inner.micro_batch)
            most = -(-base.model.layers // mesh.pp) * block
            bound = count * max(each / mesh.pp, most) + self.on.stack.step
            if self._hopeful(bound) and self._fits(inner, mesh, blocks):
                self._push(bound, self._next(inner, mesh, blocks))

    def _fits(self, inner: LayerLayout, mesh: DataMesh, blocks: LayerCost) -> bool:
        needs = fair_shares(self.space, self.on, self.kinds, inner, mesh, blocks, self.capacity)
        return any(each.device <= self.capacity for each in needs)

    def _next(self, inner: LayerLayout, mesh: DataMesh, blocks: LayerCost) -> Callable[[], None]:
        if mesh.pp == 1:
            return lambda: self._alone(inner, mesh, blocks)
        return lambda: self._cuts(inner, mesh, blocks)

    def _alone(self, inner: LayerLayout, mesh: DataMesh, blocks: LayerCost) -> None:
        """Time every sharding of a mesh without a pipeline."""
        cut = self.space.cuts(1)[0]
        stages = placed(cut.blocks)
        held = held_by(blocks, stages)
        kept = stage_activations(blocks, stages[0]) + working(
            blocks, True, any(routed for _, routed in self.kinds)
        )
        work = [stage_passes(blocks, stages[0])]
        for sharding in self.space.shardings(inner, mesh):
            spec = self.space.spec(inner, mesh, cut, sharding)
            needs = rank_memory(spec, blocks, self.on, held, kept, True, 0).device
            if needs > self.capacity:
                continue
            data = rank_data(spec, self.on, held, work)
            each = work[0].total + data.each_microbatch
            if self._hopeful(spec.microbatches * each + data.final + self.on.stack.step):
                seconds = step_time(spec, self.on).seconds
                self._offer(TimedLayout(seconds, needs, _name(spec), spec))

    def _cuts(self, inner: LayerLayout, mesh: DataMesh, blocks: LayerCost) -> None:
        """Queue the cuts and schedules of a mesh."""
        sharding = next(self.space.shardings(inner, mesh))
        spec = self.space.spec(inner, mesh, NO_CUT, sharding)
        each, link = message(spec, self.on, blocks)
        at = pace(blocks, self.kinds, 0.0 if link is None else each)
        pipes: dict[tuple[tuple[int, ...], bool], PipelineBranch] = {}
        shares: dict[Sharding, ShardingCosts] = {}
        for cut, its in self._rows(mesh.pp):
            bound = paced(its, at, spec.microbatches, cut.schedule in WHOLE) + self.on.stack.step
            if self._hopeful(bound):
                self._push(bound, self._split(inner, mesh, blocks, cut, pipes, shares))

    def _rows(self, pp: int) -> list[tuple[StageSplit, list[StageShape]]]:
        if pp not in self._row_cache:
            before = self.space.routed_before
            self._row_cache[pp] = [
                (cut, rows(cut.blocks, before, ranks_of(cut, pp))) for cut in self.space.cuts(pp)
            ]
        return self._row_cache[pp]

    def _split(
        self,
        inner: LayerLayout,
        mesh: DataMesh,
        blocks: LayerCost,
        cut: StageSplit,
        pipes: dict[tuple[tuple[int, ...], bool], PipelineBranch],
        shares: dict[Sharding, ShardingCosts],
    ) -> Callable[[], None]:
        def split() -> None:
            key = (cut.blocks, cut.schedule in TWO_STAGES)
            if key not in pipes:
                pipes[key] = PipelineBranch(self.space, self.on, blocks, inner, mesh, cut, self.paths, shares)
            pipe = pipes[key]
            spec = self.space.spec(inner, mesh, cut, next(self.space.shardings(inner, mesh)))
            bound = pipe.step(spec, pipe.least_seconds(spec), [0.0] * len(pipe.members))
            self._push(bound, lambda: self._shardings(pipe, cut, spec))

        return split

    def _shardings(self, pipe: PipelineBranch, cut: StageSplit, spec: RunSpec) -> None:
        """Queue a schedule with what its shardings take after the last backward."""
        options = pipe.options(self.capacity)
        if options:
            self._push(_least(pipe, spec, options), lambda: self._held(pipe, cut, spec, options))

    def _held(self, pipe: PipelineBranch, cut: StageSplit, spec: RunSpec, options: Sequence[Option]) -> None:
        """Queue a schedule with the shardings that fit beside the activations that its lists hold."""
        held = pipe.activations(spec)
        fit = [
            (option, needs)
            for option in options
            if (needs := max(map(add, option.states, held))) <= self.capacity
        ]
        if fit:
            least = _least(pipe, spec, [option for option, _ in fit])
            self._push(least, lambda: self._simulate(pipe, cut, spec, fit))

    def _simulate(
        self, pipe: PipelineBranch, cut: StageSplit, spec: RunSpec, fit: list[tuple[Option, float]]
    ) -> None:
        if not self._hopeful(
            _least(pipe, spec, [option for option, _ in fit])
        ):  # by paths that were found since it was queued
            return
        self.counts.simulated += 1
        done = pipe.seconds(spec)
        for option, needs in fit:
            own = self.space.spec(pipe.inner, pipe.mesh, cut, option.sharding)
            alone = self.on.shared is None
            seconds = pipe.step(spec, done, option.final) if alone else step_time(own, self.on).seconds
            self._offer(TimedLayout(seconds, needs, _name(own), own))


def _least(pipe: PipelineBranch, spec: RunSpec, options: Sequence[Option]) -> float:
    """Seconds of the best of the shardings at least."""
    done = pipe.least_seconds(spec)
    return min(pipe.step(spec, done, option.final) for option in options)


_COMMON = 8
"""Tensor and context ranks of common layouts."""


def is_common(inner: LayerLayout) -> bool:
    """Whether many runs have such axes."""
    return (
        inner.sequence_parallel
        and inner.tp <= _COMMON
        and inner.cp <= _COMMON
        and inner.micro_batch <= 2
        and inner.context_mode == "ring"
    )


def _name(spec: RunSpec) -> tuple[Any, ...]:
    """A layout's values, and the policy of recomputation; any two of a space differ."""
    return (*(str(value) for value in vars(spec.layout).values()), spec.recompute.policy)
