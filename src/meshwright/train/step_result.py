"""The result of a training step: its loss, norm and rate, and what became of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class StepResult:
    """The result of one step: `loss` in nats a token, over the global batch; `grad_norm` before clipping."""

    loss: float
    grad_norm: float
    rate: float
    applied: bool
    """False when a gradient was not finite: then nothing was changed, on any rank."""
    waiting: bool
    """True if no gradient was due yet: one is applied `spec.staleness` steps late. `grad_norm` is 0 then."""
    failures: int
    """Number of ranks that reported a failure."""
    stops: int
    """Number of ranks that were asked to stop; step groups learn of each other's in their next exchange."""
    loss_scale: float
    """The loss scale that the step was computed with."""
    further_loss: float | None = None
    """The mean loss of the tokens after the next ones, where the model predicts them, without its factor."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Fields that parts of the step add to its metrics."""
