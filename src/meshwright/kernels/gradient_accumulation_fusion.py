"""A sum of matrix products that are added where it lies, such as a parameter's gradients in a step."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn


class RunningSum(NamedTuple):
    """`total` holds numbers to add to if `begun`; else it is uninitialised, and the first product is written
    there."""

    total: Tensor
    begun: bool

    def add(self, x: Tensor) -> None:
        """Add a tensor of the total's shape, in any format."""
        if self.begun:
            self.total.add_(x)
        else:
            self.total.copy_(x)

    def add_product(self, left_ON: Tensor, right_NI: Tensor) -> None:
        """Add a product to `total` (O, I): within the product, if both are in one format."""
        if left_ON.dtype != self.total.dtype:
            self.add(left_ON @ right_NI)
        elif self.begun:
            torch.addmm(self.total, left_ON, right_NI, out=self.total)
        else:
            torch.mm(left_ON, right_NI, out=self.total)


GradientSum = Callable[[nn.Parameter], RunningSum | None]
"""Parameter -> the sum to which a backward adds its gradient at once, in place of returning it; None where
the gradient has to be returned. A second call is for a second gradient."""


def no_sum(_parameter: nn.Parameter) -> None:
    """A `GradientSum` by which all gradients are returned."""
