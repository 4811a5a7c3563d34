"""Why a layout and not another: its neighbours, and what would change the choice."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from meshwright.planner.cost.model import CostModel
from meshwright.planner.cost.timing import Paths
from meshwright.planner.explain.candidate import Candidate
from meshwright.planner.explain.neighbours import Neighbour, changes, neighbours
from meshwright.planner.explain.sensitivity import Assumption, assumptions
from meshwright.spec import RunSpec


@dataclass(frozen=True)
class Reasons:
    """What a layout is set beside, and what comes of it."""

    neighbours: tuple[Neighbour, ...]
    """The nearest, or all."""
    assumptions: tuple[Assumption, ...]
    candidates: tuple[str, ...]
    """Words for what `assumptions` compares with: all neighbours, then the other plans that were given."""
    count: int
    """How many neighbours there are."""

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "neighbours": [each.to_json() for each in self.neighbours],
            "assumptions": [each.to_json(self.candidates) for each in self.assumptions],
        }


def reasons(
    spec: RunSpec,
    on: CostModel,
    capacity: float,
    others: Mapping[str, RunSpec] | None = None,
    most: int | None = None,
) -> Reasons:
    """Set a layout beside its neighbours, and beside `others` in words, on devices that may fill `capacity`.

    `most` is how many neighbours are told of; what would change the choice is looked for among all.
    """
    paths: Paths = {}
    chosen = Candidate(spec, on, paths)
    near = [(change, Candidate(change.spec, on, paths)) for change in changes(spec)]
    known = [(change.spec.layout, change.spec.recompute) for change, _ in near]
    compared = {
        words: Candidate(each, on, paths)
        for words, each in (others or {}).items()
        if (each.layout, each.recompute) not in known
    }
    told = neighbours(chosen, near, capacity, most)
    candidates = [*(each for _, each in near), *compared.values()]
    return Reasons(
        neighbours=told,
        assumptions=assumptions(chosen, candidates, on, capacity),
        candidates=(*(change.words for change, _ in near), *compared),
        count=len(near),
    )
