"""Sums of the reference's outputs and gradients by token; `verify/module_sums.py` makes a rank's of them."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

PHASES = ("forward", "backward")
Tables = dict[str, dict[str, Tensor]]
"""Phase and module -> (2, n, T): the two sums of each token's output, or of its gradient."""


@cache
def weights(count: int, seed: int) -> Tensor:
    """Return `count` fixed weights between 0.5 and 1.5, in float64."""
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(count, generator=generator, dtype=torch.float64) + 0.5


SEQUENCE, POSITION, CHANNEL = 1, 2, 3
"""Seeds of the weights."""


class ReferenceSums:
    """The sums of one device: `tap` is called with each module's output, in order of the forward."""

    def __init__(self) -> None:
        self.tables: Tables = {phase: {} for phase in PHASES}

    def tap(self, module: str, output: Tensor) -> Tensor:
        """Take down an output (n, T, channels), and later its gradient; returns the output.

        Linear layers within a module are left out: their inputs are not compared, so they would be blamed for
        what comes before them.
        """
        if output.ndim == 3 and module.count(".") <= 2:
            self.tables["forward"][module] = sums_of_tokens(output.detach())
            if output.requires_grad:
                output.register_hook(lambda gradient: self._add(module, gradient))
        return output

    def _add(self, module: str, gradient: Tensor) -> None:
        self.tables["backward"][module] = sums_of_tokens(gradient)


def sums_of_tokens(x: Tensor) -> Tensor:
    """Sums over the channels of (n, T, D), with weights and of squares: (2, n, T) in float64."""
    x = x.double()
    return torch.stack([x @ weights(x.shape[2], CHANNEL).to(x.device), x.square().sum(2)])
