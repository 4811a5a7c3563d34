"""Why a layout and not another: its neighbours, and what would change the choice."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from meshwright.planner.cost.model import CostModel
from meshwright.planner.cost.step import ScheduleTimes
from meshwright.planner.explain.candidate import Candidate
from meshwright.planner.explain.neighbours import Neighbour, changes, neighbours
from meshwright.planner.explain.sensitivity import Assumption, assumptions
from meshwright.spec import RunSpec


@dataclass(frozen=True)
class Reasons:
    """A layout's comparison with others."""

    neighbours: tuple[Neighbour, ...]
    """The nearest, or all."""
    assumptions: tuple[Assumption, ...]
    candidates: tuple[str, ...]
    """Words for the layouts that `assumptions` compares: all neighbours, then the other plans given."""
    count: int
    """Number of all neighbours."""

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "neighbours": [each.to_json() for each in self.neighbours],
            "assumptions": [each.to_json(self.candidates) for each in self.assumptions],
        }


def reasons(
    spec: RunSpec,
    costs: CostModel,
    capacity: float,
    others: Mapping[str, RunSpec] | None = None,
    most: int | None = None,
) -> Reasons:
    """Compare a layout with its neighbours, and with `others` by words, where a rank may fill `capacity`.

    `most` is how many neighbours are listed; all are searched for what would change the choice.
    """
    times = ScheduleTimes()
    chosen = Candidate(spec, costs, times)
    near = [(change, Candidate(change.spec, costs, times)) for change in changes(spec)]
    known = [(change.spec.layout, change.spec.recompute) for change, _ in near]
    compared = {
        words: Candidate(each, costs, times)
        for words, each in (others or {}).items()
        if (each.layout, each.recompute) not in known
    }
    listed = neighbours(chosen, near, capacity, most)
    candidates = [*(each for _, each in near), *compared.values()]
    return Reasons(
        neighbours=listed,
        assumptions=assumptions(chosen, candidates, costs, capacity),
        candidates=(*(change.words for change, _ in near), *compared),
        count=len(near),
    )
