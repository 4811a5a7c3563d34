"""Attention to keys and values that other ranks hold: they come one block after another, or all at once.

Splits and bytes are told in `context.py`. Shapes: B batch, T local tokens, H query heads, K key-value heads,
d channels, N = B K, G = H / K, n ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

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
from meshwright.parallel.recompute import RecomputeCache


def ring_attention(
    q_BTHd: Tensor,
    k_BTKd: Tensor,
    v_BTKd: Tensor,
    sight: AttentionIntervals,
    places: Sequence[Tensor],
    axis: Axis | None,
    kept: RecomputeCache,
) -> Tensor:
    """(B, T, H, d); keys and values go round the ring `axis`, whose rank r holds `places[r]`.

    Without an axis the one block is here. `kept` remembers the result for a second forward.
    """
    result: Tensor = _Ring.apply(q_BTHd, k_BTKd, v_BTKd, sight, places, axis, kept)
    return result


def gather_attention(
    q_BTHd: Tensor,
    k_BTKd: Tensor,
    v_BTKd: Tensor,
    sight: AttentionIntervals,
    places: Sequence[Tensor],
    axis: Axis,
    kept: RecomputeCache,
) -> Tensor:
    """(B, T, H, d); keys and values of all ranks are gathered, and kept for the backward."""
    result: Tensor = _Gather.apply(q_BTHd, k_BTKd, v_BTKd, sight, places, axis, kept)
    return result


def _plans(
    operators: PartOperators, q: Tensor, k: Tensor, sight: AttentionIntervals, places: Sequence[Tensor]
) -> list[Any]:
    heads, kv_heads = q.shape[2], k.shape[2]
    return [operators.plan(sight, keys_at, kv_heads, heads // kv_heads) for keys_at in places]


def _start_shift(sent: Tensor, axis: Axis | None) -> tuple[Tensor, Pending]:
    """What comes from the rank before, once the shift is done. Without an axis, what is sent."""
    if axis is None or axis.size == 1:
        return sent, DONE
    received = torch.empty_like(sent)
    return received, start_shift(received, sent, axis)


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sight: AttentionIntervals,
        places: Sequence[Tensor],
        axis: Axis | None,
        kept: RecomputeCache,
    ) -> Tensor:
        ctx.axis, ctx.sight, ctx.places = axis, sight, in_order_of_arrival(places, axis)
        result, lse = kept.run("attention", lambda: _around(q, k, v, sight, ctx.places, axis))
        ctx.save_for_backward(q, k, v, result, lse)
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return *_around_backward(grad, ctx.saved_tensors, ctx.sight, ctx.places, ctx.axis), *[None] * 4


def in_order_of_arrival(places: Sequence[Tensor], axis: Axis | None) -> list[Tensor]:
    """The ranks' places as their keys come to this rank: its own, then those of the rank before, ..."""
    ranks, rank = (axis.size, axis.rank) if axis else (1, 0)
    return [places[(rank - step) % ranks] for step in range(ranks)]


def _around(
    q: Tensor, k: Tensor, v: Tensor, sight: AttentionIntervals, places: Sequence[Tensor], axis: Axis | None
) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp of the own queries on every block, in the order of arrival."""
    queries, kv = by_query_head(q, k.shape[2]), by_key_head(k, v)
    out, lse = empty_result(queries)
    operators = part_operators(q, sight)
    for step, part in enumerate(_plans(operators, q, k, sight, places)):
        following, pending = _start_shift(kv, axis) if step + 1 < len(places) else (kv, DONE)
        operators.forward(queries, kv[0], kv[1], part, out, lse)
        pending.wait()
        kv = following
    return from_query_head(out, q), lse


def _around_backward(
    grad: Tensor,
    kept: Sequence[Tensor],
    sight: AttentionIntervals,
    places: Sequence[Tensor],
    axis: Axis | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of q, k and v of `kept` = (q, k, v, out, log-sum-exp)."""
    q, k, v, out, lse = kept
    own = _Queries(q, k, grad, out, lse, sight)
    kv = by_key_head(k, v)
    home: Tensor | None = None
    arriving: Pending = DONE
    for step, part in enumerate(own.plans(places)):
        last = step + 1 == len(places)
        following, pending = (kv, DONE) if last else _start_shift(kv, axis)
        grad_kv = own.backward(kv, part)
        arriving.wait()
        home, arriving = _start_shift(grad_kv if home is None else home.add_(grad_kv), axis)
        pending.wait()
        kv = following
    arriving.wait()
    assert home is not None
    return from_query_head(own.grad, q), *from_key_head(home, k)


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sight: AttentionIntervals,
        places: Sequence[Tensor],
        axis: Axis,
        kept: RecomputeCache,
    ) -> Tensor:
        ctx.axis, ctx.sight, ctx.places = axis, sight, places
        result, lse, blocks = kept.run("attention", lambda: _all_at_once(q, k, v, sight, places, axis))
        ctx.save_for_backward(q, k, blocks, result, lse)
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return *_gathered_backward(grad, ctx.saved_tensors, ctx.sight, ctx.places, ctx.axis), *[None] * 4


