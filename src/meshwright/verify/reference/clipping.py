"""Clipping of gradients on one device, as the papers state it, written apart from what `verify` checks."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from meshwright.spec.train import TrainSpec


class ReferenceClipping:
    """Clips the gradients of one step after the other."""

    def __init__(self, train: TrainSpec) -> None:
        self._train = train
        self._norms = torch.zeros(0, dtype=torch.float64)
        """Norms of all steps so far, clipped by ZClip, from which its averages are computed anew."""

    def clip(self, gradients: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The clipped gradients of the next step."""
        clipped = dict(gradients)
        if self._train.clip_parameter is not None:
            for name, gradient in gradients.items():
                own = float(norm_of({name: gradient}))
                clipped[name] = gradient * min(1.0, self._train.clip_parameter / (own + 1e-6))
        norm = norm_of(clipped)
        factor = torch.ones((), dtype=torch.float64)
        if self._train.zclip is not None:
            most = self._zclip(norm, self._train.zclip)
            self._norms = torch.cat([self._norms, most.view(1)])
            if most < norm:
                factor = most / (norm + 1e-6)
        if self._train.clip is not None:
            factor = torch.minimum(factor, self._train.clip / (norm + 1e-6))
        return {name: gradient * float(factor) for name, gradient in clipped.items()}

    def _zclip(self, norm: Tensor, threshold: float) -> Tensor:
        """Section 3 of Kumar et al. (2025), with the reciprocal rule: the norm after its clipping."""
        alpha, warmup = self._train.zclip_alpha, self._train.zclip_warmup
        if len(self._norms) < warmup:
            return norm
        first = self._norms[:warmup]
        mean, variance = first.mean(), first.var(unbiased=False)
        for each in self._norms[warmup:]:
            mean = alpha * mean + (1 - alpha) * each
            variance = alpha * variance + (1 - alpha) * (each - mean).square()
        z = (norm - mean) / (variance.sqrt() + 1e-6)
        return mean + threshold**2 / z * variance.sqrt() if z > threshold else norm


def norm_of(gradients: Mapping[str, Tensor]) -> Tensor:
    """The norm of all gradients together, a scalar in float64 on the CPU."""
    return (
        torch.stack([gradient.double().square().sum().cpu() for gradient in gradients.values()]).sum().sqrt()
    )
