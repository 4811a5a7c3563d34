"""The one place where anything is divided.

Splits nothing. Every rank sums its own targets' losses and every gradient reduction is a SUM; what makes a
mean of them is the division here, once, by the number of target tokens of the GLOBAL batch. No layout, no
accumulation and no uneven padding can then change the mathematics.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from meshwright.model.chunked_cross_entropy import IGNORE


def count_targets(targets: Tensor) -> int:
    """Number of tokens of this tensor that are predicted (those that are not -100)."""
    return int(torch.count_nonzero(targets != IGNORE))


def weight_of_a_target(global_targets: int) -> float:
    """The factor of one target's loss in the mean over the global batch: one over its number of targets.

    A batch without any target has loss 0 and gradients 0, rather than NaN.
    """
    return 1.0 / max(global_targets, 1)


def weight_of_a_count(global_count: float) -> float:
    """The factor of a sum of losses that a caller divides by a count of its own: one over it.

    A batch that counts nothing has loss 0 and gradients 0, where its sum is 0.
    """
    return 1.0 / global_count if global_count > 0 else 1.0


def power_and_rest(weight: float) -> tuple[float, float]:
    """The power of two in a target's weight, and the factor in [0.5, 1) that is left.

    The backward runs with the power, which half formats take without rounding; the rest multiplies what it
    found, in the format of the masters. So gradients in bf16 do not depend on the number of targets.
    """
    rest, exponent = math.frexp(weight)
    return 2.0**exponent, rest


def share_of_a_sequence(global_sequences: int) -> float:
    """Weight of one sequence in a mean over the sequences of the global batch."""
    return 1.0 / global_sequences


def share_of_a_replica(replicas: int) -> float:
    """Weight of one replica in the mean over them: they read as many samples each."""
    return 1.0 / replicas


def shares_of_tokens(tokens: Sequence[int]) -> list[float]:
    """Weights of replicas that trained on so many tokens each, in the mean over them."""
    return [each / sum(tokens) for each in tokens]
