"""One kind of call that ranks make in a step: of which collective, how large, when, and on which axis."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Literal

from meshwright.planner.group_shapes import GroupShape
from meshwright.planner.rank_view import share

Where = Literal["dense", "moe", "embedding", "head", "loss", "edge", "unit", "step"]
"""Part of the model that a message belongs to; an edge lies between stages, a unit is gathered as one."""


class Phase(StrEnum):
    """When a message is sent."""

    FORWARD = "forward"
    INPUT = "input"
    """In the backward, for the gradient of a layer's input."""
    WEIGHT = "weight"
    """In the backward, for the gradient of its weights; zero-bubble schedules put it off."""
    RECOMPUTE = "recompute"
    """In the backward, to compute activations again."""
    MICROBATCH = "microbatch"
    """For each microbatch, between its layers: parameters and gradients under ZeRO-2 and 3."""
    STEP = "step"
    """Once in an optimiser step."""


class Overlap(StrEnum):
    """Computation that runs while a message travels."""

    NONE = "none"
    COMPUTE = "compute"
    """The other operators of its layer."""
    PRODUCT = "product"
    """The matrix product for the gradient of the layer's input."""
    ATTENTION = "attention"
    """Attention to the keys and values that are already there."""
    NEXT_UNIT = "next unit"
    """The forward or backward of the next ZeRO unit."""


@dataclass(frozen=True)
class Message:
    """Equal calls of one collective or transfer, as one rank of the group sees them."""

    axis: str
    """Axis of the mesh, by the name under which the program records it."""
    operation: str
    elements: float
    """Elements of the whole tensor for all-gather, reduce-scatter and all-reduce; else of one rank's part."""
    width: float
    """Bytes of an element."""
    group: GroupShape
    phase: Phase
    where: Where
    count: float = 1
    """Number of calls: in a microbatch for those of one layer or end, in a step for those of a rank."""
    overlaps: Overlap = Overlap.NONE

    @property
    def size(self) -> float:
        """Bytes of `elements`."""
        return self.elements * self.width

    @property
    def sent(self) -> float:
        """Bytes that a rank sends in one call, of a bandwidth-optimal algorithm (Thakur et al. 2005).

        (n-1)/n of `size` for all-gather, reduce-scatter and all-to-all, twice that for an all-reduce, all of
        it for a shift or a send.
        """
        if self.operation in ("send", "shift"):
            return self.size
        twice = self.operation in ("all_reduce", "scalars", "amax")
        return (2 if twice else 1) * self.size * share(self.group.ranks)

    def times(self, count: float) -> Message:
        """`count` times as many calls."""
        return replace(self, count=self.count * count)
