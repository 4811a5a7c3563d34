"""A linear layer whose parameters are allocated but not filled: `init.py` or a checkpoint sets their
values."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Linear(nn.Module):
    """x (..., inputs) -> (..., outputs); weight (outputs, inputs)."""

    def __init__(self, inputs: int, outputs: int, bias: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(outputs, inputs))
        self.bias = nn.Parameter(torch.empty(outputs)) if bias else None

    def matrix(self) -> Tensor:
        """All that x is multiplied by (outputs, inputs)."""
        return self.weight

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)


def project(x: Tensor, linears: Sequence[Linear]) -> tuple[Tensor, ...]:
    """Apply each of `linears` to x (..., inputs): one (..., outputs) per layer."""
    return tuple(linear(x) for linear in linears)


def apply_linear(x: Tensor, linear: Linear) -> Tensor:
    """Apply one layer to x (..., inputs): (..., outputs)."""
    return linear(x)
