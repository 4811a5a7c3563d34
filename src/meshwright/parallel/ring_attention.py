"""Attention to keys and values of other ranks, which arrive block by block (ring) or all at once (gather).

`context_parallel.py` lists what is split and sent. Shapes: B batch, T local tokens, H query heads, K
key-value heads, d channels, N = B K, G = H / K, n ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from meshwright.comm.collectives import DONE, start_all_gather, start_reduce_scatter, start_shift
from meshwright.comm.mesh import Axis
from meshwright.comm.traffic_counter import Pending
from meshwright.kernels.attention_flash import part_operators
from meshwright.kernels.attention_intervals import AttentionIntervals
from meshwright.kernels.partial_attention import (
    PartOperators,
    by_key_head,
    by_query_head,
    empty_result,
    from_key_head,
    from_query_head,
    row_products,
)
from meshwright.kernels.score_changes import add_sinks_, sinks_gradient
from meshwright.parallel.fused_comm_ops import FusedCommOp, Parameters, Tensors, empty
from meshwright.parallel.recompute_cache import RecomputeCache
from meshwright.parallel.ulysses import Run

Blocks = Iterable[tuple[Tensor, Any]]
"""(keys and values (2, N, S, d), the plan of the attention to them) of one rank after another."""


class KeyParts:
    """The parts in which keys come to a rank's queries, with plans of the attention to them.

    Planning takes the host as long as many kernels take a device, so layers and their backwards have the
    plans of a microbatch in common.
    """

    def __init__(self, intervals: AttentionIntervals, positions: Sequence[Tensor]) -> None:
        """`intervals` are those of the queries; `positions` (S,), ascending, those of each part's keys."""
        self.intervals, self._positions = intervals, positions
        self._plans: dict[tuple[PartOperators, int, int], list[Any]] = {}

    def plans(self, operators: PartOperators, kv_heads: int, group: int) -> list[Any]:
        """The plan of each part for `group` query heads a key-value head, made when first asked for."""
        key = operators, kv_heads, group
        if key not in self._plans:
            arguments = ((self.intervals, keys_at, kv_heads, group) for keys_at in self._positions)
            self._plans[key] = [operators.plan(*each) for each in arguments]
        return self._plans[key]


class _Queries:
    """A rank's queries, which attend to keys and values block by block."""

    def __init__(
        self, q: Tensor, k: Tensor, parts: KeyParts, softcap: float | None, sinks: Tensor | None
    ) -> None:
        self._like, self._kv_heads = q, k.shape[2]
        self._operators = part_operators(q, softcap)
        self._q = by_query_head(q, self._kv_heads)
        self._sinks = None if sinks is None else self._by_query_head(sinks)
        self.plans = parts.plans(self._operators, self._kv_heads, self._q.shape[1])

    def attend(self, blocks: Blocks) -> tuple[Tensor, Tensor]:
        """The output (B, T, H, d) and its log-sum-exp (N, G, T)."""
        out, lse = empty_result(self._q)
        for kv, plan in blocks:
            self._operators.forward(self._q, kv[0], kv[1], plan, out, lse)
            del kv  # a ring receives a block into the memory of the one before
        if self._sinks is not None:
            out.mul_(add_sinks_(lse, self._sinks).unsqueeze(-1))
        return from_query_head(out, self._like), lse

    def differentiate(self, grad: Tensor, out: Tensor, lse: Tensor, blocks: Blocks) -> Iterator[Tensor]:
        """Gradients (2, N, S, d) of each block of keys and values; adds up `grad_q` (N, G, T, d), and finds
        `grad_sinks` (H,), empty without sinks."""
        grad_out, whole = by_query_head(grad, self._kv_heads), by_query_head(out, self._kv_heads)
        delta = self._operators.remember(grad_out, whole)
        self.grad_sinks = self._differentiate_sinks(grad_out, whole, lse)
        del whole
        self.grad_q = torch.zeros_like(self._q, dtype=lse.dtype)
        for kv, plan in blocks:
            yield self._operators.backward(grad_out, delta, lse, self._q, kv[0], kv[1], plan, self.grad_q)
            del kv

    def gradients(self, total: Tensor, k: Tensor) -> Tensors:
        """Gradients of q, k, v and sinks, given the sum (2, N, S, d) over ranks of those of k and v."""
        of_keys = (from_key_head(x, k) for x in total)
        return [from_query_head(self.grad_q, self._like), *of_keys, *self.grad_sinks]

    def _by_query_head(self, sinks: Tensor) -> Tensor:
        """(H,) -> (N, G, 1)."""
        by_head = sinks.view(1, self._kv_heads, -1, 1)
        return by_head.expand(self._like.shape[0], -1, -1, -1).flatten(0, 1)

    def _differentiate_sinks(self, grad_out: Tensor, out: Tensor, lse: Tensor) -> Tensors:
        """The gradient (H,) of the sinks, in a list; none without sinks."""
        if self._sinks is None:
            return []
        found = sinks_gradient(row_products(grad_out, out), lse, self._sinks)
        by_head = found.unflatten(0, (-1, self._kv_heads)).sum((0, 3)).flatten()
        return [by_head.to(self._sinks.dtype)]


