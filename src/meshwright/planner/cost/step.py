"""One step of a layout on a cluster: how long, and where the time goes.

What stages and ranks cost (`planner/cost/stages.py`) is put together by timing the actions of the schedule
that the program runs one by one (`schedule/simulate.py`); the data axis and the optimiser follow each rank's
last backward. Of very many microbatches the middle ones, which all cost the same, are not simulated one by
one.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from meshwright.planner.cost.breakdown import Seconds
from meshwright.planner.cost.model import CostModel
from meshwright.planner.cost.shared_cores import Places, makespan
from meshwright.planner.cost.shared_cores import period as shared_period
from meshwright.planner.cost.stages import RankTime, StageCosts
from meshwright.planner.group_shapes import axes
from meshwright.schedule import Simulation, schedule_of, simulate
from meshwright.spec import RunSpec

_SIMULATED = 6
"""Microbatches that are simulated, in multiples of the pipeline's ranks."""


@dataclass(frozen=True)
class StepTime:
    """A step's seconds, and what they are made of on each rank of the pipeline."""

    seconds: float
    simulation: Simulation
    rank: int
    """The busiest."""
    ranks: tuple[RankTime, ...]
    fixed: float
    """What belongs to no operator."""
    repeated: float = 0.0
    """Of microbatches that were not simulated one by one."""

    @cached_property
    def parts(self) -> dict[str, float]:
        """Seconds of the busiest rank by what they go to; their sum is `seconds`."""
        return self.parts_of(self.rank)

    def parts_of(self, rank: int) -> dict[str, float]:
        """Seconds of a rank by what they go to; its bubble is what is left of the step."""
        return parts_of(self.ranks[rank], self.seconds, self.fixed)


def parts_of(own: RankTime, seconds: float, fixed: float) -> dict[str, float]:
    """What a step of `seconds` goes to on a rank; its bubble is what is left of the step."""
    every, again = Seconds(), own.work.again
    for each in own.work:
        every = every.plus(each)
    first = every.plus(again, -1)
    parts = {
        "matrix products": first.matmul,
        "attention": first.attention,
        "memory-bound": first.moved,
        "host": first.host,
        "recomputation": again.total,
        "tensor axis": first.tensor,
        "context axis": first.context,
        "expert axis": first.expert,
        "pipeline axis": own.sent,
        "data axis": own.data.exposed + own.data.slowed,
        "optimiser": own.data.optimiser,
        "fixed": fixed,
    }
    total = sum(parts.values())
    if total > seconds:  # others left this rank more of the cores than its share
        parts = {name: value * seconds / total for name, value in parts.items()}
    parts["bubble"] = max(0.0, seconds - total)
    return parts


def step_time(spec: RunSpec, on: CostModel) -> StepTime:
    """Seconds of one optimiser step."""
    staged = StageCosts(spec)
    found = staged.costs(on)
    schedule = schedule_of(spec.layout, simulated(spec))
    finals = [rank.data.final for rank in found.ranks]
    timed = simulate(schedule, found.stages, found.link, finals)
    each_rank = found.each_rank(staged.own)
    period, span = max(each_rank), timed.makespan
    if on.shared is not None and spec.layout.pp > 1:
        places = Places(on.shared, axes(spec.layout).pipeline.stride)
        span = makespan(schedule, found.stages, finals, places, found.hop)
        period = shared_period(each_rank, places)
    repeated = (spec.microbatches - schedule.microbatches) * period
    busiest = max(range(len(found.ranks)), key=lambda rank: found.ranks[rank].work.total)
    seconds = span + repeated + found.fixed
    return StepTime(seconds, timed, busiest, tuple(found.ranks), found.fixed, repeated)


def simulated(spec: RunSpec) -> int:
    """Microbatches that are simulated one by one: all, or as many as fill the pipeline some times."""
    layout, count = spec.layout, spec.microbatches
    if layout.pp == 1:
        return count if count < 2 else 1
    most = max(_SIMULATED, 2 * layout.chunks) * layout.pp
    return count if count <= most + layout.pp else most + count % layout.pp
