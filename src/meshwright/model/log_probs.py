"""Log-probabilities of targets under a linear head, with gradients, for losses that a caller defines.

Like the chunked cross-entropy it never holds the logits of more than a chunk of tokens. What the gradient of
a token is multiplied by is known in the backward only, so the backward computes each chunk's logits once
more: four matmuls in all, where the cross-entropy has three.

For z the logits of a token, l its log-sum-exp and p = exp(z - l), the log-probability of the target y is
z_y - l, with the gradient 1[y] - p by the logits, and the entropy H = l - sum p z, with -p (z - l + H).

Shapes: N tokens (B sequences of T), V vocabulary, D hidden.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, Self

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from meshwright.kernels.gradient_accumulation_fusion import RunningSum
from meshwright.kernels.score_changes import cap_, cap_slope
from meshwright.model.chunked_cross_entropy import IGNORE, VocabularyPart
from meshwright.spec.tiling import loss_rows


class LogProbLoss(ABC):
    """A loss of the log-probabilities of a microbatch's targets, in the place of the cross-entropy.

    It travels with a batch as soft targets do (`data.loader.ByToken`).
    """

    entropy: bool
    """True if the loss reads the entropies of the predictions, too."""

    @abstractmethod
    def each(self, change: Callable[[Tensor], Tensor], /) -> Self:
        """A loss of the same kind with `change` applied to each tensor by sample."""

    @abstractmethod
    def loss(self, log_probs_BT: Tensor, entropies_BT: Tensor, scale: float) -> Tensor:
        """`scale` times the loss, a scalar; without gradients it may be of any shape.

        Targets that are not predicted have log-probability 0, and no gradient.
        """


class _LinearLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        targets: Tensor,
        chunk: int,
        part: VocabularyPart | None,
        softcap: float | None,
        entropy: bool,
    ) -> tuple[Tensor, Tensor]:
        exact, first = torch.promote_types(x.dtype, torch.float32), 0 if part is None else part.first
        numbers = torch.zeros(3, len(x), dtype=exact, device=x.device)
        for rows in _chunks(len(x), chunk):
            z = _logits(x[rows], _own(weight, part), softcap, exact)
            here, index = _places(targets[rows], first, z.shape[1])
            numbers[0, rows] = z.logsumexp(-1)
            numbers[1, rows] = torch.where(here, z.gather(1, index), 0).squeeze(1)
            if entropy:
                numbers[2, rows] = (z - numbers[0, rows].unsqueeze(1)).exp_().mul_(z).sum(-1)
        log_sum, target, mean = numbers if part is None else _joined(part.gather(numbers))
        valid = targets != IGNORE
        log_probs = torch.where(valid, target - log_sum, 0)
        entropies = torch.where(valid, log_sum - mean, 0) if entropy else torch.zeros_like(log_sum)
        ctx.save_for_backward(x, weight, targets, log_sum, log_probs, entropies)
        ctx.how = chunk, part, first, softcap, entropy, exact
        return log_probs, entropies

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, grad_entropy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, targets, log_sum, log_probs, entropies = ctx.saved_tensors
        chunk, part, first, softcap, entropy, exact = ctx.how
        of_x, of_weight = ctx.needs_input_grad[:2]
        grad_x = torch.empty_like(x) if of_x else None
        grad_weight = torch.zeros_like(weight, dtype=exact) if of_weight else None
        valid = targets != IGNORE
        grad, grad_entropy = (torch.where(valid, each, 0).unsqueeze(1) for each in (grad, grad_entropy))
        for rows in _chunks(len(x), chunk):
            z = _logits(x[rows], _own(weight, part), softcap, exact)
            slope = None if softcap is None else cap_slope(z, softcap)
            logs, log_p, of_target = z.sub_(log_sum[rows, None]), log_probs[rows, None], grad[rows]
            here, index = _places(targets[rows], first, logs.shape[1])
            # 1 - p at the target, from the logarithm: exact also where p is close to 1.
            at_target = log_p.expm1() * of_target
            if entropy:
                h, of_h = entropies[rows, None], grad_entropy[rows]
                at_target += log_p.exp() * (log_p + h) * of_h
                of_logits = (logs + h).mul_(of_h).add_(of_target).mul_(logs.exp_())
            else:
                of_logits = logs.exp_().mul_(of_target)
            at_target = torch.where(here, at_target, of_logits.gather(1, index))
            of_logits.scatter_(1, index, at_target).neg_()
            if slope is not None:
                of_logits.mul_(slope)
            of_logits = of_logits.to(x.dtype)
            if grad_x is not None:
                torch.mm(of_logits, _own(weight, part), out=grad_x[rows])
            if grad_weight is not None:
                RunningSum(_own(grad_weight, part), True).add_product(of_logits.T, x[rows])
        return grad_x, None if grad_weight is None else grad_weight.to(weight.dtype), *[None] * 5


def _chunks(tokens: int, chunk: int) -> list[slice]:
    return [slice(start, min(start + chunk, tokens)) for start in range(0, tokens, chunk)]


def _own(rows_VD: Tensor, part: VocabularyPart | None) -> Tensor:
    """The rows of a weight that are of the vocabulary, without padding behind them."""
    return rows_VD if part is None else rows_VD[: part.rows]


def _logits(x: Tensor, weight: Tensor, softcap: float | None, exact: torch.dtype) -> Tensor:
    """Logits that the caller may change, in the `exact` format."""
    logits = x @ weight.T
    return (logits if softcap is None else cap_(logits, softcap)).to(exact)


def _places(targets: Tensor, first: int, rows: int) -> tuple[Tensor, Tensor]:
    """Which targets are among `rows` of the vocabulary from `first` on, and where, or 0: (N, 1) each."""
    here = (targets >= first) & (targets < first + rows)
    return here.unsqueeze(1), (targets - first).masked_fill(~here, 0).unsqueeze(1)


def _joined(parts_RMN: Tensor) -> Tensor:
    """Log-sum-exp, target's logit and mean logit of the whole vocabulary, from those of its parts."""
    own, target, mean = parts_RMN.unbind(1)
    whole = own.logsumexp(0)
    return torch.stack([whole, target.sum(0), ((own - whole).exp() * mean).sum(0)])


def linear_log_probs(
    x_ND: Tensor,
    weight_VD: Tensor,
    targets_N: Tensor,
    chunk: int | None = None,
    part: VocabularyPart | None = None,
    softcap: float | None = None,
    entropy: bool = False,
) -> tuple[Tensor, Tensor]:
    """Log-probability of each target, and entropy of each prediction, in nats: (N,) each, in fp32 or fp64.

    Both are 0 where the target is IGNORE, entropies also without `entropy`. `chunk`, `part` and `softcap` are
    as in `linear_cross_entropy`; the gradient of x is this part's share of the vocabulary, to be summed.
    """
    piece = chunk or loss_rows(weight_VD.shape[0], x_ND.device.type == "cpu")[1]
    found: tuple[Tensor, Tensor] = _LinearLogProbs.apply(
        x_ND, weight_VD, targets_N, piece, part, softcap, entropy
    )
    return found
