"""A mixture of experts: a router sends each token to a few of many small feed-forward layers.

Shapes: B batch, T sequence, N = B T tokens, D hidden, E experts, k experts of each token. Sparse layers of
this kind are Shazeer et al.'s (2017); shared experts, which every token takes, DeepSeekMoE's (Dai et al.
2024). None of a token's experts is dropped unless a capacity is given (Lepikhin et al. 2021).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from meshwright.model.experts import Experts
from meshwright.model.mlp import Mlp
from meshwright.model.token_dispatcher import TokenDispatcher
from meshwright.spec import ModelSpec, MoeSpec


class Routing(NamedTuple):
    """Where tokens go: logits and scores (N, E), weights and experts (N, k), in fp32 at least.

    Scores are what the router gives before anything is chosen. All but the experts are differentiable.
    """

    logits: Tensor
    scores: Tensor
    weights: Tensor
    experts: Tensor


class _RouterLogits(torch.autograd.Function):
    """x w^T in fp32 at least, keeping x as it is."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return _exact(x) @ _exact(weight).T

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return (grad @ _exact(weight)).to(x.dtype), (grad.T @ _exact(x)).to(weight.dtype)


def _exact(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


class Router(nn.Module):
    """x (N, D) -> the experts of each token, and their weights.

    `bias` (E,) is added to the scores that choose (Wang et al. 2024, loss-free balancing); it is in fp32,
    and changed by the load, not by a gradient.
    """

    bias: Tensor | None

    def __init__(self, moe: MoeSpec, hidden: int) -> None:
        super().__init__()
        self.moe = moe
        self.weight = nn.Parameter(torch.empty(moe.experts, hidden))
        self.register_buffer("bias", torch.zeros(moe.experts) if moe.bias else None)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Router:
        """Moves the bias with the weights, and keeps its format: it counts steps too small for bf16."""
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
        """(N, k): the experts with the best scores, in the groups with the best pairs."""
        moe = self.moe
        if self.bias is not None:
            scores_NE = scores_NE + self.bias
        if moe.top_groups < moe.groups:
            grouped = scores_NE.unflatten(1, (moe.groups, -1))
            best = grouped.topk(min(2, grouped.shape[2])).values.sum(-1)
            hidden = torch.ones_like(best, dtype=torch.bool)
            hidden.scatter_(1, best.topk(moe.top_groups).indices, False)
            scores_NE = grouped.masked_fill(hidden.unsqueeze(2), float("-inf")).flatten(1)
        return scores_NE.topk(moe.top_k).indices


Sort = Callable[[Tensor, Tensor | None], TokenDispatcher]
"""(experts (N, k), which copies are admitted or None for all) -> the way of the tokens there and back."""

Settle = Callable[[Routing, int], tuple[Tensor, Tensor | None]]
"""(routing, B) -> the weights, and which copies (N, k) find room in their experts, or None for all."""


class Moe(nn.Module):
    """x (B, T, D) -> (B, T, D): the weighted sum of each token's experts, and the shared experts.

    `settle` says which copies find room, `sort` how tokens reach the experts, in `parts` parts; `enter` and
    `leave` stand around what the router and the routed experts see. A parallel layout puts its own there.
    """

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        assert spec.moe is not None
        moe = self.moe = spec.moe
        self.router = Router(moe, spec.hidden)
        self.experts = Experts(moe.experts, spec.hidden, moe.ffn)
        self.shared = Mlp(spec, moe.shared_ffn) if moe.shared_ffn else None
        self.settle: Settle = self._settle
        self.sort: Sort = self._sort
        self.enter: Callable[[Tensor], Tensor] = _same
        self.leave: Callable[[Tensor], Tensor] = _same
        self.parts = 1

    def forward(self, x_BTD: Tensor) -> Tensor:
        own = self.enter(x_BTD)
        x_ND = own.flatten(0, 1)
        routing = self.router(x_ND)
        weights, admitted = self.settle(routing, own.shape[0])
        pieces = list(_cut(self.parts, x_ND, weights, routing.experts, admitted))
        trips = [self.sort(experts, room) for _, _, experts, room in pieces]
        tickets = [trip.depart(x, w) for trip, (x, w, _, _) in zip(trips, pieces, strict=True)]
        inner = None if self.shared is None else self.shared.inner(x_BTD)
        for number, trip in enumerate(trips):
            rows, row_weights = trip.arrive(tickets[number])
            tickets[number] = trip.turn_back(self.experts(rows, row_weights, trip.sizes))
        shared = None if self.shared is None or inner is None else self.shared.leave(inner, self.shared.down)
        homes = [trip.come_home(ticket) for trip, ticket in zip(trips, tickets, strict=True)]
        found = self.leave((homes[0] if len(homes) == 1 else torch.cat(homes)).view(own.shape))
        return found if shared is None else found + shared

    def _sort(self, experts_Nk: Tensor, admitted_Nk: Tensor | None) -> TokenDispatcher:
        return TokenDispatcher(experts_Nk, admitted_Nk, self.moe.experts)

    def _settle(self, routing: Routing, batch: int) -> tuple[Tensor, Tensor | None]:
        experts = routing.experts.unflatten(0, (batch, -1))
        capacity = self.moe.capacity(experts.shape[1])
        room = None if capacity is None else with_room(experts, self.moe.experts, capacity)
        return routing.weights, room


def _same(x: Tensor) -> Tensor:
    return x


def _cut(parts: int, *tensors: Tensor | None) -> list[tuple[Any, ...]]:
    """Tensors (N, ...) cut into `parts` along their first dim, or fewer where N is less; None stays None."""
    first = tensors[0]
    assert first is not None
    if parts == 1:
        return [tensors]
    sizes = [len(piece) for piece in torch.arange(len(first)).tensor_split(min(parts, len(first)))]
    cut = [x.split(sizes) if x is not None else [None] * len(sizes) for x in tensors]
    return list(zip(*cut, strict=True))


def with_room(experts_BTk: Tensor, experts: int, capacity: int) -> Tensor:
    """(B T, k): whether a copy is among the first `capacity` of its sequence that go to its expert.

    First come those of tokens that come first: so no token depends on a later one.
    """
    batch = len(experts_BTk)
    sequence = torch.arange(batch, device=experts_BTk.device).view(-1, 1, 1)
    key = (experts_BTk + sequence * experts).flatten()
    order = key.argsort(stable=True)
    counts = torch.bincount(key, minlength=batch * experts)
    first = counts.cumsum(0) - counts
    ordinal = torch.empty_like(key)
    ordinal[order] = torch.arange(len(key), device=key.device) - first[key[order]]
    return (ordinal < capacity).view(-1, experts_BTk.shape[2])
