"""How sure a prediction is, from the residuals of published runs (`meshwright validate`).

The logarithm of measured over predicted step time is taken as normal. Errors have longer tails than a
normal's, so the deviation is that which makes intervals of 90% hold 90% of the runs. What was not known of
a run widens it, and so does a program that no measured run has timed on such a device.
"""

from __future__ import annotations

from math import erf, exp, sqrt
from statistics import NormalDist

from meshwright.hardware.cluster import Cluster
from meshwright.planner.cost.software import SoftwareStack

SIGMA_TIME = 0.09
"""Standard deviation of ln(measured / predicted) step seconds, for stacks that were timed on a device."""
SIGMA_GUESS = 0.03
"""What each thing that was not known of a run adds to it, in squares."""
SIGMA_MEMORY = 0.06
"""Standard deviation of measured / predicted - 1 of a device's memory."""
UNTIMED = 2.0
"""How many times as wide both are where no run of the stack on such a device is known."""
SURE = 0.8
"""Probability with which a plan fits at least."""
_Z = 1.6449
"""Standard deviations on each side of the middle that hold 90% of a normal distribution."""


def spread(cluster: Cluster, stack: SoftwareStack) -> float:
    """Factor on both standard deviations: what is not known of a stack on a device makes them wider."""
    return UNTIMED if stack.ours and cluster.device.kind != "cpu" else 1.0


def interval(seconds: float, wider: float = 1.0, unknown: int = 0) -> tuple[float, float]:
    """The seconds between which a step of predicted `seconds` is in 9 of 10 cases, log-normally.

    `unknown` is how many things about the run were inferred.
    """
    factor = exp(_Z * sqrt((SIGMA_TIME * wider) ** 2 + unknown * SIGMA_GUESS**2))
    return seconds / factor, seconds * factor


def fits_probability(need: float, room: float, wider: float = 1.0) -> float:
    """The probability that predicted `need` bytes are at most `room`."""
    return 0.5 * (1 + erf((room - need) / (SIGMA_MEMORY * wider * need) / sqrt(2)))


def fitting(room: float, wider: float = 1.0) -> float:
    """The most bytes that fit into `room` with a probability of `SURE`."""
    return room / (1 + NormalDist().inv_cdf(SURE) * SIGMA_MEMORY * wider)


def room(cluster: Cluster) -> float:
    """Bytes of memory that one rank has."""
    shared = cluster.sharing if cluster.device.kind == "cpu" else 1
    return cluster.device.memory / shared
