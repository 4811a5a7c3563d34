"""Updates on one device: of parameters, moments and averages, by gradients that are due and are clipped."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from meshwright.spec import RunSpec
from meshwright.verify.reference.adamw8bit import round_moments
from meshwright.verify.reference.clipping import ReferenceClipping
from meshwright.verify.reference.groups import factor_and_decay
from meshwright.verify.reference.optimisers import update
from meshwright.verify.reference.rounding import stochastic
from meshwright.verify.reference.staleness import GradientQueue


class ReferenceUpdates:
    """Takes one step after the other on `parameters`, in place; names are those of the decoder."""

    def __init__(self, spec: RunSpec, parameters: Mapping[str, Tensor]) -> None:
        self.parameters = parameters
        self.moments: dict[str, dict[str, Tensor]] = {kind: {} for kind in spec.train.moments}
        """Moments by kind and name, zero before the first step."""
        for name, parameter in parameters.items():
            for kind in spec.train.moments_of(name, parameter.ndim):
                self.moments[kind][name] = torch.zeros_like(parameter)
        kept = parameters if spec.train.ema else {}
        self.averages = {name: parameter.detach().clone() for name, parameter in kept.items()}
        self._spec, self.count = spec, 0
        self._clipping, self._queue = ReferenceClipping(spec.train), GradientQueue(spec)

    def take(self, number: int, gradients: dict[str, Tensor]) -> dict[str, Tensor]:
        """Take step `number` with the gradients of its batch; returns those that it applies, not clipped.

        Gradients of other parameters count in the norm.
        """
        spec, due = self._spec, self._queue.due(gradients)
        if due is None:
            return {name: torch.zeros_like(gradient) for name, gradient in gradients.items()}
        clipped = self._clipping.clip(due)
        self.count += 1
        for name, parameter in self.parameters.items():
            own = [kept[name] for kept in self.moments.values() if name in kept]
            factor, decay = factor_and_decay(spec, name, parameter.ndim)
            factor *= self._queue.rate_factor
            update(parameter, clipped[name], own, spec.train, number, factor, decay, self.count)
            round_moments(self.moments, spec, name)
            if spec.precision.master == "bf16":
                parameter.data = stochastic(parameter, spec.train.seed, self.count, name)
            if spec.train.ema is not None:
                self.averages[name] = averaged(self.averages[name], parameter.detach(), spec.train.ema)
        return due


def averaged(average: Tensor, weights: Tensor, decay: float) -> Tensor:
    """The exponential moving average of the weights after a step (Polyak & Juditsky 1992)."""
    return decay * average + (1 - decay) * weights
