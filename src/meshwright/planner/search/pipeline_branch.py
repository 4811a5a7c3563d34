"""A pipeline with given stages on its ranks: what all its schedules and shardings share, computed once."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from operator import mul
from typing import NamedTuple

from meshwright.planner.cost.layer import LayerCost
from meshwright.planner.cost.lower_bounds import shape
from meshwright.planner.cost.model import CostModel
from meshwright.planner.cost.stages import Contents, PlacedStages, stored, together
from meshwright.planner.cost.step import ScheduleTimes, StepModel
from meshwright.planner.layout_space import Sharding
from meshwright.planner.memory.generic import Generic, held_microbatches, stage_activations, working
from meshwright.spec import RunSpec
from meshwright.spec.layout import SPLIT


class Option(NamedTuple):
    """A sharding of a pipeline's states."""

    sharding: Sharding
    states: tuple[float, ...]
    """Bytes without activations, for each group of ranks with equal stages."""
    final: tuple[float, ...]
    """Seconds of each rank after its last backward."""


class ShardingCosts(NamedTuple):
    """Costs of ranks of a mesh under one sharding, by the part of the model that they hold."""

    spec: RunSpec
    """A run with this sharding."""
    states: dict[Contents, float]
    """Bytes without activations that are kept."""
    final: dict[Contents, float]
    """Seconds after the last backward."""


class PipelineBranch:
    """The stages of a mesh on their ranks; `times` and `shares` are known to other branches of the mesh."""

    def __init__(
        self,
        spec: RunSpec,
        costs: CostModel,
        memory: Generic,
        times: ScheduleTimes,
        placed: PlacedStages,
        blocks: LayerCost,
        shares: dict[Sharding, ShardingCosts],
    ) -> None:
        self.steps = StepModel(spec, costs, times, placed, blocks)
        self.options: list[Option] | None = None
        """Shardings whose states leave room for one microbatch, once they are known."""
        self._memory, self._placed, self._blocks, self._shares = memory, placed, blocks, shares
        self._kept: dict[bool, dict[Contents, float]] = {}
        cuda = costs.cluster.device.kind != "cpu"
        self._fragmentation = 1 + costs.stack.fragmentation if cuda else 1.0

    def kept(self, split: bool) -> dict[Contents, float]:
        """Bytes that each kind of stage keeps of a microbatch; `split` is true for split backwards."""
        if split not in self._kept:
            kinds = set(self._placed.contents)
            self._kept[split] = {held: stage_activations(self._blocks, held, split) for held in kinds}
        return self._kept[split]

    def sharded(self, shardings: Iterable[Sharding], capacity: float) -> Iterator[Option]:
        """The shardings, of those in `shares`, that leave room for one microbatch at least."""
        kept, members = self.kept(False), list(self._placed.members)
        least = [self._fragmentation * sum(kept[held] for held in member) for member in members]
        totals = {member: together(member) for member in members}
        for sharding in shardings:
            known = self._shares[sharding]
            for member, flight in zip(members, least, strict=True):
                total = totals[member]
                if total not in known.states:
                    known.states[total] = self._states(known.spec, total)
                if known.states[total] + flight > capacity:
                    break
            else:
                for member, total in totals.items():
                    if total not in known.final:
                        known.final[total] = self.steps.stages.data(known.spec, member).final
                states = tuple(known.states[totals[member]] for member in members)
                final = tuple(known.final[totals[member]] for member in self._placed.by_rank)
                yield Option(sharding, states, final)

    def _states(self, spec: RunSpec, held: Contents) -> float:
        passing, mine = working(self._blocks, held), stored(self._blocks, held)
        return self._memory.rank(spec, self._blocks, mine, passing, held.head, 0).device

    def activations(self, spec: RunSpec) -> list[float]:
        """Most bytes of activations on each group of ranks with equal stages, under the run's schedule."""
        layout = spec.layout
        shapes = shape(layout.schedule, layout.pp, layout.chunks, held_microbatches(spec))
        kept, found = self.kept(layout.schedule in SPLIT), []
        for member, ranks in self._placed.members.items():
            sizes = [kept[held] for held in member]
            if min(sizes) == max(sizes):
                most = max(shapes.most[rank] for rank in ranks) * sizes[0]
            else:
                most = max(sum(map(mul, each, sizes)) for rank in ranks for each in shapes.held[rank])
            found.append(self._fragmentation * most)
        return found
