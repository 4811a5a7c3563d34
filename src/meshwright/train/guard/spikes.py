"""Detection of loss spikes from the loss and the gradient's norm of each step.

A spike is a loss many standard deviations above an exponentially weighted mean, with a gradient norm that is
a multiple of the recent median, for some steps in a row: one bad batch, from which the loss comes back by
itself, is none. PaLM (Chowdhery et al. 2022, §5.1) had some 20, each mended by going back about 100 steps and
leaving out the 200 to 500 batches around it; in another state the same batches did no harm.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from typing import Any

from typing_extensions import TypedDict

from meshwright.spec.records import Natural, NotNegative, Number
from meshwright.spec.sections import RecoverySpec


class SpikesState(TypedDict):
    """State of a `SpikeDetector` in a checkpoint."""

    seen: Natural
    mean: Number
    variance: NotNegative
    norms: list[NotNegative]
    suspects: list[Natural]


class SpikeDetector:
    """Mean and variance of the loss and the median of the norm over about `spike_window` good steps.

    It judges once it has seen that many. The mean and the variance are those of West (1979) with weights that
    decay as in a moving average of the window. Steps of a spike are not taken into them.
    """

    def __init__(self, recovery: RecoverySpec) -> None:
        self._recovery = recovery
        self._seen = 0
        self._mean = self._variance = 0.0
        self._norms: deque[float] = deque(maxlen=recovery.spike_window)
        self._suspects: list[int] = []

    def first_step(self, step: int, loss: float, norm: float) -> int | None:
        """Take note of an applied step; the first step of a spike if this one completes it, else None.

        One whose loss is not finite is left out: its gradient, which is applied late, will be skipped.
        """
        if not (math.isfinite(loss) and math.isfinite(norm)):
            return None
        if not self._is_high(loss, norm):
            self._learn(loss, norm)
            self._suspects.clear()
            return None
        self._suspects.append(step)
        return self._suspects[0] if len(self._suspects) >= self._recovery.spike_steps else None

    def _is_high(self, loss: float, norm: float) -> bool:
        recovery = self._recovery
        if self._seen < recovery.spike_window:
            return False
        limit = self._mean + recovery.spike_sigmas * math.sqrt(self._variance)
        return loss > limit and norm > recovery.spike_norms * statistics.median(self._norms)

    def _learn(self, loss: float, norm: float) -> None:
        weight = max(2 / (self._recovery.spike_window + 1), 1 / (self._seen + 1))
        ahead = loss - self._mean
        self._mean += weight * ahead
        self._variance = (1 - weight) * (self._variance + weight * ahead * ahead)
        self._norms.append(norm)
        self._seen += 1

    def state(self) -> SpikesState:
        """State for a checkpoint: a run that goes on from there judges as if it had not stopped."""
        return {
            "seen": self._seen,
            "mean": self._mean,
            "variance": self._variance,
            "norms": list(self._norms),
            "suspects": list(self._suspects),
        }

    def restore(self, state: SpikesState | dict[str, Any]) -> None:
        """Continue from `state()`."""
        self._seen, self._mean, self._variance = state["seen"], state["mean"], state["variance"]
        self._norms = deque(state["norms"], maxlen=self._recovery.spike_window)
        self._suspects = list(state["suspects"])
