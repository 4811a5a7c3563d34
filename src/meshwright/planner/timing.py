"""The seconds of one layout's step at several values of a figure: at least, quickly; exactly, when asked.

Stages and ranks that hold as many blocks cost the same, and are looked at once. A step is at least as long as
its busiest rank, and as any path through the schedule's lists that was found before (`planner/bounds.py`);
how long it is exactly takes a run through the lists.
"""

from __future__ import annotations

from functools import cached_property, lru_cache
from typing import NamedTuple

from meshwright.planner.axes import Group
from meshwright.planner.bounds import rank_ends, schedule
from meshwright.planner.engines import Engines
from meshwright.planner.estimate import (
    NUMBER,
    RankTime,
    held_by,
    message,
    parts_of,
    passed,
    rank_data,
    simulated,
    stage_cost,
    stage_passes,
    step_time,
)
from meshwright.planner.pipe import Totals, ranks_of
from meshwright.schedule import Link, Path, StageCost, ends
from meshwright.schedule.flow import Flow, flow_of
from meshwright.spec import RunSpec
from meshwright.spec.stages import Stage, stages

Lists = tuple[str, int, int, int]
"""What a schedule's lists follow from: its name, ranks, stages of a rank and microbatches."""
Paths = dict[Lists, list[Path]]
"""Of lists: the paths through them that are known."""


class _Costs(NamedTuple):
    """What a layout costs on some engines, but for what its ranks wait for each other."""

    stages: list[StageCost]
    ranks: list[RankTime]
    link: Link
    fixed: float
    repeated: float
    """Of microbatches that are not simulated."""

    def step(self, done: list[float] | tuple[float, ...]) -> float:
        """Seconds of a step whose ranks are done with their last backward then."""
        last = max(end + rank.data.final for end, rank in zip(done, self.ranks, strict=True))
        return last + self.repeated + self.fixed


class Timing:
    """A layout to be timed; `paths` is what is known of its lists and of others."""

    def __init__(self, spec: RunSpec, paths: Paths) -> None:
        layout = spec.layout
        self.spec, self._paths = spec, paths
        self._done: dict[tuple[tuple[StageCost, ...], Link], tuple[float, ...]] = {}
        name = layout.schedule if layout.pp > 1 else "1f1b"
        self._lists: Lists = (name, layout.pp, layout.chunks, simulated(spec))

    def least(self, on: Engines) -> float:
        """Seconds of a step at least."""
        if self._shares_cores(on):
            return self.seconds(on)
        found, (name, _, _, count) = self._costs(on), self._lists
        hop = max(found.link.latency + each.output / found.link.bandwidth for each in found.stages)
        known = self._paths.get(self._lists, ())
        return found.step(rank_ends(found.stages, self._own, hop, name, count, known))

    def seconds(self, on: Engines) -> float:
        """Seconds of a step, as `step_time` has them."""
        if self._shares_cores(on):
            return step_time(self.spec, on).seconds
        found = self._costs(on)
        key = tuple(found.stages), found.link
        if key not in self._done:  # not every figure changes what a pipeline waits for
            done, path = ends(schedule(*self._lists), found.stages, found.link, _flow(self._lists))
            self._done[key] = done
            known = self._paths.setdefault(self._lists, [])
            if path not in known:
                known.append(path)
        return found.step(self._done[key])

    def parts(self, on: Engines, seconds: float) -> dict[str, float]:
        """What the seconds of a step go to, on the busiest rank."""
        if self._shares_cores(on):
            return step_time(self.spec, on).parts
        found = self._costs(on)
        return parts_of(max(found.ranks, key=lambda rank: rank.work.total), seconds, found.fixed)

    def _shares_cores(self, on: Engines) -> bool:
        """Whether ranks wait for each other's cores, which no bound counts."""
        return on.shared is not None and self.spec.layout.pp > 1

    @cached_property
    def _stages(self) -> tuple[Stage, ...]:
        return stages(self.spec.model, self.spec.layout, self.spec.data.seq_len)

    @cached_property
    def _kinds(self) -> list[Totals]:
        """Of each stage."""
        model, found = self.spec.model, []
        for stage in self._stages:
            routed = sum(map(model.has_experts, stage.blocks))
            found.append((len(stage.blocks) - routed, routed, stage.embed, stage.head))
        return found

    @cached_property
    def _own(self) -> list[list[int]]:
        """Rank -> its stages."""
        return ranks_of(self.spec.layout, self.spec.layout.pp)

    def _costs(self, on: Engines) -> _Costs:
        spec, blocks, kinds = self.spec, on.blocks(self.spec), self._kinds
        each, link = message(spec, on, blocks)
        passes = {
            kind: stage_passes(blocks, stage)
            for kind, stage in dict(zip(kinds, self._stages, strict=True)).items()
        }
        known: dict[tuple[Totals, ...], tuple[RankTime, list[StageCost]]] = {}
        costs, ranks = [StageCost(0.0, 0.0, 0.0)] * len(kinds), []
        for mine in self._own:
            alike = tuple(kinds[stage] for stage in mine)
            if alike not in known:
                own = [passes[kind] for kind in alike]
                data = rank_data(spec, on, held_by(blocks, [self._stages[stage] for stage in mine]), own)
                waits = data.each_microbatch / len(mine)
                sides = [(not embed, not head) for _, _, embed, head in alike]
                sent = spec.microbatches * each * sum(map(sum, sides)) if link is None else 0.0
                known[alike] = (
                    RankTime(passed(own, spec.microbatches), data, sent),
                    [
                        stage_cost(work, waits, each, side, link is None, blocks)
                        for work, side in zip(own, sides, strict=True)
                    ],
                )
            rank, listed = known[alike]
            ranks.append(rank)
            for stage, cost in zip(mine, listed, strict=True):
                costs[stage] = cost
        period = max(sum(c.forward + c.input + c.weight for c in listed) for _, listed in known.values())
        repeated = (spec.microbatches - self._lists[3]) * period
        agreed = on.links.collective("all_reduce", NUMBER, Group(spec.layout.world_size, 1))
        return _Costs(costs, ranks, link or Link(), on.stack.step + on.stack.agreements * agreed, repeated)


@lru_cache(maxsize=4)
def _flow(lists: Lists) -> Flow:
    """The lists as numbers, which are large: few are kept."""
    return flow_of(schedule(*lists))
