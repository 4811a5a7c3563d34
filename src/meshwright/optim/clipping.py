"""Limits of gradients' norms: of all gradients together, fixed or following the steps before, and of each
parameter's.

Wire          the squares of the norms of all parameters, 8 bytes each, join the numbers that a step sums over
              all ranks; nothing without `train.clip_parameter`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NotRequired

import torch
from torch import Tensor
from typing_extensions import TypedDict

from meshwright.parallel.data_parallel import DataParallel
from meshwright.parallel.step_part import StepPart
from meshwright.spec import RunSpec
from meshwright.spec.parameter_groups import run_parameters
from meshwright.spec.records import NotNegative


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


class ParameterNorms:
    """The norm of each parameter's gradient, whole over all ranks.

    An element counts on one rank only, as in the norm of all (`parallel/grad_norm.py`).
    """

    def __init__(self, states: DataParallel, spec: RunSpec) -> None:
        self._states = states
        names = [parameter.name for unit in run_parameters(spec).values() for parameter in unit]
        self._places = {name: place for place, name in enumerate(names)}
        self.squares: list[float] = []
        """Squares of all parameters' norms in this step, without `Trainer.gradient_factor`."""

    def own_squares(self) -> Tensor:
        """This rank's share of the squares, in float64 on the device."""
        states = self._states
        squares = torch.zeros(len(self._places), dtype=torch.float64, device=states.mesh.device)
        for unit in states.trained:
            for slot in unit.counted_slots(states.elsewhere):
                norm = torch.linalg.vector_norm(unit.gradient_of(slot), dtype=torch.float64)
                squares[self._places[slot.key]] += norm.square()
        return squares

    def clip(self, largest: float, gradient_factor: float) -> float:
        """Scale each gradient whose norm is larger down to `largest`; returns the norm of all after that.

        Norms are those of gradients times `gradient_factor`.
        """
        norms = [math.sqrt(square) * gradient_factor for square in self.squares]
        factors = [min(1.0, largest / (norm + 1e-6)) for norm in norms]
        for unit in self._states.trained:
            for slot in unit.slots:
                if factors[self._places[slot.key]] < 1.0:
                    unit.gradient_of(slot).mul_(factors[self._places[slot.key]])
        return math.hypot(*(norm * factor for norm, factor in zip(norms, factors, strict=True)))


class _Fields(TypedDict):
    """Fields of a checkpoint's state."""

    zclip: NotRequired[ZClipState]


class Clipping(StepPart):
    """The limits of a run: first that of each parameter, then the least of those of all gradients."""

    Fields = _Fields

    def __init__(self, spec: RunSpec, states: DataParallel) -> None:
        train = self.train = spec.train
        self.states = states
        self.parameters = None if train.clip_parameter is None else ParameterNorms(states, spec)
        self.zclip = (
            None if train.zclip is None else ZClip(train.zclip, train.zclip_alpha, train.zclip_warmup)
        )

    def clip(self, norm: float, gradient_factor: float) -> float:
        """Clip each parameter's gradient, and return the factor that is left for all that the backward left.

        `gradient_factor` makes gradients of that; `norm` is the finite norm of all of them together.
        """
        if self.parameters is not None and self.train.clip_parameter is not None:
            norm = self.parameters.clip(self.train.clip_parameter, gradient_factor)
        return self.factor(norm) * gradient_factor

    def own_squares(self) -> list[Tensor]:
        """This rank's share of the squares of the parameters' norms, where these are clipped, or nothing."""
        return [] if self.parameters is None else [self.parameters.own_squares()]

    def take_squares(self, squares: list[float]) -> None:
        """Take the squares of the parameters' norms, summed over all ranks."""
        if self.parameters is not None:
            self.parameters.squares = squares

    @property
    def on_device(self) -> bool:
        """True if `divisor` is all there is to clip, and nothing of it is kept on the host."""
        return self.parameters is None and self.zclip is None

    def divisor(self, squares: Tensor, gradient_factor: float) -> Tensor:
        """1 / `clip`, a scalar in float64 on the device; not finite where the norm is not.

        `squares` is the square of the norm of what the backward left.
        """
        limit = math.inf if self.train.clip is None else self.train.clip
        norm = squares.sqrt().add_(1e-6 / gradient_factor)
        return norm.div_(limit).clamp_(min=1.0 / gradient_factor)  # an infinity by another is NaN

    def factor(self, norm: float) -> float:
        """Factor of all gradients in a step whose gradient has this finite norm."""
        fixed = math.inf if self.train.clip is None else self.train.clip
        limit = min(fixed, math.inf if self.zclip is None else self.zclip.limit(norm))
        return min(1.0, limit / (norm + 1e-6))

    def state(self) -> dict[str, Any]:
        """The moving averages of ZClip, for a checkpoint."""
        return {"zclip": self.zclip.state()} if self.zclip is not None else {}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from `state()`; an imported model has none."""
        if self.zclip is not None and "zclip" in state:
            self.zclip.restore(state["zclip"])
