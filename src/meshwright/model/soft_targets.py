"""The loss of a student on a chunk of tokens, given a teacher's answers, with its gradient by the logits.

For p the teacher's and q the student's softmax at a temperature T, a token's loss is

    (1 - w) cross entropy + w T^2 KL + h mean squared error of the hidden states

with the forward KL sum p log(p/q) (Hinton et al. 2015; T^2 keeps gradients of one size, §2) or the reverse KL
sum q log(q/p) (Gu et al. 2024, MiniLLM). With `top_k` the KL is that of the k tokens which the teacher finds
likeliest, and of one category for all others. So both sides are whole distributions: to scale the k up
to 1 would teach the student to be too sure (Anshumann et al. 2025, sparse logit sampling).

Over tensor ranks, each of which has a part of the vocabulary, a token needs the log-sum-exps and the sums of
`SoftTargetLoss.numbers`, which the ranks gather in one message.

Shapes: N tokens, V rows of the vocabulary (here), K tokens that a teacher tells apart, D channels.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from meshwright.data.loader import Batch
from meshwright.spec.distil import DistilSpec


@dataclass(frozen=True)
class SoftTargets:
    """A teacher's answers about some tokens, (..., tokens, C) each.

    `log_p` are log-probabilities at the run's temperature: of `indices` (K) and then of all other tokens
    together, or without `indices` of this rank's rows of the vocabulary, and of padding behind them. `hidden`
    are the channels that the teacher's head takes, if the student is to have them.
    """

    how: DistilSpec
    log_p: Tensor
    indices: Tensor | None = None
    hidden: Tensor | None = None

    def each(self, change: Callable[[Tensor], Tensor]) -> SoftTargets:
        """The answers with each tensor changed."""
        changed = [None if x is None else change(x) for x in (self.log_p, self.indices, self.hidden)]
        assert changed[0] is not None
        return replace(self, log_p=changed[0], indices=changed[1], hidden=changed[2])


class SoftTargetSource(Protocol):
    """A source of answers about a step's tokens."""

    identity: Mapping[str, Any]
    """Says which teacher it is: `step` and `sha256` of its weights, `tokenizer_sha256`."""

    @property
    def flops_per_token(self) -> float:
        """Model FLOPs of an answer about one token; 0 for one that is read."""
        ...

    def __call__(self, batch: Batch) -> SoftTargets | None:
        """Answers about this rank's tokens of a batch; None on ranks that have no last stage."""
        ...


class VocabularyRows(NamedTuple):
    """Where rows of the vocabulary are: the first of them, and this rank among those that have the others."""

    first: int
    rank: int
    ranks: int


