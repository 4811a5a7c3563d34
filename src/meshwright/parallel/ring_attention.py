"""Attention to keys and values of other ranks, which arrive block by block (ring) or all at once (gather).

`context_parallel.py` lists what is split and sent. Shapes: B batch, T local tokens, H query heads, K
key-value heads, d channels, N = B K, G = H / K, n ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from meshwright.model.attention_flash import part_operators
from meshwright.model.attention_intervals import AttentionIntervals
from meshwright.model.partial_attention import (
    PartOperators,
    by_key_head,
    by_query_head,
    empty_result,
    from_key_head,
    from_query_head,
)
from meshwright.parallel.collectives import (
    DONE,
    start_all_gather,
    start_reduce_scatter,
    start_shift,
)
from meshwright.parallel.fused_comm_ops import FusedCommOp, Tensors, empty
from meshwright.parallel.mesh import Axis, Pending
from meshwright.parallel.recompute_cache import RecomputeCache


def _plans(
    operators: PartOperators, q: Tensor, k: Tensor, intervals: AttentionIntervals, places: Sequence[Tensor]
) -> list[Any]:
    heads, kv_heads = q.shape[2], k.shape[2]
    return [operators.plan(intervals, keys_at, kv_heads, heads // kv_heads) for keys_at in places]


class _ContextAttentionOp(FusedCommOp):
    """Attention of q (B, T, H, d), k and v (B, T, K, d) to keys of all ranks of an axis: out (B, T, H, d).

    Further inputs are the tensors from which `intervals` makes what the queries attend to, and the positions
    (T,) that each rank holds. The other results are saved for the backward.
    """

    kind = "attention"
    results = 1

    def __init__(
        self,
        axis: Axis | None,
        intervals: Callable[[Tensors], tuple[AttentionIntervals, Sequence[Tensor]]],
        cache: RecomputeCache | None,
    ) -> None:
        """Without an axis this rank holds all keys and values."""
        super().__init__(cache)
        self._axis, self._intervals = axis, intervals

    def gradients_like(self, saved: Tensors, grads: Tensors, inputs: int) -> Tensors:
        return [empty(saved[0]), empty(saved[1]), empty(saved[1])]


class RingAttention(_ContextAttentionOp):
    """Keys and values are passed around the ring of ranks."""

    def forward(self, inputs: Tensors) -> Tensors:
        q, k, v, *rest = inputs
        intervals, places = self._intervals(rest)
        queries, kv = by_query_head(q, k.shape[2]), by_key_head(k, v)
        out, lse = empty_result(queries)
        operators = part_operators(q, intervals)
        for step, part in enumerate(_plans(operators, q, k, intervals, self._arrivals(places))):
            following, pending = self._shift(kv) if step + 1 < len(places) else (kv, DONE)
            operators.forward(queries, kv[0], kv[1], part, out, lse)
            pending.wait()
            kv = following
        return from_query_head(out, q), lse

    def keep(self, inputs: Tensors, results: Tensors) -> Tensors:
        return [*inputs[:3], *results, *inputs[3:]]

    def backward(
        self, saved: Tensors, grads: Tensors, inputs: int, parameters: Sequence[nn.Parameter] = ()
    ) -> Tensors:
        q, k, v, out, lse, *rest = saved
        intervals, places = self._intervals(rest)
        queries = _QueryGradients(q, k, grads[0], out, lse, intervals)
        kv = by_key_head(k, v)
        total: Tensor | None = None
        arriving: Pending = DONE
        for step, part in enumerate(queries.plans(self._arrivals(places))):
            following, pending = (kv, DONE) if step + 1 == len(places) else self._shift(kv)
            grad_kv = queries.backward(kv, part)
            arriving.wait()
            total, arriving = self._shift(grad_kv if total is None else total.add_(grad_kv))
            pending.wait()
            kv = following
        arriving.wait()
        assert total is not None
        return [from_query_head(queries.grad, q), *from_key_head(total, k)]

    def results_like(self, inputs: Tensors) -> Tensors:
        return [empty(inputs[0]), _lse_like(*inputs[:2])]

    def _arrivals(self, places: Sequence[Tensor]) -> list[Tensor]:
        """The ranks' positions in the order in which their keys reach this rank, its own first."""
        ranks, rank = (self._axis.size, self._axis.rank) if self._axis else (1, 0)
        return [places[(rank - step) % ranks] for step in range(ranks)]

    def _shift(self, sent: Tensor) -> tuple[Tensor, Pending]:
        """Start to pass `sent` to the next rank; returns what the previous one sends, once that is done."""
        if self._axis is None or self._axis.size == 1:
            return sent, DONE
        received = torch.empty_like(sent)
        return received, start_shift(received, sent, self._axis)


