"""Router of a mixture of experts: which experts each token goes to, with which weights.

Losses of its balance, the z-loss and its biases are in `parallel/router_balance.py`.

Shapes: B batch, T sequence, N = B T tokens, D hidden, E experts, k experts of each token.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from meshwright.spec import MoeSpec


class Routing(NamedTuple):
    """A router's decision: logits and scores (N, E), weights and experts (N, k), in at least fp32.

    Scores are the sigmoid or softmax of the logits, before experts are chosen. All but `experts` are
    differentiable.
    """

    logits: Tensor
    scores: Tensor
    weights: Tensor
    experts: Tensor


class _RouterLogits(torch.autograd.Function):
    """x w^T in at least fp32, saving x in its own format."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return _exact(x) @ _exact(weight).T

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None]:
        x, weight = ctx.saved_tensors
        of_weight = (grad.T @ _exact(x)).to(weight.dtype) if ctx.needs_input_grad[1] else None
        return (grad @ _exact(weight)).to(x.dtype), of_weight


def _exact(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


class Router(nn.Module):
    """x (N, D) -> each token's experts and their weights.

    `bias` (E,) in fp32 is added to the scores when experts are chosen; the load changes it, not a gradient
    (Wang et al. 2024, loss-free balancing).
    """

    bias: Tensor | None

    def __init__(self, moe: MoeSpec, hidden: int) -> None:
        super().__init__()
        self.moe = moe
        self.weight = nn.Parameter(torch.empty(moe.experts, hidden))
        self.register_buffer("bias", torch.zeros(moe.experts) if moe.bias else None)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Router:
        """Move the bias with the weights but keep its dtype: its updates are too small for bf16."""
        bias = self.bias
        super()._apply(fn, recurse)
        if bias is not None and self.bias is not None and self.bias.dtype != bias.dtype:
            self.bias = bias.to(self.bias.device)
        return self

    def forward(self, x_ND: Tensor) -> Routing:
        moe = self.moe
        logits: Tensor = _RouterLogits.apply(x_ND, self.weight)
        scores = logits.sigmoid() if moe.router == "sigmoid" else logits.softmax(-1)
        experts = self._choose(scores.detach())
        weights = scores.gather(1, experts)
        if moe.renormalise:
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        if moe.scale != 1.0:
            weights = weights * moe.scale
        return Routing(logits, scores, weights, experts)

    def _choose(self, scores_NE: Tensor) -> Tensor:
        """Top-k experts (N, k), within the groups whose best score, or sum of two best, is largest."""
        moe = self.moe
        if self.bias is not None:
            scores_NE = scores_NE + self.bias
        if moe.top_groups < moe.groups:
            grouped = scores_NE.unflatten(1, (moe.groups, -1))
            counted = min(2 if moe.group_score == "top2" else 1, grouped.shape[2])
            best = grouped.topk(counted).values.sum(-1)
            hidden = torch.ones_like(best, dtype=torch.bool)
            hidden.scatter_(1, best.topk(moe.top_groups).indices, False)
            scores_NE = grouped.masked_fill(hidden.unsqueeze(2), float("-inf")).flatten(1)
        return scores_NE.topk(moe.top_k).indices


def admit_by_capacity(
    moe: MoeSpec, _layer: int, routing: Routing, batch: int
) -> tuple[Tensor, Tensor | None]:
    """The routing weights (N, k), and the mask of copies within the experts' capacity; None without one."""
    experts = routing.experts.unflatten(0, (batch, -1))
    capacity = moe.capacity(experts.shape[1])
    admitted = None if capacity is None else within_capacity(experts, moe.experts, capacity)
    return routing.weights, admitted


def within_capacity(experts_BTk: Tensor, experts: int, capacity: int) -> Tensor:
    """Mask (B T, k) of copies that are among the first `capacity` of their sequence at their expert.

    Copies count in the order of tokens, so admission never depends on a later token (Lepikhin et al. 2021).
    """
    batch = len(experts_BTk)
    sequence = torch.arange(batch, device=experts_BTk.device).view(-1, 1, 1)
    key = (experts_BTk + sequence * experts).flatten()
    by_key, order = key.sort(stable=True)
    ordinal = torch.empty_like(key)
    ordinal[order] = torch.arange(len(key), device=key.device) - torch.searchsorted(by_key, by_key)
    return (ordinal < capacity).view(-1, experts_BTk.shape[2])
