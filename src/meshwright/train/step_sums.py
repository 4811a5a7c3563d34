"""The numbers of a step that are summed over all ranks, on the device and on the host."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from meshwright.data.loader import Batch


class Totals(NamedTuple):
    """Numbers of one step that all ranks need, summed over all of them."""

    squares: float
    """The square of the norm of the gradients that the backward left, without `Trainer.gradient_factor`."""
    loss: float
    targets: float
    """Targets of the step after this one."""
    failures: float
    stops: float


class Sums:
    """Numbers of a step in float64, summed over all ranks, on their way from the device to the host."""

    def __init__(self, numbers: Tensor, following: Batch | None = None) -> None:
        """`numbers` are those of `Totals`, then the squares of the parameters' norms where these are clipped.

        `following` is the batch whose targets are counted.
        """
        self.on_device, self.following = numbers, following

    def start_read(self, *more: Tensor) -> Callable[[], list[float]]:
        """Start to copy the numbers, and `more` after them, behind what the device has been given until now.

        Returns a function that waits for the copy, and not for what the device is given in between.
        """
        joined = torch.cat([self.on_device, *more]) if more else self.on_device
        copy, came = joined.to("cpu", non_blocking=True), torch.cuda.Event() if joined.is_cuda else None
        if came is not None:
            came.record()

        def read() -> list[float]:
            if came is not None:
                came.synchronize()
            numbers: list[float] = copy.tolist()
            return numbers

        return read
