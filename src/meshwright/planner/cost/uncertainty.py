"""Prediction intervals, from the residuals of published runs (`meshwright validate`).

ln(measured / predicted) step time is modelled as normal. Its tails are longer than a normal distribution's,
so the standard deviation is chosen such that 90% intervals hold 90% of the runs. Unknown properties of a run
widen the interval, and so does a software stack that no measured run has timed on such a device.
"""

from __future__ import annotations

from math import erf, exp, sqrt
from statistics import NormalDist

from meshwright.hardware.cluster import Cluster
from meshwright.planner.cost.software import SoftwareStack
from meshwright.spec import ModelSpec

SIGMA_TIME = {"known": 0.08, "new": 0.0885, "experts": 0.23}
"""Standard deviation of ln(measured / predicted) step seconds, by regime. Fitted on: the published runs, each
predicted without its source (`planner/validation/data/left_out.csv`), rounded up."""
SIGMA_GUESS = 0.03
"""Standard deviation that each inferred property of a run adds, in squares. Source: assumed."""
SIGMA_MEMORY = 0.06
"""Standard deviation of measured / predicted - 1 of a device's memory. Fitted on: all published runs."""
UNTIMED = 2.0
"""Factor on both deviations for a stack without any run on such a device. Source: assumed."""
SURE = 0.8
"""Least probability with which a plan must fit. Source: a choice, not a measurement."""
COMFORTABLE = 0.95
"""Probability to fit with which `fit` looks for nothing smaller, and of plans as fast as each other the first
has, if one does. Source: a choice, not a measurement."""
_Z = 1.6449
"""Half-width of the central 90% of a normal distribution, in standard deviations. Source: its 95%
quantile."""


def spread(cluster: Cluster, stack: SoftwareStack) -> float:
    """Factor on both standard deviations for this stack on this cluster.

    No program of the tables of runs is timed on devices of other makers than NVIDIA.
    """
    untimed = cluster.device.kind not in ("cuda", "cpu") or (stack.ours and cluster.device.kind != "cpu")
    return UNTIMED if untimed else stack.spread


def regime(cluster: Cluster, model: ModelSpec) -> str:
    """The key of `SIGMA_TIME`: 'experts', or a dense model on 'known' or on 'new' devices.

    Known are devices that programs of several sources were timed on.
    """
    if model.moe is not None:
        return "experts"
    return "known" if cluster.device.rates.timed else "new"


def factor(regime: str, wider: float = 1.0, unknown: int = 0) -> float:
    """The end of the 90% prediction interval of a step over the predicted seconds; log-normal.

    `unknown` is the number of inferred properties of the run.
    """
    return exp(_Z * sqrt((SIGMA_TIME[regime] * wider) ** 2 + unknown * SIGMA_GUESS**2))


def interval(seconds: float, regime: str, wider: float = 1.0, unknown: int = 0) -> tuple[float, float]:
    """90% prediction interval, (low, high) in seconds, of a step of predicted `seconds`."""
    times = factor(regime, wider, unknown)
    return seconds / times, seconds * times


def fits_probability(need: float, room: float, wider: float = 1.0) -> float:
    """Probability that a predicted need of `need` bytes is at most `room` bytes."""
    return 0.5 * (1 + erf((room - need) / (SIGMA_MEMORY * wider * need) / sqrt(2)))


def fitting(room: float, wider: float = 1.0, probability: float = SURE) -> float:
    """Largest predicted need, in bytes, that fits into `room` bytes with a probability."""
    return room / (1 + NormalDist().inv_cdf(probability) * SIGMA_MEMORY * wider)


def memory_interval(need: float, wider: float = 1.0) -> tuple[float, float]:
    """90% prediction interval, (low, high), of a predicted need of `need` bytes."""
    half = _Z * SIGMA_MEMORY * wider
    return need * (1 - half), need * (1 + half)


def room(cluster: Cluster) -> float:
    """Memory of one rank in bytes."""
    shared = cluster.sharing if cluster.device.kind == "cpu" else 1
    return cluster.device.memory / shared
