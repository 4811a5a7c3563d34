"""Cross-entropy of a linear head, without ever holding the logits of more than a chunk of tokens.

The logits of N tokens over a vocabulary of V are the largest tensor of a training step (N x V). Their
gradient is known as soon as they are: so the forward computes the gradients of x and of the weight chunk by
chunk, and the backward multiplies them by the incoming gradient (Wijmans et al. 2024, cut cross-entropy, §3;
Hsu et al. 2024, Liger kernel, §3.2). Three matmuls in all, as without chunks.

A chunk has two sizes (`spec/tiling.py`). Its products take many tokens, since the gradient of the weight, as
large as the weight, is added up in fp32 once for each chunk. Its softmax in fp32 is taken piece by piece; on
CUDA by one kernel for all of the chunk, which replaces logits by gradients (`kernels/cross_entropy.py`).
There most microbatches are one chunk, whose product is the gradient of the weight in its own format.

The weight of a target in the objective enters before anything is rounded to the format of the logits; it
should be a power of two, which is exact in every format. bf16 has 8 bits, so a later product with 1/N, itself
rounded to bf16, would put every gradient below the head off by up to 2^-9, all in one direction; and so would
logits' gradients that hold 1/N, since at the targets of a model that has learned little they are all close to
-1/N, and rounded alike (see `parallel/loss_normalization.py`).

Over tensor ranks each has a part of the vocabulary, a `VocabularyPart` (`parallel/vocab_parallel.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from meshwright.kernels import cross_entropy, elementwise_cpu
from meshwright.kernels.gradient_accumulation_fusion import RunningSum
from meshwright.kernels.score_changes import cap_, cap_slope
from meshwright.model.soft_targets import SoftTargetLoss, SoftTargets, VocabularyRows
from meshwright.spec.tiling import loss_rows

IGNORE = -100
"""The target of a token that is not predicted."""


@dataclass(frozen=True)
class VocabularyPart:
    """Rows `first` to `first + rows` of a vocabulary whose other rows are elsewhere.

    `gather` stacks numbers of the tokens (M, N) of this part and of all others, in the order of `ranks`, to
    (ranks, M, N). Without soft targets these are the part's log-sum-exp, and the target's logit where the
    part has it, 0 elsewhere.
    """

    first: int
    rows: int
    gather: Callable[[Tensor], Tensor]
    rank: int
    ranks: int

    def joined(self, numbers: Tensor) -> tuple[Tensor, Tensor]:
        """The log-sum-exp and the target's logit (N,) of the whole, by those of this part (2, N)."""
        parts = self.gather(numbers)
        return parts[:, 0].logsumexp(0), parts[:, 1].sum(0)


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        targets: Tensor,
        chunk: int,
        piece: int,
        with_grad: bool,
        part: VocabularyPart | None,
        scale: float,
        soft: SoftTargets | None,
        softcap: float | None,
    ) -> Tensor:
        exact = torch.promote_types(x.dtype, torch.float32)
        total = torch.zeros((), dtype=exact, device=x.device)
        of_x, of_weight = (with_grad and needed for needed in ctx.needs_input_grad[:2])
        grad_x = torch.empty_like(x) if of_x else None
        # Sums over chunks are kept in fp32, also for bf16 weights.
        sums = weight.dtype if len(x) <= chunk and cross_entropy.takes(x) else exact
        empty = torch.empty_like if len(x) else torch.zeros_like
        grad_weight = empty(weight, dtype=sums) if of_weight else None
        for first in range(0, len(x), chunk):
            rows = slice(first, first + chunk)
            logits = x[rows] @ weight.T
            of_pieces = []
            for start in range(first, first + len(logits), piece):
                tokens = slice(start, min(start + piece, first + len(logits)))
                loss, of_piece = _capped_loss(
                    logits[start - first : tokens.stop - first],
                    x[tokens],
                    targets[tokens],
                    None if soft is None else soft.each(itemgetter(tokens)),
                    with_grad,
                    part,
                    scale,
                    softcap,
                )
                total += loss
                if of_piece is not None:
                    of_pieces.append((tokens, of_piece))
            if grad_x is not None:  # the logits have become their gradients
                torch.mm(logits, weight, out=grad_x[rows])
                for tokens, of_piece in of_pieces:
                    of_piece.add_grad_x(grad_x[tokens], _scales(targets[tokens] != IGNORE, exact, scale))
            if grad_weight is not None:
                RunningSum(grad_weight, first > 0).add_product(logits.T, x[rows])
            del of_pieces, logits  # two chunks' logits are never there together
        ctx.grads, ctx.weight_dtype = (grad_x, grad_weight), weight.dtype
        return total * scale

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.grads is None:
            raise RuntimeError("the loss was differentiated before, and its gradients were used up")
        (grad_x, grad_weight), ctx.grads = ctx.grads, None  # scaled in place: the largest tensors of a step
        if grad_weight is not None:
            grad_weight = _multiply_(grad_weight, grad).to(ctx.weight_dtype)
        if grad_x is not None:
            grad_x = _multiply_(grad_x, grad)
        return grad_x, grad_weight, *[None] * 8


