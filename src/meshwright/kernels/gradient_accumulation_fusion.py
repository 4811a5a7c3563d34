"""A sum of matrix products that are added where it lies, such as a parameter's gradients in a step.

A product of bf16 or fp16 is summed in fp32 inside. A result in the operands' format is rounded before it is
added to those of other microbatches. On CUDA it is added as it is, to fp32 within the product, as
Megatron-LM's `gradient_accumulation_fusion` does.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn

HALF = (torch.bfloat16, torch.float16)


def _writes_wider(left: Tensor, total: Tensor) -> bool:
    """True if a kernel writes products of such operands in the format of `total`: cuBLAS's, to fp32."""
    return left.is_cuda and left.dtype in HALF and total.dtype is torch.float32


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
        """Add a product to `total` (O, I): within the product, if that can be in the format of the sum."""
        total, form = self.total, self.total.dtype
        if left_ON.dtype == form:
            if self.begun:
                torch.addmm(total, left_ON, right_NI, out=total)
            else:
                torch.mm(left_ON, right_NI, out=total)
        elif _writes_wider(left_ON, total):
            if self.begun:
                torch.addmm(total, left_ON, right_NI, out_dtype=form, out=total)
            else:
                torch.mm(left_ON, right_NI, out_dtype=form, out=total)
        else:
            self.add(left_ON @ right_NI)

    def write(self, compute: Callable[[Tensor], Tensor]) -> None:
        """Add what `compute` returns, which it writes to contiguous memory that it is given, in the format of
        the sum: to `total` itself where nothing lies there yet."""
        if self.begun or not self.total.is_contiguous():
            self.add(compute(torch.empty_like(self.total, memory_format=torch.contiguous_format)))
        else:
            compute(self.total)


GradientSum = Callable[[nn.Parameter], RunningSum | None]
"""Parameter -> the sum to which a backward adds its gradient at once, in place of returning it; None where
the gradient has to be returned. A second call is for a second gradient."""


def no_sum(_parameter: nn.Parameter) -> None:
    """A `GradientSum` by which all gradients are returned."""
