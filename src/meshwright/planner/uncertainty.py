"""How sure a prediction is, from the residuals of published runs (`meshwright validate`).

The logarithm of measured over predicted step time is taken as normal, with a standard deviation of its own
where a program was calibrated and a wider one where it never was; what was not known of a run widens it.
The errors have longer tails than a normal's, so the deviation is that which makes intervals of 90% hold 90%
of the runs.
"""

from __future__ import annotations

from math import erf, exp, sqrt

from meshwright.planner.hardware import Cluster

SIGMA_TIME = 0.09
"""Standard deviation of the logarithm of step time."""
SIGMA_UNSEEN = 0.18
"""The same on a device or a program that no measured run calibrated."""
SIGMA_GUESS = 0.03
"""What each thing that was not known adds, in squares."""
SIGMA_MEMORY = 0.06
"""Standard deviation of memory, as a share of it."""
_NINETY = 1.645


def time_sigma(unknown: int = 0, seen: bool = True) -> float:
    """Standard deviation of the logarithm of step time, where `unknown` things were inferred."""
    return sqrt((SIGMA_TIME if seen else SIGMA_UNSEEN) ** 2 + unknown * SIGMA_GUESS**2)


def time_interval(seconds: float, unknown: int = 0, seen: bool = True) -> tuple[float, float]:
    """Seconds between which the step lies with a probability of 90%."""
    away = exp(_NINETY * time_sigma(unknown, seen))
    return seconds / away, seconds * away


def fits_probability(needed: float, capacity: float) -> float:
    """The probability that a run predicted to need so many bytes needs no more than `capacity`."""
    return 0.5 * (1 + erf((capacity - needed) / (SIGMA_MEMORY * needed * sqrt(2))))


def room(cluster: Cluster) -> float:
    """Bytes of memory that one rank has."""
    shared = cluster.sharing if cluster.device.kind == "cpu" else 1
    return cluster.device.memory / shared