def _multiply_(gradient: Tensor, factor: Tensor) -> Tensor:
    """Multiply a gradient by a number in place; returns it."""
    if cross_entropy.takes(gradient) and gradient.is_contiguous():
        cross_entropy.multiply_(gradient, factor)
        return gradient
    return gradient.mul_(factor.to(gradient.dtype))


def _capped_loss(
    logits: Tensor,
    x: Tensor,
    targets: Tensor,
    soft: SoftTargets | None,
    with_grad: bool,
    part: VocabularyPart | None,
    scale: float,
    softcap: float | None,
) -> tuple[Tensor, SoftTargetLoss | None]:
    """`_soft_loss`, or `_loss` with None, of capped logits; the gradient is by those before the cap."""
    if soft is None and cross_entropy.takes(logits):
        return _loss_by_kernel(logits, targets, with_grad, part, scale, softcap), None
    slope = None
    if softcap is not None:
        cap_(logits, softcap)
        slope = cap_slope(logits, softcap) if with_grad else None
    of_piece = None
    if soft is None:
        loss = _loss(logits, targets, with_grad, part, scale)
    else:
        loss, of_piece = _soft_loss(logits, x, targets, soft, with_grad, part, scale)
    if slope is not None:
        logits.mul_(slope)
    return loss, of_piece


def _loss_by_kernel(
    logits: Tensor,
    targets: Tensor,
    with_grad: bool,
    part: VocabularyPart | None,
    scale: float,
    softcap: float | None,
) -> Tensor:
    """`_loss` of logits that `softcap` caps, by kernels that read and write them as they are."""
    if part is None and with_grad:
        return cross_entropy.cross_entropy_(logits, targets, IGNORE, scale, softcap).sum()
    first, rows = (0, logits.shape[1]) if part is None else (part.first, part.rows)
    numbers = cross_entropy.softmax_statistics(logits, targets, IGNORE, first, rows, softcap, False)
    log_sum, target = numbers if part is None else part.joined(numbers)
    valid = targets != IGNORE
    target_log = torch.where(valid, target - log_sum, 0)
    if with_grad:
        factors = valid.to(log_sum.dtype).mul_(scale)
        at_targets = target_log.expm1() * factors
        cross_entropy.softmax_gradient_(
            logits, targets, log_sum, factors, at_targets, None, first, rows, softcap
        )
    return -target_log.sum()


