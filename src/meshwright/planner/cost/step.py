"""Seconds of a training step of a layout on a cluster: a lower bound, quickly, and exactly.

A step lasts until every rank has run the actions of its schedule and what follows its last backward: messages
of the data axis that nothing hides, and the optimiser. The search, comparisons of layouts and printed plans
all take their seconds from `StepModel`. Of very many microbatches those in the middle are not simulated: each
costs what one more does in the simulation.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from operator import add

from meshwright.planner.cost.exchange import ExchangeSeconds
from meshwright.planner.cost.layer import LayerCost
from meshwright.planner.cost.lower_bounds import rank_ends
from meshwright.planner.cost.model import CostModel
from meshwright.planner.cost.shared_cores import SharedCores, makespan
from meshwright.planner.cost.stages import PlacedStages, StageCosts, placed_stages
from meshwright.planner.group_shapes import axes
from meshwright.schedule import Path, Simulation, StageCost, StageLink, ends, make, simulate
from meshwright.spec import RunSpec

_SIMULATED = 6
"""Microbatches that are simulated, in multiples of the pipeline's ranks."""
Lists = tuple[str, int, int, int]
"""Arguments of `schedule.make`: its name, ranks, stages of a rank, microbatches."""


def simulated(spec: RunSpec) -> int:
    """Microbatches that are simulated one by one: all, or enough to fill the pipeline several times."""
    layout, count = spec.layout, spec.microbatches
    if layout.pp == 1:
        return min(count, 1)
    most = max(_SIMULATED, 2 * layout.chunks) * layout.pp
    return count if count <= most + layout.pp else most + count % layout.pp


def lists_of(spec: RunSpec) -> Lists:
    """The schedule that is simulated for a layout."""
    return _lists(spec, simulated(spec))


def _lists(spec: RunSpec, microbatches: int) -> Lists:
    layout = spec.layout
    return layout.schedule if layout.pp > 1 else "1f1b", layout.pp, layout.chunks, microbatches


class ScheduleTimes:
    """When the ranks of schedules finish, for layouts that are compared with each other.

    The path through a schedule that one layout's step waited for bounds the step of every other layout with
    the same schedule from below.
    """

    def __init__(self) -> None:
        self.paths = defaultdict[Lists, list[Path]](list)
        """Paths through a schedule that were found so far."""
        self._ends: dict[tuple[Lists, tuple[StageCost, ...], StageLink], tuple[float, ...]] = {}

    def exact(self, lists: Lists, costs: tuple[StageCost, ...], link: StageLink) -> tuple[float, ...]:
        """When each rank's last action ends, in seconds."""
        key = lists, costs, link
        if key not in self._ends:
            self._ends[key], path = ends(make(*lists), costs, link)
            if path not in self.paths[lists]:
                self.paths[lists].append(path)
        return self._ends[key]


class StepModel:
    """Seconds of a step of a pipeline with given stages, under any schedule and sharding of states.

    `spec` is one of the runs with these stages, and `blocks` the cost of its layers. `times` is shared by
    layouts that are compared.
    """

    def __init__(
        self, spec: RunSpec, costs: CostModel, times: ScheduleTimes, placed: PlacedStages, blocks: LayerCost
    ) -> None:
        self.stages, self.times = StageCosts(spec, costs, placed, blocks), times
        self._bounds: dict[tuple[Lists, int], list[float]] = {}
        self.shared: SharedCores | None = None
        """Where the ranks are, if they share cores, so that one is faster while others wait."""
        if costs.shared is not None and spec.layout.pp > 1:
            self.shared = replace(costs.shared, stride=axes(spec.layout).pipeline.stride)

    def bound(self, spec: RunSpec, finals: Sequence[float], mean: float = 0.0) -> float:
        """Seconds of a step at least, for ranks that never share cores.

        `finals` are each rank's seconds after its last backward. Where they are not known, `mean` is at most
        their mean.
        """
        lists, stages = lists_of(spec), self.stages
        paths = self.times.paths[lists]
        key = lists, len(paths)
        if key not in self._bounds:
            self._bounds[key] = rank_ends(
                stages.stages, stages.placed.own, stages.hop, lists[0], lists[3], paths
            )
        done = self._bounds[key]
        span = max(_last(done, finals), sum(done) / len(done) + mean)
        alone = self._seconds(spec, span, max(stages.by_rank))
        return alone + stages.exchange(spec, alone).total

    def exact(self, spec: RunSpec, finals: Sequence[float]) -> float:
        """Seconds of a step, in the mean of a period of exchanges of parameters."""
        alone = self.alone(spec, finals)
        return alone + self.stages.exchange(spec, alone).total

    def alone(self, spec: RunSpec, finals: Sequence[float]) -> float:
        """Seconds of a step without exchanges of parameters."""
        span = self._span(lists_of(spec), finals)
        return self._seconds(spec, span, self._period(spec, finals, span))

    def _span(self, lists: Lists, finals: Sequence[float]) -> float:
        """Seconds of the microbatches of some lists, and of what follows them."""
        stages = self.stages
        if self.shared is not None:
            return makespan(make(*lists), stages.stages, finals, self.shared, stages.hop)
        return _last(self.times.exact(lists, stages.stages, stages.link), finals)

    def _period(self, spec: RunSpec, finals: Sequence[float], span: float) -> float:
        """Seconds of each microbatch that is not simulated: of one more where `span` is that of all that are.

        The busiest rank's, or more: where all forwards come before the backwards (GPipe, breadth first) each
        half is paced by the rank that is slowest in it, and others wait for messages that nothing hides.
        """
        busiest, count = max(self.stages.by_rank), simulated(spec)
        if spec.microbatches == count or spec.layout.pp == 1:
            return busiest
        fewer = count // spec.layout.pp // 2 * spec.layout.pp
        slope = (span - self._span(_lists(spec, count - fewer), finals)) / fewer
        return slope if self.shared is not None else max(busiest, slope)

    def _seconds(self, spec: RunSpec, span: float, period: float) -> float:
        """The step from the time of its simulated microbatches and the period of each of the others."""
        rest = (spec.microbatches - simulated(spec)) * period
        return self.stages.ahead(spec) + span + rest + self.stages.fixed


