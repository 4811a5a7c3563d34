"""Limits of the gradient's norm: a fixed one, and one that follows the norms of the steps before."""

from __future__ import annotations

import math
from typing import Any

from typing_extensions import TypedDict

from meshwright.spec.records import NotNegative
from meshwright.spec.train import TrainSpec


class ZClipState(TypedDict):
    """State of a `ZClip` in a checkpoint."""

    norms: list[NotNegative]
    mean: NotNegative
    variance: NotNegative


class ZClip:
    """ZClip (Kumar et al. 2025, arXiv 2504.02507): clips norms that are far above their moving average.

    The mean and the variance of the first `warmup` norms begin two moving averages. A later norm with
    z = (norm - mean) / std above the threshold z' is clipped to mean + z'^2 / z x std, and the averages take
    the norm as it was clipped here, the mean first.
    """

    def __init__(self, threshold: float, alpha: float, warmup: int) -> None:
        self.threshold, self.alpha, self.warmup = threshold, alpha, warmup
        self.restore({"norms": [], "mean": 0.0, "variance": 0.0})

    def limit(self, norm: float) -> float:
        """The largest norm of a step whose gradient has this one, which is taken note of; may be infinite."""
        if len(self._norms) < self.warmup:
            self._norms.append(norm)
            self._mean = sum(self._norms) / len(self._norms)
            self._variance = sum((each - self._mean) ** 2 for each in self._norms) / len(self._norms)
            return math.inf
        deviation = math.sqrt(self._variance)
        z = (norm - self._mean) / (deviation + 1e-6)
        spike = z > self.threshold
        clipped = self._mean + self.threshold**2 / z * deviation if spike else norm
        self._mean += (1 - self.alpha) * (clipped - self._mean)
        self._variance += (1 - self.alpha) * ((clipped - self._mean) ** 2 - self._variance)
        return clipped if spike else math.inf

    def state(self) -> ZClipState:
        """The state for a checkpoint: the norms of the warm-up, the mean and the variance."""
        return {"norms": [*self._norms], "mean": self._mean, "variance": self._variance}

    def restore(self, state: ZClipState | dict[str, Any]) -> None:
        """Continue from `state()`."""
        self._norms: list[float] = [*state["norms"]]
        self._mean, self._variance = float(state["mean"]), float(state["variance"])


class Clipping:
    """The limits of a run; the least of them holds."""

    def __init__(self, train: TrainSpec) -> None:
        self.fixed = math.inf if train.clip is None else train.clip
        self.zclip = (
            None if train.zclip is None else ZClip(train.zclip, train.zclip_alpha, train.zclip_warmup)
        )

    def factor(self, norm: float) -> float:
        """Factor of all gradients in a step whose gradient has this finite norm."""
        limit = min(self.fixed, math.inf if self.zclip is None else self.zclip.limit(norm))
        return min(1.0, limit / (norm + 1e-6))
