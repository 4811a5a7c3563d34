"""The one place where anything is divided.

Splits nothing. Every rank sums its own targets' losses and every gradient reduction is a SUM; what makes a
mean of them is the division here, once, by the number of target tokens of the GLOBAL batch. No layout, no
accumulation and no uneven padding can then change the mathematics.
"""

from __future__ import annotations

import torch
from torch import Tensor

from meshwright.model.loss import IGNORE


def count_targets(targets: Tensor) -> int:
    """Number of tokens of this tensor that are predicted (those that are not -100)."""
    return int(torch.count_nonzero(targets != IGNORE))


def mean_over_targets(loss_sum: Tensor, global_targets: int) -> Tensor:
    """The mean loss, or this rank's part of it: the sum divided by the global batch's number of targets.

    A batch without any target has loss 0 and gradients 0, rather than NaN.
    """
    return loss_sum / max(global_targets, 1)


def share_of_a_sequence(global_sequences: int) -> float:
    """What one sequence counts in the mean over the global batch, where a loss is defined for each."""
    return 1.0 / global_sequences
