"""Why a layout: where its time and its memory go, what crosses which link, and why not its neighbours."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from functools import cached_property
from typing import Any

from meshwright.planner.cost.model import CostModel
from meshwright.planner.cost.uncertainty import room
from meshwright.planner.explain.candidate import Candidate
from meshwright.planner.explain.link_load import AxisLoad, communication
from meshwright.planner.explain.neighbours import changes, neighbours
from meshwright.planner.explain.sensitivity import assumptions
from meshwright.spec import RunSpec


class Explanation(Candidate):
    """A layout on a cluster, explained in seconds and bytes, and compared with `others` by their words.

    `capacity` is how many bytes of a rank may be filled, and `most` how many neighbours are listed; all are
    searched for what would change the choice.
    """

    def __init__(
        self, spec: RunSpec, costs: CostModel, others: dict[str, RunSpec], capacity: float, most: int | None
    ) -> None:
        super().__init__(spec, costs)
        self.capacity, near = capacity, changes(spec)
        known = [(other.layout, other.recompute) for other in near.values()]
        near_or_other = near | {
            words: other for words, other in others.items() if (other.layout, other.recompute) not in known
        }
        self.candidates = {
            words: Candidate(other, costs, self.times) for words, other in near_or_other.items()
        }
        """The layouts that `assumptions` compares, by words: all neighbours, then the other plans given."""
        self.count = len(near)
        """Number of all neighbours."""
        listed = {words: self.candidates[words] for words in near}
        self.neighbours = neighbours(self, listed, capacity, most)
        self.assumptions = assumptions(self, self.candidates, capacity)

    @cached_property
    def axes(self) -> tuple[AxisLoad, ...]:
        """Messages of the busiest pipeline rank."""
        return communication(self.spec, self.costs, self.time)

    @cached_property
    def parts_by_rank(self) -> list[dict[str, float]]:
        """Seconds of each pipeline rank by cause."""
        return [self.time.parts_of(rank) for rank in range(len(self.time.ranks))]

    @property
    def mean_parts(self) -> dict[str, float]:
        """Seconds of the step by cause, as the mean of the pipeline's ranks."""
        every = self.parts_by_rank
        return {name: sum(parts[name] for parts in every) / len(every) for name in every[0]}

    def reasons(self) -> dict[str, Any]:
        """The neighbours and the assumptions as plain values."""
        return {
            "neighbours": [neighbour.to_json() for neighbour in self.neighbours],
            "assumptions": [asdict(assumption) for assumption in self.assumptions],
        }

    def to_json(self) -> dict[str, Any]:
        """Plain values, for `meshwright explain --json`."""
        return {
            "cluster": self.cluster.name,
            "device": self.cluster.device.name,
            "devices": self.cluster.count,
            "stack": self.costs.stack.name,
            **self.figures(),
            "never_measured": self.never_measured,
            "micro_batch": self.spec.micro_batch,
            "microbatches": self.spec.microbatches,
            "busiest_rank": self.time.rank,
            "time": self.parts_by_rank,
            "mean_time": self.mean_parts,
            "memory": [memory.to_json() for memory in self.memories],
            "capacity": self.capacity,
            "fits": self.fits(self.capacity),
            "communication": [load.to_json() for load in self.axes],
            **self.reasons(),
        }


def explain(
    spec: RunSpec,
    costs: CostModel,
    others: Sequence[RunSpec] = (),
    capacity: float | None = None,
    most: int | None = None,
) -> Explanation:
    """Explain a run's layout on a cluster with as many devices as it has ranks.

    `others` are layouts of the same run that it is compared with besides its neighbours; those with another
    number of ranks or another batch are left out. `capacity` is how many bytes of a rank may be filled, by
    default all of a device's, and `most` how many neighbours are listed, by default all. Raises `UserError`
    where ranks and devices differ in number.
    """
    compared = {describe(other): other for other in others if _comparable(other, spec)}
    return Explanation(spec, costs, compared, room(costs.cluster) if capacity is None else capacity, most)


def describe(spec: RunSpec) -> str:
    """A plan in one line: its layout, microbatch and recompute policy."""
    return f"{spec.layout.describe()}, micro_batch={spec.micro_batch}, recompute={spec.recompute.policy}"


def _comparable(one: RunSpec, other: RunSpec) -> bool:
    """True for different layouts of one batch on the same number of ranks."""
    same = [(each.layout.world_size, each.train.batch_tokens, each.data.seq_len) for each in (one, other)]
    return same[0] == same[1] and (one.layout, one.recompute) != (other.layout, other.recompute)
