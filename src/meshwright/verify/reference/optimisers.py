"""Updates of the optimisers on one parameter as their papers state them, written apart from `train/`."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from meshwright.spec.train import TrainSpec
from meshwright.verify.reference.schedule import rate_of_step


@torch.no_grad()
def update(
    parameter: Tensor,
    grad: Tensor,
    moments: Sequence[Tensor],
    train: TrainSpec,
    number: int,
    factor: float = 1.0,
    decay: float | None = None,
    updates: int | None = None,
) -> None:
    """The step of the run's optimiser on one parameter, in place, at `factor` times the learning rate.

    By default each of the `number` steps was an update, matrices are decayed by `train.weight_decay`, and
    vectors are not.
    """
    if decay is None:
        decay = train.weight_decay if parameter.ndim >= 2 else 0.0
    rate = factor * rate_of_step(train, number)
    direction = _DIRECTIONS[train.optimiser](grad, moments, train, number if updates is None else updates)
    parameter.sub_(rate * (direction + decay * parameter))


def _adamw(grad: Tensor, moments: Sequence[Tensor], train: TrainSpec, updates: int) -> Tensor:
    """Algorithm 2 of Loshchilov & Hutter (2019): the direction of the step, without decay."""
    first, second = moments
    first.mul_(train.beta1).add_(grad, alpha=1 - train.beta1)
    second.mul_(train.beta2).addcmul_(grad, grad, value=1 - train.beta2)
    corrected = first / (1 - train.beta1**updates)
    return corrected / ((second / (1 - train.beta2**updates)).sqrt() + train.eps)


def _lion(grad: Tensor, moments: Sequence[Tensor], train: TrainSpec, updates: int) -> Tensor:
    """Algorithm 2 of Chen et al. (2023): the direction of the step, without decay."""
    (momentum,) = moments
    direction = torch.sign(train.beta1 * momentum + (1 - train.beta1) * grad)
    momentum.mul_(train.beta2).add_(grad, alpha=1 - train.beta2)
    return direction


def _sgd(grad: Tensor, moments: Sequence[Tensor], train: TrainSpec, updates: int) -> Tensor:
    """Heavy-ball momentum (Polyak 1964) in the form of Sutskever et al. (2013)."""
    (momentum,) = moments
    return momentum.mul_(train.beta1).add_(grad)


def _muon(grad: Tensor, moments: Sequence[Tensor], train: TrainSpec, updates: int) -> Tensor:
    """The step of matrices (..., r, c) by Jordan et al. (2024), in the scale of Liu et al. (2025), by an SVD.

    A Newton-Schulz step applies an odd polynomial to the singular values.
    """
    if len(moments) == 2:  # not a matrix of a block
        return _adamw(grad, moments, train, updates)
    (momentum,) = moments
    momentum.mul_(train.beta1).add_(grad, alpha=1 - train.beta1)
    left, values, right = torch.linalg.svd(
        train.beta1 * momentum + (1 - train.beta1) * grad, full_matrices=False
    )
    values = values / (values.square().sum(-1, keepdim=True).sqrt() + 1e-7)
    for _ in range(5):
        values = 3.4445 * values - 4.775 * values**3 + 2.0315 * values**5
    return 0.2 * max(grad.shape[-2:]) ** 0.5 * (left * values.unsqueeze(-2)) @ right


_DIRECTIONS: dict[str, Callable[[Tensor, Sequence[Tensor], TrainSpec, int], Tensor]] = {
    "adamw": _adamw, "adamw8bit": _adamw, "lion": _lion, "muon": _muon, "sgd": _sgd
}  # fmt: skip
"""Optimiser -> the direction of a step from its gradient, the moments, `[train]` and the update's number."""
