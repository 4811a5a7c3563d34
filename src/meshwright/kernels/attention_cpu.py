"""Causal attention on the CPU, one block of queries at a time, as a custom operator.

It is computed by a kernel in C++ (`attention_cpu_kernel`), or where that cannot be had by torch's operators:
batched matmuls over a block of queries and the keys that they attend to, which skip keys that the causal mask
hides. These are twice as fast as PyTorch's CPU flash kernel. As in flash attention (Dao et al. 2022) the
backward recomputes the probabilities, so memory is linear in the sequence length. Batched matmuls round
scores to the input's format before the softmax, which sums in fp32; the kernel does not round them.

Being one operator (`torch.ops.meshwright.blocked_attention`) it can be saved or recomputed by name, runs on
fake tensors, and counts its FLOPs. Shapes: B batch, T queries, S keys, H heads, K key-value heads,
G = H / K queries per key head, d channels, v those of the values, Q a block of queries, N = B * K.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils.flop_counter import register_flop_formula

from meshwright.kernels import attention_cpu_kernel
from meshwright.kernels.partial_attention import by_query_head, from_key_head, row_products
from meshwright.kernels.score_changes import (
    UNCHANGED,
    ScoreChanges,
    add_sinks_,
    cap_,
    cap_slope,
    keys_share,
    sinks_gradient,
)
from meshwright.spec.tiling import query_rows


def attend_in_blocks(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    sinks: Tensor | None = None,
    softcap: float | None = None,
) -> tuple[Tensor, Tensor]:
    """softmax(q k^T / sqrt(d) + bias) v for q (B, T, H, d), k (B, S, K, d), v (B, S, K, v), out (B, T, H, v);
    and the log-sum-exp of the scores (B, H, T) in fp32 (fp64 for fp64).

    The queries are the last T of the S positions, and see keys up to their own. `bias` (1 or B, 1, T, S), in
    q's dtype, is added to the scores; -inf hides more than the causal mask does. Scores are capped by
    `softcap` before, and the softmax has `sinks` (H,), too.
    """
    out, lse = _attend(q, k, v, bias, softcap)
    if sinks is not None:
        out.mul_(add_sinks_(lse, sinks.unsqueeze(1)).transpose(1, 2).unsqueeze(-1))
    return out, lse


def _attend(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, softcap: float | None
) -> tuple[Tensor, Tensor]:
    """`attend_in_blocks` without sinks."""
    if attention_cpu_kernel.takes(q, k, v, bias):
        return attention_cpu_kernel.forward(q, k, v, bias, softcap)
    queries, keys, values = by_query_head(q, k.shape[2]), _by_key_head(k), _by_key_head(v)
    out, lse = _empty_outputs(q, v)
    sums = lse.unflatten(1, (k.shape[2], -1))
    for first, last, seen in _blocks(q, k):
        block = queries[:, :, first:last].flatten(1, 2)
        scores = _scores(block, _first(keys, seen))
        if softcap is not None:
            cap_(scores, softcap)
        _add_bias(scores, bias, first, last)
        probabilities = torch.softmax(scores, -1)
        found = scores.amax(-1).to(lse.dtype) - probabilities.amax(-1).to(lse.dtype).log_()
        del scores
        sums[..., first:last] = found.view(*sums.shape[:3], last - first)
        _write_queries(out, k, first, last, torch.bmm(probabilities, _first(values, seen)))
    return out, lse


def blocked_attention(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, changes: ScoreChanges = UNCHANGED
) -> Tensor:
    """Attention (B, T, H, v) of `attend_in_blocks`, as one operator."""
    operator = torch.ops.meshwright.blocked_attention.default
    return operator(q, k, v, bias, changes.sinks, changes.softcap)[0]


def _differentiate_in_blocks(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    sinks: Tensor | None,
    softcap: float | None,
    out: Tensor,
    lse: Tensor,
    grad: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    if attention_cpu_kernel.takes(q, k, v, bias):
        return attention_cpu_kernel.backward(q, k, v, bias, softcap, out, lse, grad)
    queries, keys, values = by_query_head(q, k.shape[2]), _by_key_head(k), _by_key_head(v)
    grads = by_query_head(grad, k.shape[2])
    exact = torch.promote_types(q.dtype, torch.float32)
    grad_q = q.new_empty(q.shape)
    grad_k, grad_v = torch.zeros_like(keys, dtype=exact), torch.zeros_like(values, dtype=exact)
    scale = q.shape[-1] ** -0.5
    shares = None if sinks is None else keys_share(lse, sinks.unsqueeze(1)).unflatten(1, (k.shape[2], -1))
    for first, last, seen in _blocks(q, k):
        block, block_grad = queries[:, :, first:last].flatten(1, 2), grads[:, :, first:last].flatten(1, 2)
        seen_keys = _first(keys, seen)
        scores, slope = _scores(block, seen_keys), None
        if softcap is not None:
            slope = cap_slope(cap_(scores, softcap), softcap)
        _add_bias(scores, bias, first, last)
        probabilities = torch.softmax(scores, -1)
        del scores
        if shares is not None:
            probabilities.mul_(shares[..., first:last].reshape(len(block), -1, 1))
        grad_v[:, :seen] += torch.bmm(probabilities.transpose(1, 2), block_grad)
        grad_probabilities = torch.bmm(block_grad, _first(values, seen).transpose(1, 2))
        grad_scores = torch._softmax_backward_data(grad_probabilities, probabilities, -1, q.dtype)
        del probabilities, grad_probabilities
        if slope is not None:
            grad_scores.mul_(slope)
        grad_k[:, :seen] += torch.bmm(grad_scores.transpose(1, 2), block)
        _write_queries(grad_q, k, first, last, torch.bmm(grad_scores, seen_keys).mul_(scale))
        del grad_scores, slope, seen_keys
    return grad_q, from_key_head(grad_k.mul_(scale), k), from_key_head(grad_v, v)


def _like_forward(q: Tensor, k: Tensor, v: Tensor, *_others: object) -> tuple[Tensor, Tensor]:
    return _empty_outputs(q, v)


def _like_backward(q: Tensor, k: Tensor, v: Tensor, *_others: object) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


# Not `torch.library.custom_op`, whose first call imports Dynamo, which takes most of a second.
for _name, _function, _fake in (
    ("meshwright::blocked_attention", attend_in_blocks, _like_forward),
    ("meshwright::blocked_attention_backward", _differentiate_in_blocks, _like_backward),
):
    torch.library.define(_name, torch.library.infer_schema(_function, mutates_args=()))
    torch.library.impl(_name, "default", _function)
    torch.library.register_fake(_name, _fake)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, ctx.softcap = inputs
    ctx.save_for_backward(*tensors, *output)
    ctx.set_materialize_grads(False)  # else zeros are made for the log-sum-exp's gradient, which is not used


def _differentiate(ctx: Any, grad: Tensor, _grad_lse: Tensor) -> tuple[Tensor | None, ...]:
    backward = torch.ops.meshwright.blocked_attention_backward.default
    *inputs, sinks, out, lse = ctx.saved_tensors
    found = backward(*inputs, sinks, ctx.softcap, out, lse, grad)
    of_sinks = None
    if sinks is not None:
        delta = row_products(grad, out).transpose(1, 2)
        of_sinks = sinks_gradient(delta, lse, sinks.unsqueeze(1)).sum((0, 2)).to(sinks.dtype)
    return *found, None, of_sinks, None


torch.library.register_autograd("meshwright::blocked_attention", _differentiate, setup_context=_keep)

BODIES: dict[Any, Callable[..., Any]] = {
    torch.ops.meshwright.blocked_attention.default: attend_in_blocks,
    torch.ops.meshwright.blocked_attention_backward.default: _differentiate_in_blocks,
}
"""The function behind each operator, for those who look inside, such as a count of its temporaries."""


@register_flop_formula(torch.ops.meshwright.blocked_attention)
def _flops(q: torch.Size, k: torch.Size, v: torch.Size, *_args: Any, **_kwargs: Any) -> int:
    """Two matmuls over the whole square, as torch counts its own attention operators."""
    return 2 * q[:3].numel() * k[1] * (q[3] + v[3])


@register_flop_formula(torch.ops.meshwright.blocked_attention_backward)
def _backward_flops(q: torch.Size, k: torch.Size, v: torch.Size, *_args: Any, **_kwargs: Any) -> int:
    return 2 * q[:3].numel() * k[1] * (3 * q[3] + 2 * v[3])


def _empty_outputs(q: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    exact, (batch, queries, heads, _) = torch.promote_types(q.dtype, torch.float32), q.shape
    return q.new_empty(*q.shape[:3], v.shape[3]), q.new_empty(batch, heads, queries, dtype=exact)


def _blocks(q: Tensor, k: Tensor) -> Iterator[tuple[int, int, int]]:
    """(first query, one past the last, number of keys that the last one sees) of each block.

    For fake tensors, which have sizes and no values, these are the last blocks only: the others take less
    memory.
    """
    batch, length, heads, _ = q.shape
    before = k.shape[1] - length
    rows = query_rows(batch, heads, k.shape[1], q.element_size())
    starts = range(0, length, rows)
    # The last block may have fewer queries, and while one is made the one before may still be there.
    for first in starts[-3:] if isinstance(q, FakeTensor) else starts:
        last = min(first + rows, length)
        yield first, last, before + last


def _scores(block: Tensor, keys: Tensor) -> Tensor:
    """Scores of a block of queries (N, G * Q, d) on keys (N, S, d): (N, G * Q, S)."""
    scores = block.new_empty(*block.shape[:2], keys.shape[1])
    return scores.baddbmm_(block, keys.transpose(1, 2), beta=0, alpha=block.shape[-1] ** -0.5)


def _add_bias(scores: Tensor, bias: Tensor | None, first: int, last: int) -> None:
    """Add to the scores (N, G * Q, S) of the queries from `first` to `last` on the keys up to the last
    one's."""
    rows, keys = last - first, scores.shape[2]
    if bias is not None:
        bias = bias[:, :, first:last, :keys]
        scores.view(bias.shape[0], -1, *bias.shape[2:]).add_(bias)
    else:  # the last Q keys are the queries' own positions, the others are all seen
        later = scores.new_full((rows, rows), float("-inf")).triu_(1)
        scores.view(len(scores), -1, rows, keys)[..., -rows:].add_(later)


def _first(rows: Tensor, count: int) -> Tensor:
    """The first rows (N, `count`, d) of (N, S, d); contiguous unless MKL, which takes them as they stand, is
    to multiply them.

    oneDNN copies rows that are not contiguous itself, and slowly where it takes them transposed.
    """
    first, size = rows[:, :count], rows.dtype.itemsize
    by_mkl = size == 8 or (size == 4 and torch.get_float32_matmul_precision() == "highest")
    return first if by_mkl and torch.backends.mkl.is_available() else first.contiguous()


def _by_key_head(k: Tensor) -> Tensor:
    """(B, S, K, d) -> (N, S, d), contiguous."""
    return k.transpose(1, 2).contiguous().flatten(0, 1)


def _write_queries(out: Tensor, k: Tensor, first: int, last: int, mixed: Tensor) -> None:
    """Put (N, G * Q, d) into `out` (B, T, H, d) at queries `first` to `last`."""
    target = out.unflatten(2, (k.shape[2], -1))[:, first:last]
    batch, rows, heads, group, dim = target.shape
    target.copy_(mixed.view(batch, heads, group, rows, dim).permute(0, 3, 1, 2, 4))
