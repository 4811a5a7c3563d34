"""Attention on CUDA by flash attention over many short sequences in one call (Dao et al. 2022; Dao 2023).

The kernel takes sequences laid end to end, each with its own run of keys. That is enough for packed documents
with a sliding window on one device (`pack`), and for a part of the keys under context parallelism
(`FLASH`): what a query sees of a part is an interval of the part's rows, and consecutive queries see
either the same interval or one that grows by a key each, which is a causal mask aligned at its last corner.
So a part is two calls, and a query is in one sequence of one of them. Windows over parts do not decompose so;
they stay with tiles, as do formats that the kernel does not take.

Why not FlexAttention: outside torch.compile, under a selective recompute policy, it is not compiled but
materialises all scores; an operator of its own is saved by name, with and without compile, and its
log-sum-exp can be merged.

Shapes: B batch, H query heads, K key-value heads, G = H / K, N = B * K, T queries, S keys, d channels;
n queries and m keys of all sequences of a call.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from meshwright.model.attention_intervals import AttentionIntervals, document_starts
from meshwright.model.partial_attention import TILES, PartOperators, merge

_MOST_CHANNELS = 256


def flash_takes(like: Tensor, head_dim: int) -> bool:
    """True if the flash kernel supports heads of `head_dim` channels, and the dtype and device of `like`."""
    half = like.dtype in (torch.float16, torch.bfloat16)
    return like.is_cuda and half and head_dim % 8 == 0 and head_dim <= _MOST_CHANNELS


# The kernel -----------------------------------------------------------------------------------------


@torch.library.custom_op("meshwright::varlen_attention", mutates_args=(), device_types="cuda")
def varlen_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    query_ends: Tensor,
    key_ends: Tensor,
    most_queries: int,
    most_keys: int,
    causal: bool,
    window: int | None,
) -> tuple[Tensor, Tensor]:
    """(out (n, H, d), log-sum-exp (H, n) in fp32) for q (n, H, d), k and v (m, K, d).

    Sequence i has the queries from `query_ends[i]` to `query_ends[i + 1]` (int32) and the keys likewise, of
    each at least one and at most `most_queries` and `most_keys`. Causal: its last query sees its last key,
    each one before sees one less, and, with `window`, the last `window` of those.
    """
    ends = query_ends, key_ends, most_queries, most_keys
    limits = _limits(causal, window)
    out, lse, *_ = torch.ops.aten._flash_attention_forward(
        q, k, v, *ends, 0.0, causal and window is None, False, **limits
    )
    return out, lse


@varlen_attention.register_fake
def _(q: Tensor, *_args: Any) -> tuple[Tensor, Tensor]:
    lse = q.new_empty(q.shape[1], q.shape[0], dtype=torch.promote_types(q.dtype, torch.float32))
    return torch.empty_like(q), lse


@torch.library.custom_op("meshwright::varlen_attention_backward", mutates_args=(), device_types="cuda")
def varlen_attention_backward(
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
    """The gradients of q, k and v. `out` and `lse` may be those over more keys than are here: then these are
    this part's share (Liu et al. 2023), since the kernel takes its probabilities as exp(score - lse)."""
    ends = query_ends, key_ends, most_queries, most_keys
    limits = _limits(causal, window)
    no_dropout = torch.zeros(2, dtype=torch.uint64, device=q.device), torch.empty(0, device=q.device)
    return torch.ops.aten._flash_attention_backward(
        grad, q, k, v, out, lse, *ends, 0.0, causal and window is None, *no_dropout, **limits
    )


@varlen_attention_backward.register_fake
def _(
    grad: Tensor, out: Tensor, lse: Tensor, q: Tensor, k: Tensor, v: Tensor, *_args: Any
) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


def _limits(causal: bool, window: int | None) -> dict[str, int]:
    """How many keys left and right of its own a query sees; -1 for all."""
    return {
        "window_size_left": -1 if window is None else window - 1,
        "window_size_right": 0 if causal else -1,
    }


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, query_ends, key_ends, *ctx.bounds = inputs
    ctx.save_for_backward(*output, q, k, v, query_ends, key_ends)


def _differentiate(ctx: Any, grad: Tensor, _grad_lse: Tensor) -> tuple[Tensor | None, ...]:
    return (*varlen_attention_backward(grad, *ctx.saved_tensors, *ctx.bounds), *[None] * 6)


varlen_attention.register_autograd(_differentiate, setup_context=_keep)


