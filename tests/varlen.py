"""An exact stand-in on the CPU for the CUDA kernel of `attention_flash`; attention put together of parts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from meshwright.kernels.attention_intervals import AttentionIntervals
from meshwright.kernels.partial_attention import (
    PartOperators,
    by_key_head,
    by_query_head,
    empty_result,
    from_key_head,
    from_query_head,
)
from meshwright.kernels.score_changes import add_sinks_


@contextmanager
def exact_kernel() -> Iterator[Counter[str]]:
    """Within, `torch.ops.meshwright.varlen_attention` and its backward run on CPU tensors; counts both."""
    calls: Counter[str] = Counter()

    def counted(name: str, kernel: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            calls[name] += 1
            return kernel(*args)

        return run

    with torch.library._scoped_library("meshwright", "IMPL") as library:
        library.impl("varlen_attention", counted("forward", _forward), "CPU")
        library.impl("varlen_attention_backward", counted("backward", _backward), "CPU")
        yield calls


def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    query_ends: Tensor,
    key_ends: Tensor,
    most_queries: int,
    most_keys: int,
    causal: bool,
    window: int | None,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    exact = torch.promote_types(q.dtype, torch.float32)
    out, lse = torch.full_like(q, torch.nan), q.new_full((q.shape[1], q.shape[0]), torch.nan, dtype=exact)
    for queries, keys in _sequences(q, k, query_ends, key_ends, most_queries, most_keys):
        scores = _scores(q[queries], k[keys], most_keys, causal, window)
        lse[:, queries] = scores.logsumexp(-1)
        out[queries] = torch.einsum("hnm,mhd->nhd", scores.softmax(-1), _each_head(v[keys], q)).to(q.dtype)
    if sinks is not None:
        out.mul_(add_sinks_(lse, sinks.unsqueeze(1)).t().unsqueeze(-1))
    return out, lse


def _backward(
    grad: Tensor,
    out: Tensor,
    lse: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    query_ends: Tensor,
    key_ends: Tensor,
    most_queries: int,
    most_keys: int,
    causal: bool,
    window: int | None,
) -> tuple[Tensor, Tensor, Tensor]:
    assert grad.dtype == out.dtype == q.dtype
    assert lse.is_contiguous() and lse.shape == (q.shape[1], q.shape[0])
    grad_q, grad_k, grad_v = (torch.full_like(x, torch.nan) for x in (q, k, v))
    group, scale = q.shape[1] // k.shape[1], q.shape[2] ** -0.5
    delta = (grad * out).sum(-1).t()
    for queries, keys in _sequences(q, k, query_ends, key_ends, most_queries, most_keys):
        p = (_scores(q[queries], k[keys], most_keys, causal, window) - lse[:, queries].unsqueeze(-1)).exp()
        of_p = torch.einsum("nhd,mhd->hnm", grad[queries].to(p.dtype), _each_head(v[keys], q))
        of_scores = p * (of_p - delta[:, queries].unsqueeze(-1)) * scale
        grad_q[queries] = torch.einsum("hnm,mhd->nhd", of_scores, _each_head(k[keys], q)).to(q.dtype)
        of_k = torch.einsum("hnm,nhd->mhd", of_scores, q[queries].to(p.dtype))
        of_v = torch.einsum("hnm,nhd->mhd", p, grad[queries].to(p.dtype))
        grad_k[keys], grad_v[keys] = (x.unflatten(1, (-1, group)).sum(2).to(k.dtype) for x in (of_k, of_v))
    return grad_q, grad_k, grad_v


def _sequences(
    q: Tensor, k: Tensor, query_ends: Tensor, key_ends: Tensor, most_queries: int, most_keys: int
) -> Iterator[tuple[slice, slice]]:
    """The queries and keys of each, as the kernel wants them."""
    assert all(x.stride(-1) == 1 for x in (q, k)) and most_queries > 1
    assert all(x.dtype == torch.int32 and x.is_contiguous() and x[0] == 0 for x in (query_ends, key_ends))
    assert int(query_ends[-1]) == q.shape[0] and int(key_ends[-1]) == k.shape[0]
    for at in range(len(query_ends) - 1):
        queries = slice(int(query_ends[at]), int(query_ends[at + 1]))
        keys = slice(int(key_ends[at]), int(key_ends[at + 1]))
        assert 0 < queries.stop - queries.start <= most_queries and 0 < keys.stop - keys.start <= most_keys
        yield queries, keys


def _scores(q: Tensor, k: Tensor, most_keys: int, causal: bool, window: int | None) -> Tensor:
    """(H, n, m) of one sequence, in fp32 at least. Query i sees the keys from i + m - n - left to
    i + m - n + right; the kernel takes the most keys for a right limit that is missing where there is a left
    one."""
    exact = torch.promote_types(q.dtype, torch.float32)
    scores = torch.einsum("nhd,mhd->hnm", q.to(exact), _each_head(k, q)) * q.shape[2] ** -0.5
    return scores.masked_fill(~seen_by_kernel(len(q), len(k), most_keys, causal, window), -torch.inf)


def seen_by_kernel(queries: int, keys: int, most_keys: int, causal: bool, window: int | None) -> Tensor:
    """(queries, keys) of whether a query of a sequence sees a key."""
    at = torch.arange(queries).unsqueeze(1) + keys - queries
    other = torch.arange(keys)
    seen = torch.ones(queries, keys, dtype=torch.bool)
    if causal:
        assert queries <= keys
        seen &= other <= at
    if window is not None:
        seen &= other >= at - (window - 1)
        if not causal:
            seen &= other <= at + most_keys
    return seen


def _each_head(k: Tensor, q: Tensor) -> Tensor:
    """Keys or values (m, K, d) for every query head (m, H, d), in fp32 at least."""
    return k.to(torch.promote_types(k.dtype, torch.float32)).repeat_interleave(q.shape[1] // k.shape[1], 1)


def in_parts(
    operators: PartOperators,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    grad: Tensor,
    seen: AttentionIntervals,
    pieces: list[Tensor],
) -> list[Tensor]:
    """[out, log-sum-exp, and the gradients of q, k, v] of the queries of `seen`, the keys part by part.

    q and grad (B, S, H, d), k and v (B, S, K, d) are whole sequences.
    """
    heads = k.shape[2]
    q, grad = (x[:, seen.positions.to(x.device)] for x in (q, grad))
    queries, grads = by_query_head(q, heads), by_query_head(grad, heads)
    plans = [operators.plan(seen, keys_at, heads, q.shape[2] // heads) for keys_at in pieces]
    rows = [keys_at.to(k.device) for keys_at in pieces]
    keys = [by_key_head(k[:, at], v[:, at]) for at in rows]
    out, lse = empty_result(queries)
    for kv, plan in zip(keys, plans, strict=True):
        operators.forward(queries, kv[0], kv[1], plan, out, lse)
    grad_q, grad_k, grad_v = torch.zeros_like(out), torch.zeros_like(k), torch.zeros_like(v)
    remembered = operators.remember(grads, by_query_head(from_query_head(out, q), heads))
    for kv, plan, at in zip(keys, plans, rows, strict=True):
        found = operators.backward(grads, remembered, lse, queries, kv[0], kv[1], plan, grad_q)
        assert found.is_contiguous() and found.dtype == lse.dtype
        grad_k[:, at], grad_v[:, at] = (from_key_head(x, k[:, at]) for x in found)
    sums = from_query_head(lse.unsqueeze(-1), q[..., :1].to(lse.dtype)).squeeze(-1)
    return [from_query_head(out, q), sums, from_query_head(grad_q, q), grad_k, grad_v]
