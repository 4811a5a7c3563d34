"""A linear map whose weights are allocated, not filled: `init.py` or a checkpoint gives their values."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Project = Callable[[Tensor, Sequence["Linear"]], tuple[Tensor, ...]]
"""How several linear maps are applied to one input."""

Leave = Callable[[Tensor, "Linear"], Tensor]
"""How a linear map is applied that ends an attention or feed-forward layer."""


def project(x: Tensor, linears: Sequence[Linear]) -> tuple[Tensor, ...]:
    """Each map's output."""
    return tuple(linear(x) for linear in linears)


def leave(x: Tensor, linear: Linear) -> Tensor:
    """The map's output."""
    output: Tensor = linear(x)
    return output


class Linear(nn.Module):
    """x (..., inputs) -> (..., outputs); weight (outputs, inputs)."""

    def __init__(self, inputs: int, outputs: int, bias: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(outputs, inputs))
        self.bias = nn.Parameter(torch.empty(outputs)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)