@register_flop_formula(torch.ops.meshwright.varlen_attention)
def _flops(q: torch.Size, k: torch.Size, *args: Any, **_kwargs: Any) -> int:
    """Two matmuls of every query with the keys of the longest sequence: no less than what is computed."""
    return 4 * q.numel() * args[4]


@register_flop_formula(torch.ops.meshwright.varlen_attention_backward)
def _backward_flops(
    grad: torch.Size, out: torch.Size, lse: torch.Size, q: torch.Size, *args: Any, **_kwargs: Any
) -> int:
    return 10 * q.numel() * args[5]


def _bound(longest: int) -> int:
    """The next power of two, so that a compiled block sees few values; at least 2, since the kernel lays out
    sequences of one query in another way."""
    return max(2, 1 << (longest - 1).bit_length())


# One device: documents and windows ------------------------------------------------------------------


class Packed(NamedTuple):
    """Attention mask of a packed batch: the documents of all rows as sequences laid end to end."""

    ends: Tensor
    """int32, from 0 to B T: where documents end in the rows of the batch, one after another."""
    longest: int
    """No document is longer."""
    window: int | None


def pack(
    documents_BT: Tensor | None, batch: int, length: int, window: int | None, device: torch.device
) -> Packed:
    """The sequences in which each position sees the run of equal ids that it is in, up to itself, and of
    that the last `window`. Waits for documents that are on another device than the CPU."""
    begins = document_starts(documents_BT, length) == torch.arange(length)
    first = begins.expand(batch, length).flatten().nonzero().flatten()
    ends = F.pad(first, (0, 1), value=batch * length)
    return Packed(_to(ends.int(), device), _bound(int(ends.diff().max())), window)


def packed_attention(q_BTHd: Tensor, k_BTKd: Tensor, v_BTKd: Tensor, packed: Packed) -> Tensor:
    """Causal attention within the sequences of `packed`: (B, T, H, d)."""
    q, k, v = (x.flatten(0, 1) for x in (q_BTHd, k_BTKd, v_BTKd))
    ends, longest, window = packed
    out, _ = varlen_attention(q, k, v, ends, ends, longest, longest, True, window)
    return out.unflatten(0, q_BTHd.shape[:2])


# A part of the keys ---------------------------------------------------------------------------------

Rows = tuple[Tensor, Tensor]
"""(row of the batch, row in it) of each place, int64."""


class FlashCall(NamedTuple):
    """One call of the kernel on queries and keys of a part, each sequence's after another's."""

    queries: Rows
    """No query twice."""
    keys: Rows
    """A key once for each sequence that sees it."""
    bounds: tuple[Tensor, Tensor, int, int, bool, None]
    """Arguments of `varlen_attention` after q, k and v, without a window."""


@dataclass(frozen=True)
class FlashPart:
    """Attention of queries to one part of the keys, as runs; a query is in at most one run."""

    runs: tuple[FlashCall, ...]
    batch: int


def make_flash_part(intervals: AttentionIntervals, keys_at: Tensor, _kv_heads: int, _group: int) -> FlashPart:
    """Plan the attention of the queries of `intervals` to keys at places `keys_at` (S,), rising, on the CPU.

    A sequence is a run of queries whose intervals of the part's rows begin at one row, and end either at one
    row, too (all is seen), or each a row later than the one before (causal).
    """
    if intervals.windowed:
        raise ValueError("a window does not decompose into sequences")
    low = torch.searchsorted(keys_at, intervals.first.contiguous())
    high = torch.searchsorted(keys_at, intervals.positions, right=True).expand_as(low)
    row, first = torch.nonzero(_begins(low, high)).unbind(1)
    count = torch.cat([row * low.shape[1] + first, torch.tensor([low.numel()])]).diff()
    left, right = low[row, first], high[row, first + count - 1]
    causal = right != high[row, first]
    table = torch.stack([row, first, count, left, right - left], 1)
    seen = right > left
    kinds = [(table[seen & ~causal], False), (table[seen & causal], True)]
    return FlashPart(tuple(_run(some, kind, intervals.device) for some, kind in kinds if len(some)), len(low))


def _begins(low: Tensor, high: Tensor) -> Tensor:
    """(B, T) of whether a sequence begins at this query: here it changes how the intervals move on."""
    grows, seen = high.diff(dim=1), high > low
    ends = (low.diff(dim=1) != 0) | (grows < 0) | (grows > 1) | (seen[:, 1:] != seen[:, :-1])
    begins = F.pad(ends, (1, 0), value=True)
    within = ~(ends[:, 1:] | ends[:, :-1])
    begins[:, 2:] |= within & (grows[:, 1:] != grows[:, :-1])
    return begins