def _all_at_once(
    q: Tensor, k: Tensor, v: Tensor, sight: AttentionIntervals, places: Sequence[Tensor], axis: Axis
) -> tuple[Tensor, Tensor, Tensor]:
    """Output, log-sum-exp, and the keys and values of all ranks."""
    queries, kv = by_query_head(q, k.shape[2]), by_key_head(k, v)
    blocks = kv.new_empty(axis.size, *kv.shape)
    start_all_gather(blocks.view(-1), kv.view(-1), axis).wait()
    out, lse = empty_result(queries)
    operators = part_operators(q, sight)
    for block, part in zip(blocks, _plans(operators, q, k, sight, places), strict=True):
        operators.forward(queries, block[0], block[1], part, out, lse)
    return from_query_head(out, q), lse, blocks


def _gathered_backward(
    grad: Tensor, kept: Sequence[Tensor], sight: AttentionIntervals, places: Sequence[Tensor], axis: Axis
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of q, k and v, of `kept` = (q, k, keys and values of all ranks, out, log-sum-exp)."""
    q, k, blocks, out, lse = kept
    own = _Queries(q, k, grad, out, lse, sight)
    parts = zip(blocks, own.plans(places), strict=True)
    grads = torch.stack([own.backward(kv, part) for kv, part in parts])
    home = torch.empty_like(grads[0])
    start_reduce_scatter(home.view(-1), grads.view(-1), axis).wait()
    return from_query_head(own.grad, q), *from_key_head(home, k)


class _Queries:
    """A rank's own queries in the backward, with the sum of their gradients."""

    def __init__(
        self, q: Tensor, k: Tensor, grad: Tensor, out: Tensor, lse: Tensor, sight: AttentionIntervals
    ) -> None:
        kv_heads = k.shape[2]
        self._operators = part_operators(q, sight)
        self.plans = partial(_plans, self._operators, q, k, sight)
        self._q, self._grad_out, self._lse = by_query_head(q, kv_heads), by_query_head(grad, kv_heads), lse
        self._remembered = self._operators.remember(self._grad_out, by_query_head(out, kv_heads))
        self.grad = torch.zeros_like(self._q, dtype=lse.dtype)

    def backward(self, kv: Tensor, part: Any) -> Tensor:
        """The gradients of one block of keys and values (2, N, S, d) that these queries see."""
        whole = (self._grad_out, self._remembered, self._lse)
        return self._operators.backward(*whole, self._q, kv[0], kv[1], part, self.grad)


# The same as operators of a compiled block --------------------------------------------------------------


class _JointAttention(FusedCommOp):
    """Attention of (q, k, v, *sight): out, and what the backward needs besides."""

    kind = "attention"

    def __init__(
        self, axis: Axis, seen: Callable[[Tensors], tuple[AttentionIntervals, Sequence[Tensor]]]
    ) -> None:
        """`seen` makes of the sight's tensors what the queries see, and the places that each rank holds."""
        super().__init__()
        self._axis, self._seen = axis, seen

    def gradients_like(self, kept: Tensors, grads: Tensors, inputs: int) -> Tensors:
        return [empty(kept[0]), empty(kept[1]), empty(kept[1])]


class JointRing(_JointAttention):
    """`ring_attention`."""

    def forward(self, inputs: Tensors) -> Tensors:
        q, k, v, *seen = inputs
        sight, places = self._seen(seen)
        return _around(q, k, v, sight, in_order_of_arrival(places, self._axis), self._axis)

    def keep(self, inputs: Tensors, results: Tensors) -> Tensors:
        return [*inputs[:3], *results, *inputs[3:]]

    def backward(self, kept: Tensors, grads: Tensors, inputs: int) -> Tensors:
        sight, places = self._seen(kept[5:])
        order = in_order_of_arrival(places, self._axis)
        return _around_backward(grads[0], kept[:5], sight, order, self._axis)

    def results_like(self, inputs: Tensors) -> Tensors:
        return [empty(inputs[0]), _lse_like(*inputs[:2])]


class JointGather(_JointAttention):
    """`gather_attention`."""

    def forward(self, inputs: Tensors) -> Tensors:
        q, k, v, *seen = inputs
        return _all_at_once(q, k, v, *self._seen(seen), self._axis)

    def keep(self, inputs: Tensors, results: Tensors) -> Tensors:
        result, lse, blocks = results
        return [*inputs[:2], blocks, result, lse, *inputs[3:]]

    def backward(self, kept: Tensors, grads: Tensors, inputs: int) -> Tensors:
        return _gathered_backward(grads[0], kept[:5], *self._seen(kept[5:]), self._axis)

    def results_like(self, inputs: Tensors) -> Tensors:
        q, k, *_ = inputs
        batch, length, heads, dim = k.shape
        blocks = empty(k, self._axis.size, 2, batch * heads, length, dim)
        return [empty(q), _lse_like(q, k), blocks]


def _lse_like(q: Tensor, k: Tensor) -> Tensor:
    """(N, G, T) of the log-sum-exp."""
    batch, length, heads, _ = q.shape
    shape = batch * k.shape[2], heads // k.shape[2], length
    return q.new_empty(shape, dtype=torch.promote_types(q.dtype, torch.float32))
