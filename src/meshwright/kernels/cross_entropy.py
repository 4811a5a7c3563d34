"""Cross-entropy of logits, and the softmax that it is made of, as one kernel each on CUDA.

Of a whole vocabulary `cross_entropy_` is the loss and its gradient together. Of a part of one, or without a
gradient, or for a gradient that the backward brings, `softmax_statistics` gives the numbers of each row that
parts exchange, and `softmax_gradient_` makes the gradient of the same logits. Both read the logits as they
lie and write gradients in their place; sums and exponentials are in fp32. The kernels are in
`kernels/triton/cross_entropy.py`; formats wider than fp32, and machines without Triton, keep operators of
torch.

Shapes: N tokens, V columns of logits, the first `rows` of which are of the vocabulary: those are its rows
from `first` on. A token with the target `ignored` is not predicted. With a soft cap c a logit x stands for
c tanh(x / c), and gradients are those by x.
"""

from __future__ import annotations

import torch
from torch import Tensor

from meshwright.kernels.triton_operator import takes_triton, triton_operator

_FORMATS = (torch.bfloat16, torch.float16, torch.float32)


def takes(like: Tensor) -> bool:
    """True if the kernels compute with logits of the format and on the device of `like`."""
    return like.dtype in _FORMATS and takes_triton(like.device)


@triton_operator("cross_entropy", mutates=["logits"])
def cross_entropy_(
    logits: Tensor, targets: Tensor, ignored: int, factor: float, softcap: float | None
) -> Tensor:
    """The losses (N,) in fp32 of logits (N, V) by targets (N,): 0 where ignored, NaN for no column.

    The logits become `factor` times the gradient of the losses' sum.
    """
    return logits.new_empty(len(logits), dtype=torch.float32)


@triton_operator("cross_entropy")
def softmax_statistics(
    logits: Tensor, targets: Tensor, ignored: int, first: int, rows: int, softcap: float | None, mean: bool
) -> Tensor:
    """(2, N) in fp32: the log-sum-exp, and the target's logit, 0 where it is not among the `rows`.

    With `mean`, (3, N): the mean logit under the softmax, too. All are 0 where targets are ignored.
    """
    return logits.new_empty(3 if mean else 2, len(logits), dtype=torch.float32)


@triton_operator("cross_entropy", mutates=["logits"])
def softmax_gradient_(
    logits: Tensor,
    targets: Tensor,
    log_sum: Tensor,
    factors: Tensor,
    at_targets: Tensor,
    slopes: Tensor | None,
    first: int,
    rows: int,
    softcap: float | None,
) -> None:
    """Replace logits (N, V) by gradients: p * (`factors` + `slopes` * log p), and `at_targets` at targets.

    p is exp(logit - `log_sum`). `log_sum`, `factors`, `at_targets` and `slopes`, None for zeros, are (N,) in
    fp32. Columns beyond `rows` become 0.
    """


@triton_operator("cross_entropy", mutates=["x"])
def multiply_(x: Tensor, factor: Tensor) -> None:
    """Multiply x by a number in fp32 that is on the device; where it is 1, x is neither read nor written.

    So gradients that were computed before the loss's own was known, which is 1 in training, cost nothing, and
    the host does not wait to see whether they do.
    """
