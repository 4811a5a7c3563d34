"""Why a layout: where its time and its memory go, what crosses which link, and why not its neighbours."""

from __future__ import annotations

from dataclasses import asdict
from functools import cached_property
from typing import Any

from meshwright.planner.cost.model import CostModel
from meshwright.planner.cost.uncertainty import fitting, spread
from meshwright.planner.explain.candidate import Candidate
from meshwright.planner.explain.link_load import AxisLoad, communication
from meshwright.planner.explain.neighbours import changes, neighbours
from meshwright.planner.explain.sensitivity import assumptions
from meshwright.planner.programs.table import PROGRAMS
from meshwright.spec import RunSpec
from meshwright.spec.sections import SelectiveRecompute


class Explanation(Candidate):
    """A layout on a cluster, explained in seconds and bytes, and compared with its neighbours.

    `limit` is how many bytes of a rank may be filled at most, and `most` how many neighbours are listed; all
    are searched for what would change the choice.
    """

    def __init__(
        self, spec: RunSpec, costs: CostModel, limit: float | None = None, most: int | None = None
    ) -> None:
        super().__init__(spec, costs)
        sure = fitting(self.room, spread(self.cluster, costs.stack))
        filled = sure if self.fits(sure) else self.room
        self.capacity = filled if limit is None else min(filled, limit)
        """Bytes that a rank of this layout and its neighbours may need, as of plans: what fits with the
        probability that a plan must have, or all of the device where this layout is less sure to fit."""
        self.candidates = {
            words: Candidate(other, costs, self.times)
            for words, other in changes(spec, PROGRAMS[costs.stack.name]).items()
        }
        """All neighbours, by words for the difference."""
        self.neighbours = neighbours(self, self.candidates, self.capacity, most)
        self.assumptions = assumptions(self, self.candidates, self.capacity)

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
            "room": self.room,
            "capacity": self.capacity,
            "fits": self.fits(self.capacity),
            "communication": [load.to_json() for load in self.axes],
            **self.reasons(),
        }


def describe(spec: RunSpec) -> str:
    """A plan in one line: its layout, microbatch and recomputation, with keys that are not defaults."""
    layout, recompute = spec.layout, spec.recompute
    words = [layout.describe()]
    if layout.pp > 1 and layout.stages != "balanced":
        cut = layout.stages if isinstance(layout.stages, str) else ",".join(map(str, layout.stages))
        words.append(f"stages={cut}")
    if layout.cp > 1 and layout.context_mode != "ring":
        words.append(f"context_mode={layout.context_mode}")
    if layout.tp > 1 and not layout.sequence_parallel:
        words.append("sequence_parallel=off")
    if layout.expert_parts > 1:
        words.append(f"expert_parts={layout.expert_parts}")
    if layout.bounds_dispatch:
        words.append(f"expert_buffer_factor={layout.expert_buffer_factor:g}")
    words += spec.exchange_words
    words += [f"micro_batch={spec.micro_batch}", f"recompute={recompute.policy}"]
    if isinstance(recompute, SelectiveRecompute) and (saved := recompute.saved_words):
        words.append(f"recompute.save={saved}")
    return ", ".join(words)
