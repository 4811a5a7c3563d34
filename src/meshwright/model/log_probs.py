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
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from meshwright.kernels import cross_entropy
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
            found = _statistics(x[rows], _own(weight, part), targets[rows], first, softcap, entropy)
            numbers[: len(found), rows] = found
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
        grad, grad_entropy = (torch.where(valid, each, 0) for each in (grad, grad_entropy))
        of_each = _Gradients(targets, log_sum, log_probs, grad, entropies, grad_entropy if entropy else None)
        for rows in _chunks(len(x), chunk):
            of_logits = _gradient(x[rows], _own(weight, part), of_each.of(rows), first, softcap).to(x.dtype)
            if grad_x is not None:
                torch.mm(of_logits, _own(weight, part), out=grad_x[rows])
            if grad_weight is not None:
                RunningSum(_own(grad_weight, part), True).add_product(of_logits.T, x[rows])
        return grad_x, None if grad_weight is None else grad_weight.to(weight.dtype), *[None] * 5


class _Gradients(NamedTuple):
    """Numbers of tokens (N,) for the gradients of their logits: those that the forward found, and gradients
    by log-probabilities and by entropies, which are None where nobody asked for entropies."""

    targets: Tensor
    log_sum: Tensor
    log_probs: Tensor
    by_log_probs: Tensor
    entropies: Tensor
    by_entropies: Tensor | None

    def of(self, rows: slice) -> _Gradients:
        """Those of some tokens."""
        return _Gradients(*(None if each is None else each[rows] for each in self))  # type: ignore[arg-type]

    @property
    def at_targets(self) -> Tensor:
        """The gradients at the targets: p - 1, from the logarithm, is exact also where p is close to 1."""
        found = self.log_probs.expm1() * self.by_log_probs
        if self.by_entropies is not None:
            found += self.log_probs.exp() * (self.log_probs + self.entropies) * self.by_entropies
        return found.neg_()


def _statistics(
    x: Tensor, weight: Tensor, targets: Tensor, first: int, softcap: float | None, entropy: bool
) -> Tensor:
    """(2, N): log-sum-exp, and the target's logit, 0 where it is not in this part; with `entropy` (3, N), the
    mean logit, too."""
    logits = x @ weight.T
    if cross_entropy.takes(logits):
        where = IGNORE, first, logits.shape[1]
        return cross_entropy.softmax_statistics(logits, targets, *where, softcap, entropy)
    z = _exact(logits, softcap)
    del logits
    here, index = _places(targets, first, z.shape[1])
    found = [z.logsumexp(-1), torch.where(here, z.gather(1, index), 0).squeeze(1)]
    if entropy:
        found.append((z - found[0].unsqueeze(1)).exp_().mul_(z).sum(-1))
    return torch.stack(found)


def _gradient(x: Tensor, weight: Tensor, of: _Gradients, first: int, softcap: float | None) -> Tensor:
    """The gradient by logits (N, V), in their format or in wider numbers."""
    logits = x @ weight.T
    if cross_entropy.takes(logits):
        factors, slopes = -of.by_log_probs, None
        if of.by_entropies is not None:
            factors, slopes = factors - of.entropies * of.by_entropies, -of.by_entropies
        numbers = of.log_sum, factors, of.at_targets, slopes
        cross_entropy.softmax_gradient_(logits, of.targets, *numbers, first, logits.shape[1], softcap)
        return logits
    z = _exact(logits, softcap)
    del logits
    slope = None if softcap is None else cap_slope(z, softcap)
    logs, by_log_probs = z.sub_(of.log_sum.unsqueeze(1)), of.by_log_probs.unsqueeze(1)
    here, index = _places(of.targets, first, logs.shape[1])
    if of.by_entropies is None:
        found = logs.exp_().mul_(by_log_probs)
    else:
        found = (logs + of.entropies.unsqueeze(1)).mul_(of.by_entropies.unsqueeze(1)).add_(by_log_probs)
        found.mul_(logs.exp_())
    found.neg_()
    found.scatter_(1, index, torch.where(here, of.at_targets.unsqueeze(1), found.gather(1, index)))
    return found if slope is None else found.mul_(slope)


def _chunks(tokens: int, chunk: int) -> list[slice]:
    return [slice(start, min(start + chunk, tokens)) for start in range(0, tokens, chunk)]


def _own(rows_VD: Tensor, part: VocabularyPart | None) -> Tensor:
    """The rows of a weight that are of the vocabulary, without padding behind them."""
    return rows_VD if part is None else rows_VD[: part.rows]


def _exact(logits: Tensor, softcap: float | None) -> Tensor:
    """Capped logits that the caller may change, in fp32 at least."""
    capped = logits if softcap is None else cap_(logits, softcap)
    return capped.to(torch.promote_types(logits.dtype, torch.float32))


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
    by_kernel = cross_entropy.takes(x_ND)
    piece = chunk or loss_rows(weight_VD.shape[0], x_ND.device.type == "cpu", by_kernel)[1]
    found: tuple[Tensor, Tensor] = _LinearLogProbs.apply(
        x_ND, weight_VD, targets_N, piece, part, softcap, entropy
    )
    return found
