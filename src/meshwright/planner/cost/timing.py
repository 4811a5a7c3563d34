"""The seconds of one layout's step at several values of a figure: at least, quickly; exactly, when asked.

A step is at least as long as its busiest rank, and as any path through the schedule's lists that was found
before (`planner/cost/lower_bounds.py`); how long it is exactly takes a run through the lists.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property, lru_cache

from meshwright.planner.cost.lower_bounds import rank_ends, schedule
from meshwright.planner.cost.model import CostModel
from meshwright.planner.cost.stages import RankCosts, StageCosts
from meshwright.planner.cost.step import parts_of, simulated, step_time
from meshwright.schedule import Link, Path, StageCost, ends
from meshwright.schedule.dependency_graph import DependencyGraph, flow_of
from meshwright.spec import RunSpec

Lists = tuple[str, int, int, int]
"""What a schedule's lists follow from: its name, ranks, stages of a rank and microbatches."""
Paths = dict[Lists, list[Path]]
"""Of lists: the paths through them that are known."""


class Timing:
    """A layout to be timed; `paths` is what is known of its lists and of others."""

    def __init__(self, spec: RunSpec, paths: Paths) -> None:
        layout = spec.layout
        self.spec, self._paths = spec, paths
        self._done: dict[tuple[tuple[StageCost, ...], Link], tuple[float, ...]] = {}
        name = layout.schedule if layout.pp > 1 else "1f1b"
        self._lists: Lists = (name, layout.pp, layout.chunks, simulated(spec))

    def least(self, on: CostModel) -> float:
        """Seconds of a step at least."""
        if self._shares_cores(on):
            return self.seconds(on)
        found, (name, _, _, count) = self._staged.costs(on), self._lists
        known = self._paths.get(self._lists, ())
        return self._step(found, rank_ends(found.stages, self._staged.own, found.hop, name, count, known))

    def seconds(self, on: CostModel) -> float:
        """Seconds of a step, as `step_time` has them."""
        if self._shares_cores(on):
            return step_time(self.spec, on).seconds
        found = self._staged.costs(on)
        key = tuple(found.stages), found.link
        if key not in self._done:  # not every figure changes what a pipeline waits for
            done, path = ends(schedule(*self._lists), found.stages, found.link, _flow(self._lists))
            self._done[key] = done
            known = self._paths.setdefault(self._lists, [])
            if path not in known:
                known.append(path)
        return self._step(found, self._done[key])

    def parts(self, on: CostModel, seconds: float) -> dict[str, float]:
        """What the seconds of a step go to, on the busiest rank."""
        if self._shares_cores(on):
            return step_time(self.spec, on).parts
        found = self._staged.costs(on)
        return parts_of(max(found.ranks, key=lambda rank: rank.work.total), seconds, found.fixed)

    def _shares_cores(self, on: CostModel) -> bool:
        """Whether ranks wait for each other's cores, which no bound counts."""
        return on.shared is not None and self.spec.layout.pp > 1

    @cached_property
    def _staged(self) -> StageCosts:
        return StageCosts(self.spec)

    def _step(self, found: RankCosts, done: Sequence[float]) -> float:
        """Seconds of a step whose ranks are done with their last backward then."""
        last = max(end + rank.data.final for end, rank in zip(done, found.ranks, strict=True))
        left = self.spec.microbatches - self._lists[3]
        repeated = left * max(found.each_rank(self._staged.own)) if left else 0.0
        return last + repeated + found.fixed


@lru_cache(maxsize=4)
def _flow(lists: Lists) -> DependencyGraph:
    """The lists as numbers, which are large: few are kept."""
    return flow_of(schedule(*lists))