def _loss(
    logits: Tensor, targets: Tensor, with_grad: bool, part: VocabularyPart | None, scale: float
) -> Tensor:
    """Summed loss of a piece; if `with_grad`, `logits` become `scale` times its gradient by them."""
    if part is None and elementwise_cpu.takes(logits):
        return elementwise_cpu.cross_entropy_(logits, targets, IGNORE, with_grad, scale).sum()
    exact = torch.promote_types(logits.dtype, torch.float32)
    valid = targets != IGNORE
    if part is not None:
        logits[:, part.rows :] = float("-inf")
        here = valid & (targets >= part.first) & (targets < part.first + part.rows)
        targets = targets - part.first
    else:
        here = valid
    index = targets.masked_fill(~here, 0).unsqueeze(1)
    log_probabilities = torch.log_softmax(logits, -1, dtype=exact)
    target_log = log_probabilities.gather(1, index).squeeze(1)
    if part is not None:
        own = logits[:, 0].to(exact) - log_probabilities[:, 0]
        whole, target = part.joined(torch.stack([own, torch.where(here, target_log + own, 0)]))
        log_probabilities += (own - whole).unsqueeze(1)
        target_log = target - whole
    loss = -torch.where(valid, target_log, 0).sum()
    if not with_grad:
        return loss
    grad = log_probabilities.exp_()
    # p - 1 at the target, from the logarithm: exact also where p is close to 1.
    at_target = target_log.expm1()
    if part is not None:
        at_target = torch.where(here, at_target, grad.gather(1, index).squeeze(1))
    grad.scatter_(1, index, at_target.unsqueeze(1))
    logits.copy_(grad.mul_(_scales(valid, exact, scale)))
    return loss


def _scales(valid: Tensor, exact: torch.dtype, scale: float) -> Tensor:
    """`scale` for tokens (N, 1) that are `valid` (N,), 0 for others."""
    return valid.to(exact).mul_(scale).unsqueeze(1)


def _soft_loss(
    logits: Tensor,
    x: Tensor,
    targets: Tensor,
    soft: SoftTargets,
    with_grad: bool,
    part: VocabularyPart | None,
    scale: float,
) -> tuple[Tensor, SoftTargetLoss]:
    """`_loss` with soft targets; the second result knows the gradient by x."""
    rows = logits.shape[1] if part is None else part.rows
    place = VocabularyRows(0, 0, 1) if part is None else VocabularyRows(part.first, part.rank, part.ranks)
    valid = targets != IGNORE
    here = valid & (targets >= place.first) & (targets < place.first + rows)
    index = (targets - place.first).masked_fill(~here, 0).unsqueeze(1)
    of_piece = SoftTargetLoss(logits[:, :rows], x, index, here, soft, place)
    numbers = of_piece.numbers()
    losses = of_piece.finish(numbers.unsqueeze(0) if part is None else part.gather(numbers))
    loss = torch.where(valid, losses, 0).sum()
    if with_grad:
        grad = of_piece.grad_logits().mul_(_scales(valid, of_piece.exact, scale))
        logits[:, :rows] = grad
        logits[:, rows:] = 0
    return loss, of_piece


def linear_cross_entropy(
    x_ND: Tensor,
    weight_VD: Tensor,
    targets_N: Tensor,
    chunk: int | None = None,
    part: VocabularyPart | None = None,
    scale: float = 1.0,
    soft: SoftTargets | None = None,
    softcap: float | None = None,
) -> Tensor:
    """`scale` times the SUM over tokens of -log softmax(x W^T)[target], without the targets that are IGNORE.

    A scalar in fp32 (fp64 for fp64 inputs). `chunk` is the number of tokens whose logits exist at one time,
    and whose softmax is taken at one time; by default both are those of `loss_rows`. Without a gradient to
    compute, the forward computes the loss only. With `part`, `weight_VD` is that part
    of the vocabulary (rows beyond it are ignored), the loss is the whole's, and the gradient of x is this
    part's share, to be summed. With `soft` of the tokens (N, C) a token's loss is that of
    `soft_targets.py`. Logits are capped by `softcap`.
    """
    by_kernel = soft is None and cross_entropy.takes(x_ND)
    rows, piece = loss_rows(weight_VD.shape[0], x_ND.device.type == "cpu", by_kernel)
    if soft is not None:  # what is kept of a piece until its products is larger than they are
        rows = piece
    if chunk is not None:
        rows = piece = chunk
    with_grad = torch.is_grad_enabled() and (x_ND.requires_grad or weight_VD.requires_grad)
    return _LinearCrossEntropy.apply(
        *(x_ND, weight_VD, targets_N, rows, piece, with_grad, part, scale, soft, softcap)
    )
