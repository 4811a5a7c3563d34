"""Changes to the scores of attention, and to logits: soft caps and attention sinks.

A cap c replaces x by c tanh(x / c) (Gemma Team 2024, Gemma 2, §2). A sink is a logit of a head that takes
part in its softmax and has no value (Xiao et al. 2023; OpenAI 2025, gpt-oss): it scales the output by
1 - p, where p is its probability. So with its log-sum-exp the output without sinks gives that with them, and
then the backward of attention is the same with these two as without sinks.

Shapes: H query heads.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class ScoreChanges(NamedTuple):
    """Changes to the scores of attention besides scaling them, and hiding some."""

    softcap: float | None = None
    sinks: Tensor | None = None
    """(H,)."""

    @property
    def none(self) -> bool:
        """True if scores stay as they are."""
        return self.softcap is None and self.sinks is None


UNCHANGED = ScoreChanges()


def cap_(x: Tensor, softcap: float) -> Tensor:
    """Replace x by softcap tanh(x / softcap); returns it."""
    return x.div_(softcap).tanh_().mul_(softcap)


def capped(x: Tensor, softcap: float | None) -> Tensor:
    """Return softcap tanh(x / softcap), or x itself without a cap."""
    return x if softcap is None else (x / softcap).tanh() * softcap


def cap_slope(capped: Tensor, softcap: float, out: Tensor | None = None) -> Tensor:
    """The derivative 1 - (capped / softcap)^2 of a cap by its argument, in `out` or a new tensor."""
    return torch.mul(capped, capped, out=out).mul_(-(softcap**-2)).add_(1)


def add_sinks_(lse: Tensor, sinks: Tensor) -> Tensor:
    """Add sinks, which broadcast to a log-sum-exp, to it in place; returns the factor of the output."""
    whole = torch.logaddexp(lse, sinks.to(lse.dtype))
    factor = (lse - whole).exp_()
    lse.copy_(whole)
    return factor


def keys_share(lse: Tensor, sinks: Tensor) -> Tensor:
    """The probability that sinks leave to the keys, by the log-sum-exp with them."""
    return (sinks.to(lse.dtype) - lse).expm1_().neg_()


def sinks_gradient(delta: Tensor, lse: Tensor, sinks: Tensor) -> Tensor:
    """Each query's part of the gradient of sinks, which broadcast to the log-sum-exp with them. `delta` is
    the product of the output, with them, and its gradient."""
    return (sinks.to(lse.dtype) - lse).exp_().mul_(delta).neg_()
