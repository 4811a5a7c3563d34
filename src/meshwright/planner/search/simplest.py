"""Which of the layouts that are about as fast as the fastest comes first: the one that changes least.

A layout is compared with plain data parallelism, change by change, the gravest first (`Changes`). The data
axis, ZeRO and the size of a microbatch cost nothing. Predictions are not sure to 5% (their intervals of 90%
are several times as wide), so that of layouts within `NEAR` of the fastest the plainest is the better answer.
"""

from __future__ import annotations

from typing import NamedTuple

from meshwright.hardware.cluster import Cluster
from meshwright.spec import RunSpec

NEAR = 0.05
"""Share by which the predicted step of a simpler layout may be longer than the fastest, to be preferred.

It is about the mean error of the step on published runs that a fit has not seen: below it an order by
predicted seconds says little."""
DEFAULT_ORDER = "pp-replicate-dp-tp"
"""The order of the axes that a layout has which names none."""


class Changes(NamedTuple):
    """What a layout changes from plain data parallelism, the gravest first; a sort key."""

    apart: int = 0
    """Tensor ranks that no fast link of a node joins, less one."""
    context: int = 1
    """Context ranks."""
    stages: int = 1
    """Pipeline ranks."""
    tensor: int = 1
    """Tensor ranks."""
    experts: int = 1
    """Ranks that experts are dealt out to, and parts of each."""
    recomputed: int = 0
    """1 if something is recomputed."""
    odd: int = 0
    """How many of schedule, cut and order of the axes are other than 1f1b, even and the default."""


_AXES = {"context": "context", "stages": "pipeline", "tensor": "tensor", "experts": "expert"}
"""Axes by the field that has their size."""


class Ordering:
    """The changes that layouts on a cluster make."""

    def __init__(self, cluster: Cluster) -> None:
        self._joined = 1 if cluster.levels[0].kind == "pcie" else cluster.node

    def least(
        self, tp: int, cp: int = 1, policy: str = "none", pp: int = 1, experts: int = 1, odd: int = 0
    ) -> Changes:
        """The changes of a layout of which so much is known, where the rest is plain."""
        apart = tp - 1 if tp > self._joined else 0
        return Changes(apart, cp, pp, tp, experts, int(policy != "none"), odd)

    def of(self, spec: RunSpec) -> Changes:
        """The changes that a run's layout makes."""
        at = spec.layout
        odd = oddities(at.pp, at.schedule, at.stages, at.order)
        return self.least(at.tp, at.cp, spec.recompute.policy, at.pp, at.ep * at.etp, odd)


def oddities(pp: int, schedule: str, stages: object, order: str) -> int:
    """How many of schedule, cut and order of the axes are other than 1f1b, even and the default."""
    if pp == 1:
        return int(order != DEFAULT_ORDER)
    return (schedule != "1f1b") + (stages != "even") + (order != DEFAULT_ORDER)


def simpler(one: Changes, other: Changes) -> str:
    """What the first of two layouts changes less than the other, in words."""
    name = next(name for name in Changes._fields if getattr(one, name) < getattr(other, name))
    mine, more = getattr(one, name), getattr(other, name)
    if name in _AXES:
        return f"no {_AXES[name]} axis" if mine == 1 else f"{mine} {_AXES[name]} ranks instead of {more}"
    return {
        "apart": "tensor ranks share a fast link" if one.tensor > 1 else "no tensor axis over slow links",
        "recomputed": "no recomputation",
        "odd": "a plainer schedule, cut or order of the axes",
    }[name]