def _last(done: Sequence[float], finals: Sequence[float]) -> float:
    return max(map(add, done, finals))


class StepTime:
    """The step of one layout, lazily: its seconds, its simulation, and where each rank's time goes."""

    def __init__(self, spec: RunSpec, costs: CostModel, times: ScheduleTimes, placed: PlacedStages) -> None:
        self.spec, self.model = spec, StepModel(spec, costs, times, placed, costs.blocks(spec))
        self.ranks = self.model.stages.rank_times(spec)
        self._finals = [rank.data.final for rank in self.ranks]

    @cached_property
    def bound(self) -> float:
        """Seconds of the step at least; exact where ranks share cores, which no bound counts."""
        return self.seconds if self.model.shared is not None else self.model.bound(self.spec, self._finals)

    @cached_property
    def seconds(self) -> float:
        """Seconds of the step."""
        return self.alone + self.exchange.total

    @cached_property
    def alone(self) -> float:
        """Seconds of the step without exchanges of parameters."""
        return self.model.alone(self.spec, self._finals)

    @cached_property
    def exchange(self) -> ExchangeSeconds:
        """Seconds of exchanges of parameters, in the mean of a period."""
        return self.model.stages.exchange(self.spec, self.alone)

    @cached_property
    def simulation(self) -> Simulation:
        """The simulated microbatches, action by action."""
        stages = self.model.stages
        return simulate(make(*lists_of(self.spec)), stages.stages, stages.link, self._finals)

    @cached_property
    def rank(self) -> int:
        """The busiest pipeline rank."""
        return max(range(len(self.ranks)), key=lambda rank: self.ranks[rank].work.total)

    @cached_property
    def parts(self) -> dict[str, float]:
        """Seconds of the busiest rank by cause; their sum is `seconds`."""
        return self.parts_of(self.rank)

    def parts_of(self, rank: int) -> dict[str, float]:
        """Seconds of a pipeline rank by cause; its bubble is what remains of the step."""
        own, work = self.ranks[rank], self.ranks[rank].work
        first = work.forward.plus(work.input).plus(work.weight)
        parts = {
            "matrix products": first.matmul,
            "attention": first.attention,
            "memory-bound": first.moved + sum(own.data.copies.values()),
            "host": first.host,
            "recomputation": work.again.total,
            "forwards ahead": self.model.stages.ahead(self.spec),
            "tensor axis": first.tensor,
            "context axis": first.context,
            "expert axis": first.expert,
            "activation offload": first.offload,
            "pipeline axis": own.sent,
            "data axis": own.data.exposed,
            "exchange": self.exchange.exposed,
            "slowed by messages": own.data.slowed + self.exchange.slowed,
            "optimiser": own.data.optimiser + self.exchange.update,
            "fixed": self.model.stages.fixed,
        }
        total = sum(parts.values())
        if total > self.seconds:  # the other ranks left this one more of the cores than its share
            parts = {name: value * self.seconds / total for name, value in parts.items()}
        parts["bubble"] = max(0.0, self.seconds - total)
        return parts


def step_time(spec: RunSpec, costs: CostModel) -> StepTime:
    """The step of a layout on its own."""
    return StepTime(spec, costs, ScheduleTimes(), placed_stages(spec))
