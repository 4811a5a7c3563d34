"""Gradients that are applied late, written apart from what `meshwright verify` checks.

The delay is that of Langford et al. (2009); the learning rate over the staleness that of Zhang et al. (2016).
"""

from __future__ import annotations

from collections import deque

from torch import Tensor

from meshwright.spec import RunSpec


class GradientQueue:
    """Gradients by name of the last steps, which are applied `spec.staleness` steps after their own."""

    def __init__(self, spec: RunSpec) -> None:
        self._late = spec.staleness
        self._waiting: deque[dict[str, Tensor]] = deque()
        self.rate_factor = 1.0 / spec.staleness_lr_divisor
        """Factor on the learning rate of a step."""

    def due(self, gradients: dict[str, Tensor]) -> dict[str, Tensor] | None:
        """Take the gradients of a step; returns those that it applies, or None where there are none yet."""
        self._waiting.append(gradients)
        return self._waiting.popleft() if len(self._waiting) == self._late + 1 else None
