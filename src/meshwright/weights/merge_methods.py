"""Ways to make one tensor of several models' own, in float64.

    linear            sum(w_i x_i) / sum(w_i)                    (Wortsman et al. 2022, "Model soups")
    slerp             along the great circle between two         (Shoemake 1985)
    task_arithmetic   b + sum(w_i (x_i - b)), b the base's       (Ilharco et al. 2022)
    ties              b + the mean of the largest changes that   (Yadav et al. 2023)
                      have the elected sign
    dare_ties         TIES, on changes of which a random share   (Yu et al. 2023)
                      is dropped and the rest scaled up

TIES trims each tensor by itself, not the whole model at once, so that one parameter is in memory at a time.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from meshwright.kernels.splitmix64 import mix64_, shift, stream

PARALLEL = 1e-6
"""Sine of the angle below which slerp is a straight line: they differ by less than its square."""


def linear(values: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
    """Return the weighted mean of tensors of one shape."""
    return _sum(values, weights) / math.fsum(weights)


def slerp(values: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
    """Return the point on the arc from the first tensor to the second, at the second's share of the weights.

    The angle is that between the flattened tensors; where they are parallel, opposite or zero, the arc is a
    straight line.
    """
    first, second = values
    share = weights[1] / math.fsum(weights)
    norms = float(first.norm()), float(second.norm())
    if min(norms) > 0:
        one, other = first / norms[0], second / norms[1]
        angle = 2 * math.atan2(float((one - other).norm()), float((one + other).norm()))
        if math.sin(angle) > PARALLEL:
            factors = math.sin((1 - share) * angle), math.sin(share * angle)
            return (factors[0] * first + factors[1] * second) / math.sin(angle)
    return first + share * (second - first)


def task_arithmetic(values: Sequence[Tensor], weights: Sequence[float], base: Tensor) -> Tensor:
    """Return the base plus the weighted changes that the models made to it."""
    return _sum([base, *values], [1 - math.fsum(weights), *weights])


def ties(values: Sequence[Tensor], weights: Sequence[float], base: Tensor, density: float) -> Tensor:
    """Return the base plus the elected mean of each model's largest changes, the share `density` of them.

    Of changes of equal size those of lower index are kept.
    """
    count = math.ceil(density * base.numel())
    trimmed = []
    for value in values:
        order = (value - base).abs().flatten().sort(descending=True, stable=True).indices
        kept = torch.zeros(base.numel(), dtype=torch.bool)
        kept[order[:count]] = True
        trimmed.append(torch.where(kept.view(base.shape), value, base))
    return _elected(trimmed, weights, base)


def dare_ties(
    values: Sequence[Tensor], weights: Sequence[float], base: Tensor, density: float, seed: int, name: str
) -> Tensor:
    """Return the base plus the elected mean of changes, of which each is kept with the probability `density`.

    Those that are kept are divided by it. The draw of an element is a function of (seed, number of the
    model, the parameter's `name`, index of the element).
    """
    index = torch.arange(base.numel()).view(base.shape)
    dropped = []
    for number, value in enumerate(values):
        text = f"{seed}:{number}:{name}"
        key = int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little")
        drawn = shift(mix64_(stream(index, key)), 11).double() * 2.0**-53
        scaled = value if density == 1 else base + (value - base) / density
        dropped.append(torch.where(drawn < density, scaled, base))
    return _elected(dropped, weights, base)


def _elected(values: Sequence[Tensor], weights: Sequence[float], base: Tensor) -> Tensor:
    """Return the weighted mean of those values whose change of the base has the sign of the summed changes.

    The base where none has.
    """
    sign = _sum([value - base for value in values], weights).sign()
    agree = [((value - base).sign() == sign) & (sign != 0) for value in values]
    above = _sum([value * chosen for value, chosen in zip(values, agree, strict=True)], weights)
    below = _sum([chosen.double() for chosen in agree], weights)
    return torch.where(below > 0, above / below, base)


def _sum(values: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
    total = weights[0] * values[0]
    for value, weight in zip(values[1:], weights[1:], strict=True):
        total = total + weight * value
    return total


METHODS: dict[str, Callable[..., Tensor]] = {
    "linear": linear, "slerp": slerp, "ties": ties, "dare_ties": dare_ties,
    "task_arithmetic": task_arithmetic,
}  # fmt: skip
WITH_BASE = ("ties", "dare_ties", "task_arithmetic")
"""Methods that merge changes of a base."""
WITH_DENSITY = ("ties", "dare_ties")
"""Methods that keep a share of these."""
