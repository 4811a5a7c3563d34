"""A layout that another is set beside: what it costs is looked at when it is asked for, and then kept."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from meshwright.planner.cost.model import CostModel
from meshwright.planner.cost.timing import Paths, Timing
from meshwright.planner.memory.exact import fullest
from meshwright.planner.memory.generic import Memory
from meshwright.spec import RunSpec

TIE = 1e-3
"""Steps whose seconds differ by a smaller share are as fast as each other."""


@dataclass(frozen=True)
class Estimate:
    """What a layout costs on the engines that it is compared on."""

    spec: RunSpec
    seconds: float
    parts: dict[str, float]
    memory: Memory

    def fits(self, capacity: float) -> bool:
        return self.memory.device <= capacity


class Candidate:
    """A layout on the engines that it is compared on; `paths` is shared by all that are compared."""

    def __init__(self, spec: RunSpec, on: CostModel, paths: Paths) -> None:
        self.spec, self.on, self.timing = spec, on, Timing(spec, paths)

    @cached_property
    def least(self) -> float:
        """Seconds of a step at least."""
        return self.timing.least(self.on)

    @cached_property
    def seconds(self) -> float:
        return self.timing.seconds(self.on)

    @cached_property
    def memory(self) -> Memory:
        """Of the fullest rank."""
        return fullest(self.spec, self.on)

    @cached_property
    def estimate(self) -> Estimate:
        """Everything."""
        return Estimate(self.spec, self.seconds, self.timing.parts(self.on, self.seconds), self.memory)

    def fits(self, capacity: float) -> bool:
        return self.memory.device <= capacity

    def beats(self, other: Candidate) -> bool:
        """Whether it is faster."""
        limit = other.seconds * (1 - TIE)
        return self.least < limit and self.seconds < limit
