"""Attention on CUDA by flash attention over many short sequences in one call (Dao et al. 2022; Dao 2023).

The kernel takes sequences laid end to end, each with its own run of keys. That is enough for packed documents
with a sliding window on one device (`pack`), and for a part of the keys under context parallelism
(`FLASH`): what a query sees of a part is an interval of the part's rows, and from one query to the next its
end stays or moves on by a key, which is no mask or a causal one, aligned at the last corner. So does its
begin where a window bounds it, which is the kernel's window, aligned there, too. So a part is two calls and
with a window one more for each width of what the last query of a sequence sees; a query is in one sequence
of one of them. Formats that the kernel does not take stay with tiles.

Why not FlexAttention: outside torch.compile, under a selective recompute policy, it is not compiled but
materialises all scores; an operator of its own is saved by name, with and without compile, and its
log-sum-exp can be merged.

Shapes: B batch, H query heads, K key-value heads, G = H / K, N = B * K, T queries, S keys, d channels;
n queries and m keys of all sequences of a call.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeGuard

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from meshwright.kernels.attention_intervals import AttentionIntervals, document_starts
from meshwright.kernels.partial_attention import PartOperators, merge, row_products, tiles
from meshwright.kernels.score_changes import add_sinks_, sinks_gradient

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
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """(out (n, H, d), log-sum-exp (H, n) in fp32) for q (n, H, d), k and v (m, K, d), with `sinks` (H,).

    Sequence i has the queries from `query_ends[i]` to `query_ends[i + 1]` (int32) and the keys likewise, of
    each at least one and at most `most_queries` and `most_keys`. Causal: its last query sees its last key,
    each one before sees one less. With `window`, of n queries and m keys query i sees those from
    i + m - n - window + 1 on: the last `window` of those up to its own, if causal.
    """
    ends = query_ends, key_ends, most_queries, most_keys
    limits = _limits(causal, window)
    out, lse, *_ = torch.ops.aten._flash_attention_forward(
        q, k, v, *ends, 0.0, causal and window is None, False, **limits
    )
    if sinks is not None:
        out.mul_(add_sinks_(lse, sinks.unsqueeze(1)).t().unsqueeze(-1))
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
    q, k, v, query_ends, key_ends, *ctx.bounds, sinks = inputs
    ctx.save_for_backward(*output, q, k, v, query_ends, key_ends, sinks)
    ctx.set_materialize_grads(False)  # else zeros are made for the log-sum-exp's gradient, which is not used


def _differentiate(ctx: Any, grad: Tensor, _grad_lse: Tensor) -> tuple[Tensor | None, ...]:
    *saved, sinks = ctx.saved_tensors
    out, lse, *_ = saved
    found = varlen_attention_backward(grad, *saved, *ctx.bounds)
    of_sinks = None
    if sinks is not None:
        delta = row_products(grad, out).t()
        of_sinks = sinks_gradient(delta, lse, sinks.unsqueeze(1)).sum(1).to(sinks.dtype)
    return *found, *[None] * 6, of_sinks


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


def whole_rows(batch: int, length: int, device: torch.device) -> Packed:
    """The sequences of rows that are one document each, without a window."""
    ends = torch.arange(0, (batch + 1) * length, length, dtype=torch.int32, device=device)
    return Packed(ends, _bound(length), None)


def packed_attention(
    q_BTHd: Tensor, k_BTKd: Tensor, v_BTKd: Tensor, packed: Packed, sinks_H: Tensor | None = None
) -> Tensor:
    """Causal attention within the sequences of `packed`: (B, T, H, d)."""
    q, k, v = (x.flatten(0, 1) for x in (q_BTHd, k_BTKd, v_BTKd))
    ends, longest, window = packed
    out, _ = varlen_attention(q, k, v, ends, ends, longest, longest, True, window, sinks_H)
    return out.unflatten(0, q_BTHd.shape[:2])


# A part of the keys ---------------------------------------------------------------------------------

Rows = tuple[Tensor, Tensor] | tuple[slice, slice]
"""(row of the batch, row in it) of each place, int64; slices where the places are a range of every row."""


class FlashCall(NamedTuple):
    """One call of the kernel on queries and keys of a part, each sequence's after another's."""

    queries: Rows
    """No query twice."""
    keys: Rows
    """A key once for each sequence that sees it."""
    bounds: tuple[Tensor, Tensor, int, int, bool, int | None]
    """Arguments of `varlen_attention` after q, k and v."""


@dataclass(frozen=True)
class FlashPart:
    """Attention of queries to one part of the keys, as runs; a query is in at most one run."""

    runs: tuple[FlashCall, ...]
    batch: int


def make_flash_part(intervals: AttentionIntervals, keys_at: Tensor, _kv_heads: int, _group: int) -> FlashPart:
    """Plan the attention of the queries of `intervals` to keys at places `keys_at` (S,), rising, on the CPU.

    A sequence is a run of queries whose intervals of the part's rows end either at one row or each a row
    later than the one before (causal), and begin at one row, from some query on perhaps each a row later.
    Then what the last query sees is as wide as the window.
    """
    low = torch.searchsorted(keys_at, intervals.first.contiguous())
    high = torch.searchsorted(keys_at, intervals.positions, right=True).expand_as(low)
    row, first = torch.nonzero(_begins(low, high, intervals.is_longest)).unbind(1)
    count = torch.cat([row * low.shape[1] + first, torch.tensor([low.numel()])]).diff()
    last = first + count - 1
    left, right = low[row, first], high[row, last]
    causal = right != high[row, first]
    window = torch.where(low[row, last] > left, right - low[row, last], _NO_WINDOW)
    table = torch.stack([row, first, count, left, right - left, window], 1)
    runs: list[FlashCall] = []
    for kind in (False, True):
        some = table[(right > left) & (causal == kind)]
        for width, rows in _by_window(some):
            runs.append(_run(rows, kind, width or None, len(low), intervals.device))
    return FlashPart(tuple(runs), len(low))


_NO_WINDOW = 0


def _begins(low: Tensor, high: Tensor, is_longest: Tensor) -> Tensor:
    """(B, T) of whether a sequence begins at this query: here it changes how the intervals move on.

    Where documents and not the window let them begin a row later, so that each would be a call of its own,
    a sequence begins, too.
    """
    slides, grows, seen = low.diff(dim=1), high.diff(dim=1), high > low
    windowed = is_longest[:, 1:] & is_longest[:, :-1]
    ends = (slides > windowed) | (grows > 1) | (seen[:, 1:] != seen[:, :-1])
    begins = F.pad(ends, (1, 0), value=True)
    within = ~(ends[:, 1:] | ends[:, :-1])
    begins[:, 2:] |= within & ((grows[:, 1:] != grows[:, :-1]) | (slides[:, 1:] < slides[:, :-1]))
    return begins


def _by_window(table: Tensor) -> Iterator[tuple[int, Tensor]]:
    """(window, sequences (n, 5)) of each call, of sequences (n, 6) whose last column is the window.

    The widest window takes the sequences without one in which it hides nothing.
    """
    keys, window = table[:, 4], table[:, 5]
    if len(table):
        widest = window.max()
        window = torch.where((window == _NO_WINDOW) & (keys <= widest), widest, window)
    for width in window.unique().tolist():
        yield width, table[window == width, :5]


def _run(table: Tensor, causal: bool, window: int | None, batch: int, device: torch.device) -> FlashCall:
    """The run of sequences (batch row, first query, queries, first key, keys), (number of sequences, 5)."""
    longest = table.amax(0).tolist()
    if window is not None and not causal:
        # The kernel sets a missing limit on the right to the most keys, and counts it from the diagonal.
        longest[4] = max(longest[2], longest[4])
    ranges = [_range(table[:, (0, *columns)], batch) for columns in ((1, 2), (3, 4))]
    totals = table.sum(0).tolist()
    row, query, queries, key, keys = _to(table.t().contiguous(), device)
    query_ends, key_ends = (F.pad(counts.cumsum(0), (1, 0)).int() for counts in (queries, keys))
    return FlashCall(
        ranges[0] or _spread(row, query, queries, totals[2]),
        ranges[1] or _spread(row, key, keys, totals[4]),
        (query_ends, key_ends, _bound(longest[2]), _bound(longest[4]), causal, window),
    )


def _range(table: Tensor, batch: int) -> tuple[slice, slice] | None:
    """The range that pieces (batch row, first, count) fill in all rows alike, one after another, if any."""
    row, first, count = table.unbind(1)
    begins = F.pad(row.diff() != 0, (1, 0), value=True)
    ends = begins.roll(-1)
    if not bool((begins[1:] | (first[1:] == (first + count)[:-1])).all()):
        return None
    lefts, rights = first[begins].tolist(), (first + count)[ends].tolist()
    alike = len(lefts) == batch and len({*zip(lefts, rights, strict=True)}) == 1
    return (slice(None), slice(lefts[0], rights[0])) if alike else None


def _spread(row: Tensor, first: Tensor, counts: Tensor, total: int) -> tuple[Tensor, Tensor]:
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
        if _is_indexed(run.queries):
            outs[run.queries], sums[run.queries] = merged, merged_sums


def flash_backward(
    grad: Tensor, out: Tensor, lse: Tensor, q: Tensor, k: Tensor, v: Tensor, part: FlashPart, grad_q: Tensor
) -> Tensor:
    """`part_backward` through the kernel; it takes the whole's output (N, G, T, d) instead of `delta`."""
    batch, length = part.batch, k.shape[1]
    grad_kv = grad_q.new_zeros(2, batch, length, k.shape[0] // batch, k.shape[2])
    grads = _by_place(grad_q, batch)
    for run in part.runs:
        whole = [_tokens(x, batch, run.queries) for x in (grad, out)]
        sums = _tokens(lse.unsqueeze(-1), batch, run.queries).squeeze(-1).t().contiguous()
        tokens = [_tokens(x, batch, at) for x, at in ((q, run.queries), (k, run.keys), (v, run.keys))]
        of_q, *of_kv = varlen_attention_backward(*whole, sums, *tokens, *run.bounds)
        added = grads[run.queries]
        added += of_q.view(added.shape)
        if _is_indexed(run.queries):
            grads[run.queries] = added
        for total, share in zip(grad_kv, of_kv, strict=True):
            _add_at(total, run.keys, share)
    return grad_kv.transpose(2, 3).flatten(1, 2).contiguous()


def _add_at(total: Tensor, at: Rows, added: Tensor) -> None:
    """Add (m, K, d) to the places `at` of (B, S, K, d), some of which may come more than once."""
    if _is_indexed(at):
        row, place = at
        total.flatten(0, 1).index_add_(0, row * total.shape[1] + place, added.to(total.dtype))
    else:
        there = total[at]
        there += added.view(there.shape)


def _is_indexed(at: Rows) -> TypeGuard[tuple[Tensor, Tensor]]:
    """True if indexing by `at` copies; by slices it gives a view."""
    return isinstance(at[1], Tensor)


def _whole_output(_grad: Tensor, out: Tensor) -> Tensor:
    """The output, which `flash_backward` needs: the kernel computes row products itself."""
    return out


def _by_place(x: Tensor, batch: int) -> Tensor:
    """(N, G, T, ...) -> (B, T, K, G, ...), a view."""
    return x.unflatten(0, (batch, -1)).movedim(3, 1)


def _tokens(x: Tensor, batch: int, at: Rows) -> Tensor:
    """The rows `at` of queries (N, G, T, d) or keys (N, S, d), as the kernel takes them: (n, H or K, d).

    A range of one sequence is a view.
    """
    grouped = x if x.ndim == 4 else x.unsqueeze(1)
    found = _by_place(grouped, batch)[at].flatten(-3, -2)
    return found.contiguous() if _is_indexed(at) else found.flatten(0, 1)


FLASH = PartOperators(make_flash_part, flash_forward, _whole_output, flash_backward)


def part_operators(q_BTHd: Tensor, softcap: float | None = None) -> PartOperators:
    """The operators for partial attention of these queries: flash kernels where supported, else tiles.

    torch's flash kernel has no soft cap.
    """
    flash = softcap is None and flash_takes(q_BTHd, q_BTHd.shape[-1])
    return FLASH if flash else tiles(softcap)
