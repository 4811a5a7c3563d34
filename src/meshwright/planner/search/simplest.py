"""The order of layouts that are about as fast as the fastest: the one that changes least comes first, of
those that fit with a probability of `COMFORTABLE` where there are any (`planner/search/branch_and_bound.py`).

A layout is compared with plain data parallelism, change by change, the gravest first (`Changes`). The data
axis, ZeRO and the size of a microbatch cost nothing. Predictions are not sure to 5% (their intervals of 90%
are several times as wide), so that of layouts within `NEAR` of the fastest the plainest is the better answer.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from meshwright.hardware.cluster import Cluster
from meshwright.spec import RunSpec

NEAR = 0.05
"""Share by which the predicted step of a simpler layout may be longer than the fastest, to be preferred.

It is about the mean error of the step on published runs that a fit has not seen: below it an order by
predicted seconds says little."""
_RECOMPUTED = {"none": 2, "selective": 3, "full": 4}
"""Policy of recomputation -> its part of `Changes.doublings`."""
DEFAULT_ORDER = "pp-replicate-dp-tp"
"""The order of the axes that a layout has which names none."""


class Changes(NamedTuple):
    """Sort key: the changes of a layout from plain data parallelism, the gravest first."""

    apart: int = 0
    """Tensor ranks that no fast link of a node joins, less one."""
    doublings: int = 2
    """Two to the power of how many changes there are, and once more.

    There is one for each doubling of tensor or pipeline ranks, two for each of context ranks, which change
    what attention does, one for full recomputation and about half of one for selective. With fewer of them a
    copy of the model is on fewer devices, and more of them are left to the data axis.
    """
    stages: int = 1
    """Pipeline ranks."""
    experts: int = 0
    """Ranks of experts, and parts of each, that are dealt out over more than a node, less one. Within a node
    they fold out of data ranks, and cost nothing."""
    odd: int = 0
    """How many of schedule, cut, order of the axes and replicas are not 1f1b, even, the default and 1."""


class Ordering:
    """The changes that layouts on a cluster make."""

    def __init__(self, cluster: Cluster) -> None:
        self._node = cluster.node
        self._joined = 1 if cluster.levels[0].kind == "pcie" else cluster.node

    def least(
        self, tp: int, cp: int = 1, policy: str = "none", pp: int = 1, experts: int = 1, odd: int = 0
    ) -> Changes:
        """The changes of a layout of which so much is known, where the rest is plain."""
        apart = tp - 1 if tp > self._joined else 0
        far = experts - 1 if experts > self._node else 0
        doublings = tp * cp**2 * pp * _RECOMPUTED[policy]
        return Changes(apart, doublings, pp, far, odd)

    def of(self, spec: RunSpec) -> Changes:
        """The changes that a run's layout makes."""
        at = spec.layout
        odd = oddities(at.pp, at.schedule, at.stages, at.order) + (at.replicate > 1)
        return self.least(at.tp, at.cp, spec.recompute.policy, at.pp, at.ep * at.etp, odd)


def oddities(pp: int, schedule: str, stages: object, order: str) -> int:
    """How many of schedule, cut and order of the axes are other than 1f1b, even and the default."""
    if pp == 1:
        return int(order != DEFAULT_ORDER)
    return (schedule != "1f1b") + (stages != "even") + (order != DEFAULT_ORDER)


def simpler(one: RunSpec, other: RunSpec, ordering: Ordering) -> str:
    """Words for what the first of two layouts changes less than the other; empty if it changes more."""
    mine, more = ordering.of(one), ordering.of(other)
    if mine >= more:
        return ""
    name = next(name for name in Changes._fields if getattr(mine, name) < getattr(more, name))
    if name == "doublings":
        return ", ".join(_fewer(one, other))
    return {
        "apart": "tensor ranks are joined by a fast link",
        "stages": f"pp {mine.stages} instead of {more.stages}",
        "experts": "experts within a node" if not mine.experts else "experts on fewer nodes",
        "odd": "a plainer schedule, cut, order of the axes or sharding",
    }[name]


def _fewer(one: RunSpec, other: RunSpec) -> Iterator[str]:
    """Yield what of the doublings of `other` the first layout has less of."""
    for axis in ("cp", "pp", "tp"):
        size, more = getattr(one.layout, axis), getattr(other.layout, axis)
        if size < more:
            yield f"no {axis}" if size == 1 else f"{axis} {size} instead of {more}"
    mine, theirs = one.recompute.policy, other.recompute.policy
    if _RECOMPUTED[mine] < _RECOMPUTED[theirs]:
        yield "no recomputation" if mine == "none" else "selective instead of full recomputation"