class _ContextAttentionOp(FusedCommOp):
    """Attention of q (B, T, H, d), k and v (B, T, K, d) to keys of all ranks of an axis: out (B, T, H, d).

    The next input are sinks (H,), if there are any. `parts` gives what the queries attend to from the further
    inputs, which only a compiled block has. The results but the first are saved for the backward.
    """

    kind = "attention"
    results = 1

    def __init__(
        self,
        axis: Axis,
        parts: Callable[[Tensors], KeyParts],
        cache: RecomputeCache | None,
        softcap: float | None,
        sinks: bool,
    ) -> None:
        super().__init__(cache)
        self._axis, self._parts, self._softcap, self._sinks = axis, parts, softcap, int(sinks)

    def queries(self, q: Tensor, k: Tensor, rest: Tensors) -> _Queries:
        """This rank's queries, given the inputs after q, k and v."""
        sinks = rest[0] if self._sinks else None
        return _Queries(q, k, self._parts(rest[self._sinks :]), self._softcap, sinks)

    def results_like(self, inputs: Tensors) -> Tensors:
        q, k, *_ = inputs
        lse_shape = q.shape[0] * k.shape[2], q.shape[2] // k.shape[2], q.shape[1]
        return [empty(q), q.new_empty(lse_shape, dtype=torch.promote_types(q.dtype, torch.float32))]

    def gradients_like(self, saved: Tensors, grads: Tensors) -> Tensors:
        *_, sinks = saved[: 5 + self._sinks]
        return [empty(saved[0]), empty(saved[1]), empty(saved[1]), *[empty(sinks)] * self._sinks]


class RingAttention(_ContextAttentionOp):
    """Keys and values are passed around the ring of ranks."""

    def forward(self, inputs: Tensors) -> Tensors:
        q, k, v, *rest = inputs
        queries = self.queries(q, k, rest)
        return queries.attend(self._arriving(by_key_head(k, v), queries.plans))

    def keep(self, inputs: Tensors, results: Tensors) -> Tensors:
        return [*inputs[:3], *results, *inputs[3:]]

    def backward(self, saved: Tensors, grads: Tensors, parameters: Parameters = ()) -> Tensors:
        q, k, v, out, lse, *rest = saved
        queries = self.queries(q, k, rest)
        blocks = self._arriving(by_key_head(k, v), queries.plans)
        total: Tensor | None = None
        arriving: Pending = DONE
        for grad_kv in queries.differentiate(grads[0], out, lse, blocks):
            arriving.wait()
            total, arriving = self._shift(grad_kv if total is None else total.add_(grad_kv))
        arriving.wait()
        assert total is not None
        return queries.gradients(total, k)

    def _arriving(self, kv: Tensor, plans: Sequence[Any]) -> Iterator[tuple[Tensor, Any]]:
        """The ranks' blocks in the order in which they reach this rank, its own first.

        The next one is under way while one is used.
        """
        ranks = self._axis.size
        for step in range(ranks):
            following, pending = self._shift(kv) if step + 1 < ranks else (kv, DONE)
            yield kv, plans[(self._axis.rank - step) % ranks]
            pending.wait()
            kv = following

    def _shift(self, sent: Tensor) -> tuple[Tensor, Pending]:
        """Start to pass `sent` to the next rank; returns what the previous one sends, once that is done."""
        if self._axis.size == 1:
            return sent, DONE
        received = torch.empty_like(sent)
        return received, start_shift(received, sent, self._axis)


class GatherAttention(_ContextAttentionOp):
    """Keys and values of all ranks are gathered, and saved for the backward in the order of positions.

    So they are one part, which takes as few kernels as one rank's keys.
    """

    def __init__(
        self,
        axis: Axis,
        parts: Callable[[Tensors], KeyParts],
        cache: RecomputeCache | None,
        softcap: float | None,
        sinks: bool,
        runs: Callable[[int], Sequence[Run]],
    ) -> None:
        """`runs` maps the length of a sequence to the ranks' rows in the order of positions."""
        super().__init__(axis, parts, cache, softcap, sinks)
        self._runs = runs

    def forward(self, inputs: Tensors) -> Tensors:
        q, k, v, *rest = inputs
        queries = self.queries(q, k, rest)
        whole = self._gather(by_key_head(k, v))
        return *queries.attend(zip([whole], queries.plans, strict=True)), whole

    def keep(self, inputs: Tensors, results: Tensors) -> Tensors:
        out, lse, whole = results
        return [*inputs[:2], whole, out, lse, *inputs[3:]]

    def backward(self, saved: Tensors, grads: Tensors, parameters: Parameters = ()) -> Tensors:
        q, k, whole, out, lse, *rest = saved
        queries = self.queries(q, k, rest)
        (grad_whole,) = queries.differentiate(grads[0], out, lse, zip([whole], queries.plans, strict=True))
        return queries.gradients(self._reduce_scatter(grad_whole), k)

    def results_like(self, inputs: Tensors) -> Tensors:
        k = inputs[1]
        batch, length, heads, dim = k.shape
        whole = empty(k, 2, batch * heads, length * self._axis.size, dim)
        return [*super().results_like(inputs), whole]

    def _gather(self, kv: Tensor) -> Tensor:
        """(2, N, T, d) of each rank -> (2, N, n T, d), in the order of positions."""
        blocks = kv.new_empty(self._axis.size, *kv.shape)
        start_all_gather(blocks.view(-1), kv.view(-1), self._axis).wait()
        runs = self._runs(blocks.shape[3] * self._axis.size)
        return torch.cat([blocks[rank, :, :, rows] for rank, rows in runs], 2)

    def _reduce_scatter(self, grads: Tensor) -> Tensor:
        """The transpose of `_gather`: each rank's part of the sum."""
        two, groups, length, dim = grads.shape
        blocks = grads.new_empty(self._axis.size, two, groups, length // self._axis.size, dim)
        first = 0
        for rank, rows in self._runs(length):
            last = first + rows.stop - rows.start
            blocks[rank, :, :, rows] = grads[:, :, first:last]
            first = last
        total = torch.empty_like(blocks[0])
        start_reduce_scatter(total.view(-1), blocks.view(-1), self._axis).wait()
        return total