def _run(table: Tensor, causal: bool, device: torch.device) -> FlashCall:
    """The run of sequences (batch row, first query, queries, first key, keys), (number of sequences, 5)."""
    longest, totals = table.amax(0).tolist(), table.sum(0).tolist()
    row, query, queries, key, keys = _to(table.t().contiguous(), device)
    query_ends, key_ends = (F.pad(counts.cumsum(0), (1, 0)).int() for counts in (queries, keys))
    return FlashCall(
        _spread(row, query, queries, totals[2]),
        _spread(row, key, keys, totals[4]),
        (query_ends, key_ends, _bound(longest[2]), _bound(longest[4]), causal, None),
    )


def _spread(row: Tensor, first: Tensor, counts: Tensor, total: int) -> Rows:
    """The places of sequences of `counts` places from `first` on in `row`, `total` in all."""
    sequence = torch.repeat_interleave(counts, output_size=total)
    shift = first - counts.cumsum(0) + counts
    return row[sequence], torch.arange(total, device=row.device) + shift[sequence]


def _to(planned: Tensor, device: torch.device) -> Tensor:
    """On the device, without waiting for what it is busy with: from pageable memory that is safe."""
    return planned.to(device, non_blocking=True)


def flash_forward(q: Tensor, k: Tensor, v: Tensor, part: FlashPart, out: Tensor, lse: Tensor) -> None:
    """`part_forward` through the kernel."""
    outs, sums = _by_place(out, part.batch), _by_place(lse, part.batch)
    for run in part.runs:
        tokens = [_tokens(x, part.batch, at) for x, at in ((q, run.queries), (k, run.keys), (v, run.keys))]
        found, found_sums = varlen_attention(*tokens, *run.bounds)
        merged, merged_sums = outs[run.queries], sums[run.queries]
        added = found_sums.t().reshape(merged_sums.shape)
        merge(merged, merged_sums, found.view(merged.shape), torch.ones_like(added), added)
        outs[run.queries], sums[run.queries] = merged, merged_sums


def flash_backward(
    grad: Tensor, out: Tensor, lse: Tensor, q: Tensor, k: Tensor, v: Tensor, part: FlashPart, grad_q: Tensor
) -> Tensor:
    """`part_backward` through the kernel; it takes the whole's output (N, G, T, d) instead of `delta`."""
    batch, length = part.batch, k.shape[1]
    grad_kv = grad_q.new_zeros(2, batch * length, k.shape[0] // batch, k.shape[2])
    grads = _by_place(grad_q, batch)
    for run in part.runs:
        whole = [_tokens(x, batch, run.queries) for x in (grad, out)]
        sums = _by_place(lse, batch)[run.queries].flatten(1).t().contiguous()
        tokens = [_tokens(x, batch, at) for x, at in ((q, run.queries), (k, run.keys), (v, run.keys))]
        of_q, *of_kv = varlen_attention_backward(*whole, sums, *tokens, *run.bounds)
        before = grads[run.queries]
        grads[run.queries] = before + of_q.view(before.shape)
        row, key = run.keys
        grad_kv.index_add_(1, row * length + key, torch.stack(of_kv).to(grad_kv.dtype))
    return grad_kv.unflatten(1, (batch, length)).transpose(2, 3).flatten(1, 2).contiguous()


def _whole_output(_grad: Tensor, out: Tensor) -> Tensor:
    """The output, which `flash_backward` needs: the kernel computes row products itself."""
    return out


def _by_place(x: Tensor, batch: int) -> Tensor:
    """(N, G, T, ...) -> (B, T, K, G, ...), a view."""
    return x.unflatten(0, (batch, -1)).movedim(3, 1)


def _tokens(x: Tensor, batch: int, at: Rows) -> Tensor:
    """The rows `at` of queries (N, G, T, d) or keys (N, S, d), as the kernel takes them: (n, H or K, d)."""
    grouped = x if x.ndim == 4 else x.unsqueeze(1)
    return _by_place(grouped, batch)[at].flatten(1, 2).contiguous()


FLASH = PartOperators(make_flash_part, flash_forward, _whole_output, flash_backward)


def part_operators(q_BTHd: Tensor, intervals: AttentionIntervals) -> PartOperators:
    """The operators for partial attention of these queries: flash kernels where supported, else tiles."""
    return FLASH if not intervals.windowed and flash_takes(q_BTHd, q_BTHd.shape[-1]) else TILES
