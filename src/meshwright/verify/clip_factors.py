"""Factors by which gradients of norms on both sides of a limit are clipped, beside those of the reference."""

from __future__ import annotations

import torch
from torch import Tensor

from meshwright.optim.clipping import Clipping
from meshwright.spec.train import TrainSpec
from meshwright.verify.reference.clipping import ReferenceClipping

SHARES = 0.01, 0.5, 0.999, 1.001, 2.0, 100.0
"""Norms as shares of the limit; those of a few steps may all be on one side."""
FACTOR = 2.0**-10
"""The factor from what a backward left to gradients, for all of them."""


def clip_factors(clipping: Clipping, train: TrainSpec) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The factors of the device and of the host, and those that are due; none without a fixed limit, or with
    one that follows the steps before or is of each parameter."""
    found: dict[str, Tensor] = {}
    wanted: dict[str, Tensor] = {}
    for share in SHARES if train.clip is not None and clipping.on_device else ():
        norm = torch.tensor(share * (train.clip or 1.0), dtype=torch.float64)
        due = ReferenceClipping(train).clip({"": norm})[""] / norm
        squares = (norm / FACTOR).square()
        of_device = 1 / clipping.divisor(squares, FACTOR) / FACTOR
        of_host = torch.tensor(clipping.factor(float(norm)), dtype=torch.float64)
        for where, factor in (("device", of_device), ("host", of_host)):
            name = f"{share:g} times the limit on the {where}"
            found[name], wanted[name] = factor, due
    return found, wanted
