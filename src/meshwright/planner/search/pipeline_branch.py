"""A pipeline whose stages are placed: what all of its schedules and shardings share, each computed once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from operator import mul
from typing import NamedTuple

from meshwright.planner.cost.breakdown import PassSeconds
from meshwright.planner.cost.layer import LayerCost
from meshwright.planner.cost.lower_bounds import ScheduleShape, rank_ends, schedule, shape
from meshwright.planner.cost.model import CostModel
from meshwright.planner.cost.stages import (
    Totals,
    held,
    message,
    rank_data,
    ranks_of,
    stage_cost,
    stage_passes,
)
from meshwright.planner.cost.step import simulated
from meshwright.planner.layout_space import DataMesh, LayerLayout, LayoutSpace, Sharding, StageSplit
from meshwright.planner.memory.generic import held_microbatches, rank_memory, stage_activations, working
from meshwright.schedule import Link, Path, StageCost, ends
from meshwright.spec import RunSpec
from meshwright.spec.layout import SPLIT
from meshwright.spec.stages import Stage, placed


class Member(NamedTuple):
    """Ranks with equal stages: `ranks` of them."""

    stages: tuple[Stage, ...]
    ranks: tuple[int, ...]


class Option(NamedTuple):
    """A sharding: bytes of each member without its activations, and its seconds after the last backward."""

    sharding: Sharding
    states: tuple[float, ...]
    final: tuple[float, ...]


class ShardingCosts(NamedTuple):
    """What is known of ranks of a mesh under one sharding, by what they have."""

    spec: RunSpec
    """A run so sharded."""
    states: dict[Totals, float]
    """Bytes without activations that are kept."""
    final: dict[Totals, float]
    """Seconds after the last backward."""


class PipelineBranch:
    """The stages of a mesh on their ranks; `paths` and `shares` are what is known of others of its kind."""

    def __init__(
        self,
        space: LayoutSpace,
        on: CostModel,
        blocks: LayerCost,
        inner: LayerLayout,
        mesh: DataMesh,
        cut: StageSplit,
        paths: dict[tuple[str, int, int, int], list[Path]],
        shares: dict[Sharding, ShardingCosts],
    ) -> None:
        self.paths, self.shares = paths, shares
        self.space, self.on, self.blocks, self.inner, self.mesh = space, on, blocks, inner, mesh
        self.stages = placed(cut.blocks)
        self.own = ranks_of(cut, mesh.pp)
        self._cut = cut
        self._options: list[Option] | None = None
        self._ends: dict[tuple[str, int, int], list[float]] = {}
        each, link = message(space.spec(inner, mesh, cut, next(space.shardings(inner, mesh))), on, blocks)
        self.link = link or Link()
        self.hop = each if link is not None else 0.0
        known: dict[tuple[int, ...], tuple[PassSeconds, StageCost]] = {}
        self.passes, self.costs = [], []
        last = len(self.stages) - 1
        self._kinds = [self._kind(stage) for stage in self.stages]
        for index, stage in enumerate(self.stages):
            key = (*self._kinds[index], index > 0, index < last)
            if key not in known:
                work = stage_passes(blocks, stage)
                cost = stage_cost(work, 0.0, each, (index > 0, index < last), link is None, blocks)
                known[key] = work, cost
            self.passes.append(known[key][0])
            self.costs.append(known[key][1])
        self.period = max(
            sum(self.costs[i].forward + self.costs[i].input + self.costs[i].weight for i in mine)
            for mine in self.own
        )

    def _kind(self, stage: Stage) -> Totals:
        """What a stage holds; stages that hold the same cost the same."""
        before = self.space.routed_before
        routed = before[stage.last] - before[stage.first]
        return len(stage.blocks) - routed, routed, stage.embed, stage.head

    @cached_property
    def members(self) -> list[Member]:
        """The ranks by what they hold."""
        found: dict[tuple[tuple[int, ...], ...], list[int]] = {}
        for rank, mine in enumerate(self.own):
            found.setdefault(tuple(self._kinds[i] for i in mine), []).append(rank)
        return [
            Member(tuple(self.stages[i] for i in self.own[ranks[0]]), tuple(ranks))
            for ranks in found.values()
        ]

    @cached_property
    def kept(self) -> list[float]:
        """Bytes that each stage keeps of a microbatch."""
        return self._kept(split=False)

    @cached_property
    def kept_split(self) -> list[float]:
        """The same under a schedule that puts gradients of weights off."""
        return self._kept(split=True)

    def _kept(self, split: bool) -> list[float]:
        known: dict[tuple[int, ...], float] = {}
        found = []
        for stage, key in zip(self.stages, self._kinds, strict=True):
            if key not in known:
                known[key] = stage_activations(self.blocks, stage, split)
            found.append(known[key])
        return found

    def options(self, capacity: float) -> list[Option]:
        """The shardings whose states leave room for one microbatch at least."""
        if self._options is None:
            self._options = list(self._sharded(capacity))
        return self._options

    def _sharded(self, capacity: float) -> Iterator[Option]:
        least = [
            self._grown(sum(self.kept[stage.index] for stage in member.stages)) for member in self.members
        ]
        totals = [self._total(member) for member in self.members]
        for sharding in self.space.shardings(self.inner, self.mesh):
            shares = self.shares.get(sharding)
            if shares is None:
                spec = self.space.spec(self.inner, self.mesh, self._cut, sharding)
                shares = self.shares[sharding] = ShardingCosts(spec, {}, {})
            for total, flight in zip(totals, least, strict=True):
                if total not in shares.states:
                    shares.states[total] = self._states(shares.spec, total)
                if shares.states[total] + flight > capacity:
                    break
            else:
                for member, total in zip(self.members, totals, strict=True):
                    if total not in shares.final:
                        shares.final[total] = self._final(shares.spec, member, total)
                states, final = (tuple(its[total] for total in totals) for its in shares[1:])
                yield Option(sharding, states, final)

    def _total(self, member: Member) -> Totals:
        kinds = [self._kinds[stage.index] for stage in member.stages]
        dense, routed, embed, head = map(sum, zip(*kinds, strict=True))
        return dense, routed, embed > 0, head > 0

    def _states(self, spec: RunSpec, total: Totals) -> float:
        passing = working(self.blocks, total[0] + total[1] > 0, total[1] > 0)
        return rank_memory(spec, self.blocks, self.on, held(self.blocks, *total), passing, total[3], 0).device

    def _final(self, spec: RunSpec, member: Member, total: Totals) -> float:
        work = [self.passes[stage.index] for stage in member.stages]
        return rank_data(spec, self.on, held(self.blocks, *total), work).final

    def _grown(self, flight: float) -> float:
        """What activations take on the device, with what the allocator adds."""
        cuda = self.on.cluster.device.kind != "cpu"
        return flight * (1 + self.on.stack.fragmentation) if cuda else flight

    def activations(self, spec: RunSpec) -> list[float]:
        """Bytes that activations take at most on each member's ranks, under the schedule of `spec`."""
        layout = spec.layout
        its = shape(layout.schedule, layout.pp, layout.chunks, held_microbatches(spec))
        by_stage = self.kept_split if layout.schedule in SPLIT else self.kept
        return [
            self._grown(max(self._most(its, rank, by_stage) for rank in member.ranks))
            for member in self.members
        ]

    def _most(self, its: ScheduleShape, rank: int, by_stage: Sequence[float]) -> float:
        kept = [by_stage[stage] for stage in self.own[rank]]
        if min(kept) == max(kept):
            return its.most[rank] * kept[0]
        return max(sum(map(mul, each, kept)) for each in its.held[rank])

    def least_seconds(self, spec: RunSpec) -> list[float]:
        """Rank -> when it is done at the earliest."""
        layout, count = spec.layout, simulated(spec)
        paths = self.paths.get((layout.schedule, layout.pp, layout.chunks, count), ())
        key = layout.schedule, layout.chunks, len(paths)
        if key not in self._ends:
            self._ends[key] = rank_ends(self.costs, self.own, self.hop, layout.schedule, count, paths)
        return self._ends[key]

    def seconds(self, spec: RunSpec) -> tuple[float, ...]:
        """Rank -> when it is done."""
        key = (spec.layout.schedule, spec.layout.pp, spec.layout.chunks, simulated(spec))
        done, path = ends(schedule(*key), self.costs, self.link)
        self.paths.setdefault(key, []).append(path)
        return done

    def step(self, spec: RunSpec, done: Sequence[float], final: Sequence[float]) -> float:
        """Seconds of a step whose ranks are done then, and whose members then need so long for the rest."""
        of = {
            rank: seconds
            for member, seconds in zip(self.members, final, strict=True)
            for rank in member.ranks
        }
        last = max(end + of[rank] for rank, end in enumerate(done))
        return last + (spec.microbatches - simulated(spec)) * self.period + self.on.stack.step
