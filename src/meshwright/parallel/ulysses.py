"""The exchange of tokens for heads: from all heads of a rank's tokens to all tokens of a rank's heads.

Jacobs et al. 2023. Bytes are told in `context.py`. Shapes: B batch, T local tokens, H heads, d channels,
u ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from meshwright.parallel.collectives import start_all_to_all
from meshwright.parallel.fused_comm_ops import FusedCommOp, Tensors, empty
from meshwright.parallel.mesh import Axis


class Exchange:
    """Exchanges over `axis`, whose rank r holds the places `places[r]` (T,), rising.

    `to_heads` gives whole sequences in the order of places; `to_tokens` is the way back. Both are
    differentiable, each being the other's backward.
    """

    def __init__(self, axis: Axis, places: Sequence[Tensor]) -> None:
        self.axis = axis
        self._runs = _runs(places)

    def to_heads(self, *tokens: Tensor) -> tuple[Tensor, ...]:
        """(B, T, H, d) each, H a multiple of u -> (B, u T, H / u, d) each, in one message."""
        result: tuple[Tensor, ...] = _ToHeads.apply(self, *tokens)
        return result

    def to_tokens(self, heads: Tensor) -> Tensor:
        """(B, u T, H / u, d) -> (B, T, H, d)."""
        result: tuple[Tensor, ...] = _ToTokens.apply(self, heads)
        return result[0]

    def send_heads(self, tokens: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """`to_heads` without its derivative."""
        u = self.axis.size
        sent = torch.cat([x.unflatten(2, (u, -1)).movedim(2, 0) for x in tokens], 3)  # (u, B, T, h, d)
        received = torch.empty_like(sent, memory_format=torch.contiguous_format)
        start_all_to_all(received, sent.contiguous(), self.axis).wait()
        split = received.split([x.shape[2] // u for x in tokens], 3)
        return tuple(torch.cat([x[rank][:, rows] for rank, rows in self._runs], 1) for x in split)

    def send_tokens(self, heads: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """`to_tokens` of several tensors without its derivative."""
        u, counts = self.axis.size, [x.shape[2] for x in heads]
        batch, length, _, dim = heads[0].shape
        sent = heads[0].new_empty(u, batch, length // u, sum(counts), dim)
        for x, into in zip(heads, sent.split(counts, 3), strict=True):
            first = 0
            for rank, rows in self._runs:
                last = first + rows.stop - rows.start
                into[rank][:, rows] = x[:, first:last]
                first = last
        received = torch.empty_like(sent)
        start_all_to_all(received, sent, self.axis).wait()
        return tuple(x.movedim(0, 2).flatten(2, 3) for x in received.split(counts, 3))


class _ToHeads(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, exchange: Exchange, *tokens: Tensor) -> tuple[Tensor, ...]:
        ctx.exchange = exchange
        return exchange.send_heads(tokens)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return (None, *ctx.exchange.send_tokens(grads))


class _ToTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, exchange: Exchange, *heads: Tensor) -> tuple[Tensor, ...]:
        ctx.exchange = exchange
        return exchange.send_tokens(heads)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return (None, *ctx.exchange.send_heads(grads))


# The same as operators of a compiled block --------------------------------------------------------------


class _JointExchange(FusedCommOp):
    kind = "exchange"

    def __init__(self, axis: Axis, exchange: Callable[[int], Exchange]) -> None:
        """`exchange` makes one for so many tokens of this rank."""
        super().__init__()
        self._axis, self._exchange = axis, exchange

    def keep(self, inputs: Tensors, results: Tensors) -> Tensors:
        return []

    def _send_tokens(self, heads: Tensors) -> Tensors:
        """Of one head a rank they come as views of one message."""
        found = self._exchange(heads[0].shape[1] // self._axis.size).send_tokens(heads)
        return [x.contiguous() for x in found]

    def _heads_like(self, tokens: Tensors) -> Tensors:
        u = self._axis.size
        return [empty(x, x.shape[0], x.shape[1] * u, x.shape[2] // u, x.shape[3]) for x in tokens]

    def _tokens_like(self, heads: Tensors) -> Tensors:
        u = self._axis.size
        return [empty(x, x.shape[0], x.shape[1] // u, x.shape[2] * u, x.shape[3]) for x in heads]


class JointToHeads(_JointExchange):
    """`Exchange.to_heads`."""

    def forward(self, inputs: Tensors) -> Tensors:
        return self._exchange(inputs[0].shape[1]).send_heads(inputs)

    def backward(self, kept: Tensors, grads: Tensors, inputs: int) -> Tensors:
        return self._send_tokens(grads)

    def results_like(self, inputs: Tensors) -> Tensors:
        return self._heads_like(inputs)

    def gradients_like(self, kept: Tensors, grads: Tensors, inputs: int) -> Tensors:
        return self._tokens_like(grads)


class JointToTokens(_JointExchange):
    """`Exchange.to_tokens`."""

    def forward(self, inputs: Tensors) -> Tensors:
        return self._send_tokens(inputs)

    def backward(self, kept: Tensors, grads: Tensors, inputs: int) -> Tensors:
        return self._exchange(grads[0].shape[1]).send_heads(grads)

    def results_like(self, inputs: Tensors) -> Tensors:
        return self._tokens_like(inputs)

    def gradients_like(self, kept: Tensors, grads: Tensors, inputs: int) -> Tensors:
        return self._heads_like(grads)


def _runs(places: Sequence[Tensor]) -> list[tuple[int, slice]]:
    """(rank, its rows) of each run of consecutive places, in the order of the sequence."""
    runs: list[tuple[int, int, slice]] = []
    for rank, at in enumerate(places):
        ends = (torch.nonzero(at.diff() != 1).flatten() + 1).tolist()
        for begin, end in zip([0, *ends], [*ends, len(at)], strict=True):
            runs.append((int(at[begin]), rank, slice(begin, end)))
    return [(rank, rows) for _, rank, rows in sorted(runs, key=lambda run: run[0])]