class GatherAttention(_ContextAttentionOp):
    """Keys and values of all ranks are gathered, and saved for the backward."""

    def forward(self, inputs: Tensors) -> Tensors:
        q, k, v, *rest = inputs
        intervals, places = self._intervals(rest)
        assert self._axis is not None
        queries, kv = by_query_head(q, k.shape[2]), by_key_head(k, v)
        blocks = kv.new_empty(self._axis.size, *kv.shape)
        start_all_gather(blocks.view(-1), kv.view(-1), self._axis).wait()
        out, lse = empty_result(queries)
        operators = part_operators(q, intervals)
        for block, part in zip(blocks, _plans(operators, q, k, intervals, places), strict=True):
            operators.forward(queries, block[0], block[1], part, out, lse)
        return from_query_head(out, q), lse, blocks

    def keep(self, inputs: Tensors, results: Tensors) -> Tensors:
        out, lse, blocks = results
        return [*inputs[:2], blocks, out, lse, *inputs[3:]]

    def backward(
        self, saved: Tensors, grads: Tensors, inputs: int, parameters: Sequence[nn.Parameter] = ()
    ) -> Tensors:
        q, k, blocks, out, lse, *rest = saved
        intervals, places = self._intervals(rest)
        assert self._axis is not None
        queries = _QueryGradients(q, k, grads[0], out, lse, intervals)
        parts = zip(blocks, queries.plans(places), strict=True)
        grad_blocks = torch.stack([queries.backward(kv, part) for kv, part in parts])
        total = torch.empty_like(grad_blocks[0])
        start_reduce_scatter(total.view(-1), grad_blocks.view(-1), self._axis).wait()
        return [from_query_head(queries.grad, q), *from_key_head(total, k)]

    def results_like(self, inputs: Tensors) -> Tensors:
        q, k, *_ = inputs
        assert self._axis is not None
        batch, length, heads, dim = k.shape
        blocks = empty(k, self._axis.size, 2, batch * heads, length, dim)
        return [empty(q), _lse_like(q, k), blocks]


class _QueryGradients:
    """A rank's queries in the backward, and the running sum `grad` (N, G, T, d) of their gradients."""

    def __init__(
        self, q: Tensor, k: Tensor, grad: Tensor, out: Tensor, lse: Tensor, intervals: AttentionIntervals
    ) -> None:
        kv_heads = k.shape[2]
        self._operators = part_operators(q, intervals)
        self.plans = partial(_plans, self._operators, q, k, intervals)
        self._q, self._grad_out, self._lse = by_query_head(q, kv_heads), by_query_head(grad, kv_heads), lse
        self._delta = self._operators.remember(self._grad_out, by_query_head(out, kv_heads))
        self.grad = torch.zeros_like(self._q, dtype=lse.dtype)

    def backward(self, kv: Tensor, part: Any) -> Tensor:
        """Gradients (2, N, S, d) of one block of keys and values, from these queries."""
        return self._operators.backward(
            self._grad_out, self._delta, self._lse, self._q, kv[0], kv[1], part, self.grad
        )


def _lse_like(q: Tensor, k: Tensor) -> Tensor:
    """An empty tensor for the log-sum-exp (N, G, T)."""
    batch, length, heads, _ = q.shape
    shape = batch * k.shape[2], heads // k.shape[2], length
    return q.new_empty(shape, dtype=torch.promote_types(q.dtype, torch.float32))