class SoftTargetLoss:
    """The loss of a chunk of tokens: first `numbers` of this rank, then `finish` with those of all ranks.

    `logits` (N, V) are this rank's, without padding; `targets` index them where `here` says so. `x` are the
    hidden states (N, D) that gave the logits.
    """

    def __init__(
        self, logits: Tensor, x: Tensor, index: Tensor, here: Tensor, soft: SoftTargets, place: VocabularyRows
    ):
        self.how, self.here, self.index = soft.how, here, index
        self.exact = torch.promote_types(logits.dtype, torch.float32)
        self.z = logits.to(self.exact)
        self.u = self.z if self.how.temperature == 1 else self.z / self.how.temperature
        rows, log_p = logits.shape[1], soft.log_p.to(self.exact)
        self.log_rest: Tensor | None = None
        if soft.indices is None:
            self.told, self.log_p = self.u, log_p[:, :rows]
        else:
            self.log_p, self.log_rest = log_p[:, :-1], log_p[:, -1]
            self.told_here = (soft.indices >= place.first) & (soft.indices < place.first + rows)
            self.places = (soft.indices - place.first).masked_fill(~self.told_here, 0).long()
            self.told = self.u.gather(1, self.places)
        self.error: Tensor | None = None
        if soft.hidden is not None:
            # Tensor ranks have the same hidden states: each takes the error of some of their channels.
            width = x.shape[1]
            self.channels = slice(width * place.rank // place.ranks, width * (place.rank + 1) // place.ranks)
            self.error = (x.to(self.exact) - soft.hidden.to(self.exact))[:, self.channels]
            self.width = width

    def numbers(self) -> Tensor:
        """(M, N): this rank's log-sum-exp, target's logit, and at the temperature log-sum-exp, the KL's sum,
        the log-sum-exp of the tokens that are not told apart, and the squared error of hidden states."""
        log_p, told, here = self.log_p, self.told, self.u.logsumexp(-1)
        own = here if self.u is self.z else self.z.logsumexp(-1)
        target = torch.where(self.here, self.z.gather(1, self.index).squeeze(1), 0)
        if self.how.loss == "forward_kl":
            terms = log_p.exp() * (log_p - told)
        else:
            terms = (told - here.unsqueeze(1)).exp() * (told - log_p)
        rest = torch.full_like(own, float("-inf"))
        if self.log_rest is not None:
            terms = terms.masked_fill(~self.told_here, 0.0)
            # The tokens of other ranks all stand at place 0, which they leave as it is.
            hidden = torch.full_like(told, float("inf")).masked_fill(self.told_here, float("-inf"))
            self.others = self.u.scatter_reduce(1, self.places, hidden, "amin")
            rest = self.others.logsumexp(-1)
        found = [own, target, here, terms.sum(-1), rest]
        if self.error is not None:
            found.append(self.error.square().sum(-1))
        return torch.stack(found)

    def finish(self, parts_RMN: Tensor) -> Tensor:
        """The loss of each token (N,), from the numbers of all ranks that have a part of the vocabulary."""
        how = self.how
        self.whole = parts_RMN[:, 0].logsumexp(0)
        self.target = parts_RMN[:, 1].sum(0)
        here, sums = parts_RMN[:, 2], parts_RMN[:, 3]
        self.all = all_ = here.logsumexp(0)
        self.rest, log_rest = parts_RMN[:, 4].logsumexp(0) - all_, self.log_rest
        if how.loss == "forward_kl":
            kl = sums.sum(0) + all_
            if log_rest is not None:
                p = log_rest.exp()
                kl += p * (log_rest - self.rest - all_)
        else:
            kl = (sums * (here - all_).exp()).sum(0) - all_
            if log_rest is not None:
                kl += self.rest.exp() * (self.rest - log_rest + all_)
        self.kl = kl
        loss = (1 - how.weight) * (self.whole - self.target) + how.weight * how.temperature**2 * kl
        if self.error is not None:
            loss += how.hidden * parts_RMN[:, 5].sum(0) / self.width
        return loss

    def grad_logits(self) -> Tensor:
        """The gradient (N, V) of each token's loss by its logits on this rank."""
        how, forward = self.how, self.how.loss == "forward_kl"
        log_q = self.told - self.all.unsqueeze(1)
        q = log_q.exp()
        grad = q - self.log_p.exp() if forward else q * (log_q - self.log_p - self.kl.unsqueeze(1))
        if self.log_rest is not None:
            # All others share the gradient of their category as they share its probability.
            q_rest = self.rest.exp()
            each = q_rest - self.log_rest.exp() if forward else q_rest * (self.rest - self.log_rest - self.kl)
            shares = (self.others - (self.rest + self.all).unsqueeze(1)).exp_()
            told = grad.masked_fill_(~self.told_here, 0.0)
            grad = shares.mul_(each.unsqueeze(1)).scatter_add_(1, self.places, told)
        grad *= how.weight * how.temperature
        if how.weight < 1:
            entropy = (self.z - self.whole.unsqueeze(1)).exp()
            # p - 1 at the target, from the logarithm: exact also where p is close to 1.
            at_target = entropy.gather(1, self.index).squeeze(1)
            at_target = torch.where(self.here, (self.target - self.whole).expm1(), at_target)
            entropy.scatter_(1, self.index, at_target.unsqueeze(1))
            grad.add_(entropy, alpha=1 - how.weight)
        return grad

    def add_grad_x(self, grad_x: Tensor, scales: Tensor) -> None:
        """Add `scales` (N, 1) times the gradient of the hidden states' error to that of x (N, D)."""
        if self.error is not None:
            share = self.error * (2 * self.how.hidden / self.width) * scales
            grad_x[:, self.channels] += share.to(grad_x.dtype)
