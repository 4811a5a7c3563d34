"""Attention on a part of the keys, with the log-sum-exp by which parts are merged; no collectives.

softmax over all keys is a mean of softmaxes over parts of them, weighted by exp(log-sum-exp) (Milakov and
Gimelshein 2018; Dao et al. 2022). `part_forward` merges one part into a running result, `part_backward` gives
one part's share of the gradients from the whole's log-sum-exp; both compute tile by tile with batched
matmuls, like `attention_cpu`, and keep no probabilities. `PartOperators` is what they and their like on CUDA
(`attention_flash`) have in common. Sums and merges are in fp32 (fp64 for fp64); a
tile's scores are rounded to the input's format, in which its matmuls run. With a soft cap each score is
capped before it is merged (`score_changes`).

Since what a query sees is an interval of places, and the keys of a part lie in the order of their places,
it sees an interval of the part's rows. A tile spans those that some query of it sees: the others are
skipped, not masked, and only columns that some query of it does not see are masked.

Shapes: B batch, H query heads, K key-value heads, G = H / K, N = B * K, T queries, S keys of the part,
d channels; a tile has n of the N, Q queries and W keys.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from meshwright.kernels.attention_intervals import AttentionIntervals
from meshwright.kernels.score_changes import cap_, cap_slope
from meshwright.spec.tiling import SEEN_PER_QUERY, tiling


@dataclass(frozen=True)
class Tile:
    """One piece of work: queries `rows` on keys `columns`, for the n of `groups` in the rows `batch`."""

    groups: slice
    batch: slice
    rows: slice
    columns: slice
    borders: tuple[slice, ...]
    """The columns that some of the queries do not attend to."""

    @property
    def size(self) -> int:
        """Scores of one query head per key-value head."""
        return math.prod(side.stop - side.start for side in (self.groups, self.rows, self.columns))


@dataclass(frozen=True)
class TiledPart:
    """Queries that attend to rows `low` to `high` (B, T) of one part of the keys, and the tiles to
    compute."""

    low: Tensor
    high: Tensor
    tiles: tuple[Tile, ...]
    group: int

    @property
    def work(self) -> int:
        """Scores that are computed, over all heads and the batch."""
        return self.group * sum(tile.size for tile in self.tiles)


def make_part(intervals: AttentionIntervals, keys_at: Tensor, kv_heads: int, group: int) -> TiledPart:
    """Plan the attention of the queries of `intervals` to keys at places `keys_at` (S,), rising, on the
    CPU."""
    at = intervals.positions
    low = torch.searchsorted(keys_at, intervals.first.contiguous())
    high = torch.searchsorted(keys_at, at, right=True).expand_as(low)
    ends = (torch.nonzero(at.diff() != 1).flatten() + 1).tolist()
    tiles: list[Tile] = []
    lows, highs = _distinct(low), _distinct(high)
    for begin, end in zip([0, *ends], [*ends, len(at)], strict=True):
        row = begin
        while row < end:
            rows = _block_of_queries(row, end, lows, highs)
            tiles += _row_of_tiles(rows, lows, highs, low.shape[0], kv_heads, group)
            row = rows.stop
    low, high = (each.to(intervals.device, non_blocking=True) for each in (low, high))
    return TiledPart(low, high, tuple(tiles), group)


def _block_of_queries(row: int, end: int, lows: list[list[int]], highs: list[list[int]]) -> slice:
    """The queries from `row` on that are taken together: many where they see many keys."""
    sizes = tiling()
    count = sizes.part_queries
    while count > sizes.least_part_queries:
        last = min(row + count, end) - 1
        most_seen = max(high[last] - low[row] for low, high in zip(lows, highs, strict=True))
        if most_seen >= SEEN_PER_QUERY * count:
            break
        count //= 2
    return slice(row, min(row + count, end))


def _distinct(bounds_BT: Tensor) -> list[list[int]]:
    """The rows as lists; one for all where they are equal."""
    same = bool((bounds_BT == bounds_BT[:1]).all())
    return bounds_BT[:1].tolist() * bounds_BT.shape[0] if same else bounds_BT.tolist()


def _row_of_tiles(
    rows: slice, lows: list[list[int]], highs: list[list[int]], batch: int, kv_heads: int, group: int
) -> Iterator[Tile]:
    """The tiles of one block of queries: for each row of the batch, or for all where that is no more work."""
    seen = [(low[rows.start], high[rows.stop - 1]) for low, high in zip(lows, highs, strict=True)]
    left, right = min(low for low, _ in seen), max(high for _, high in seen)
    apart = sum(max(0, high - low) for low, high in seen)
    together = batch * (right - left) <= 1.1 * apart
    for members in [slice(0, batch)] if together else [slice(b, b + 1) for b in range(batch)]:
        left, right = min(low for low, _ in seen[members]), max(high for _, high in seen[members])
        inner = (
            max(low[rows.stop - 1] for low in lows[members]),  # from here on seen by all, as to documents
            min(high[rows.start] for high in highs[members]),  # up to here seen by all, as to order
        )
        width = tiling().part_keys
        for column in range(left, right, width):
            columns = slice(column, min(column + width, right))
            for groups, some in _groups(members, kv_heads, (rows.stop - rows.start) * group, columns):
                yield Tile(groups, some, rows, columns, _borders(columns, *inner))


def _groups(members: slice, kv_heads: int, rows: int, columns: slice) -> Iterator[tuple[slice, slice]]:
    """Cut the N of these rows of the batch so that a tile's scores stay small: whole rows, or within one."""
    fit = max(1, tiling().part_scores // (rows * (columns.stop - columns.start)))
    if fit >= kv_heads:
        step = fit // kv_heads
        for b in range(members.start, members.stop, step):
            some = slice(b, min(b + step, members.stop))
            yield slice(some.start * kv_heads, some.stop * kv_heads), some
        return
    for b in range(members.start, members.stop):
        for head in range(0, kv_heads, fit):
            yield slice(b * kv_heads + head, b * kv_heads + min(head + fit, kv_heads)), slice(b, b + 1)


def _borders(columns: slice, begin: int, end: int) -> tuple[slice, ...]:
    """The columns that lie outside [begin, end), which all queries see."""
    left, right = min(begin, columns.stop), max(end, columns.start)
    if left >= right:
        return (columns,)
    sides = (slice(columns.start, left), slice(right, columns.stop))
    return tuple(side for side in sides if side.start < side.stop)


# The operators --------------------------------------------------------------------------------------


def empty_result(q_NGTd: Tensor) -> tuple[Tensor, Tensor]:
    """(out, log-sum-exp) of queries that have seen no key yet: 0 (N, G, T, d) and -inf (N, G, T)."""
    exact = torch.promote_types(q_NGTd.dtype, torch.float32)
    return torch.zeros_like(q_NGTd, dtype=exact), q_NGTd.new_full(q_NGTd.shape[:3], -math.inf, dtype=exact)


def part_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    part: TiledPart,
    out: Tensor,
    lse: Tensor,
    softcap: float | None = None,
) -> None:
    """Merge the attention of q (N, G, T, d) to a part's k and v (N, S, d) into `out` and `lse`, in place."""
    if not part.tiles:
        return
    bounded = _bounded(q, k, softcap)
    (scratch,) = _scratch(q, part, 1)
    for tile in part.tiles:
        at = (tile.groups, slice(None), tile.rows)
        weights = _scores(q[at], k[tile.groups, tile.columns], scratch)
        if softcap is not None:
            cap_(weights, softcap)
        _hide(weights, q[at].shape, tile, part)
        peak = None
        if not bounded:
            peak = weights.amax(-1, keepdim=True).clamp_(min=torch.finfo(q.dtype).min)
            weights.sub_(peak)
        weights.exp_()
        mixed = torch.bmm(weights, v[tile.groups, tile.columns]).view(q[at].shape)
        total = _row_sums(weights, lse.dtype).view(lse[at].shape)
        merge(out[at], lse[at], mixed, total, None if peak is None else peak.view(total.shape))


def part_backward(
    grad: Tensor,
    delta: Tensor,
    lse: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    part: TiledPart,
    grad_q: Tensor,
    softcap: float | None = None,
) -> Tensor:
    """This part's share of the gradients: adds to `grad_q` (N, G, T, d), gives those of k and v (2, N, S, d).

    `grad` (N, G, T, d) is that of the whole's output, `delta` (N, G, T) its product with that output, `lse`
    the whole's log-sum-exp. The results are in fp32 (fp64 for fp64).
    """
    scale = q.shape[-1] ** -0.5
    grad_kv = torch.zeros((2, *k.shape), dtype=grad_q.dtype, device=k.device)
    if not part.tiles:
        return grad_kv
    shift = None if _bounded(q, k, softcap) else lse.to(q.dtype)
    grads = _weighted(grad, delta, lse, shift)
    values = torch.cat([v, v.new_ones(*v.shape[:2], 2)], -1)
    scratch = _scratch(q, part, 2 if softcap is None else 3)
    for tile in part.tiles:
        at, keys = (tile.groups, slice(None), tile.rows), (tile.groups, tile.columns)
        block, block_grads = q[at].flatten(1, 2), grads[at].flatten(1, 2)
        weights = _scores(q[at], k[keys], scratch[0])
        slope = None
        if softcap is not None:
            slope = cap_slope(cap_(weights, softcap), softcap, _part_of(scratch[2], weights.shape))
        _hide(weights, q[at].shape, tile, part)
        if shift is not None:
            weights.sub_(shift[at].flatten(1).unsqueeze(-1))
        weights.exp_()
        grad_kv[1][keys] += torch.bmm(weights.transpose(1, 2), block_grads[..., : q.shape[-1]])
        grad_scores = _part_of(scratch[1], weights.shape)
        torch.bmm(block_grads, values[keys].transpose(1, 2), out=grad_scores)
        grad_scores.mul_(weights)
        if slope is not None:
            grad_scores.mul_(slope)
        grad_kv[0][keys] += torch.bmm(grad_scores.transpose(1, 2), block).mul_(scale)
        grad_q[at] += torch.bmm(grad_scores, k[keys]).mul_(scale).view(q[at].shape)
    return grad_kv


def _row_sums(weights: Tensor, dtype: torch.dtype) -> Tensor:
    """Sums in `dtype` over the last dim; some rows at a time, because torch first converts what it sums."""
    rows = weights.shape[1] if weights.dtype == dtype else tiling().part_rows_summed
    return torch.cat([some.sum(-1, dtype=dtype) for some in weights.split(rows, 1)], 1)


def merge(out: Tensor, lse: Tensor, mixed: Tensor, total: Tensor, peak: Tensor | None) -> None:
    """Add some keys: `mixed` = sum of exp(score - peak) v, `total` = that of exp(score - peak); in place."""
    added = total.log() if peak is None else total.log().add_(peak)
    merged = torch.logaddexp(lse, added)
    safe = merged.masked_fill(merged == -math.inf, 0)  # a query that has seen nothing keeps out = 0
    weight = safe.neg() if peak is None else peak - safe
    out.mul_(lse.sub_(safe).exp_().unsqueeze(-1))
    out.addcmul_(mixed.to(out.dtype), weight.exp().to(out.dtype).unsqueeze(-1))
    lse.copy_(merged)


def _weighted(grad: Tensor, delta: Tensor, lse: Tensor, shift: Tensor | None) -> Tensor:
    """w * (grad, -delta) as (N, G, T, d + 2), where w = exp(shift - lse) turns weights into probabilities.

    With p = exp(score - shift) w, the gradient of the scores p (grad v^T - delta) is exp(score - shift) times
    this (d + 2) times (v, 1, 1): the difference is taken in the matmul's accumulator. -delta has two columns,
    a rounded one and the rest.
    """
    # Where the scores are bounded, a lower log-sum-exp is that of queries which see nothing here.
    exponent = -lse.clamp(min=-_limit(grad.dtype)) if shift is None else shift - lse
    weight = exponent.exp_()
    rest = (delta * weight).neg_()
    rounded = rest.to(grad.dtype)
    weighted = grad.new_empty(*grad.shape[:3], grad.shape[3] + 2)
    weighted[..., :-2] = grad * weight.unsqueeze(-1)
    weighted[..., -2] = rounded
    weighted[..., -1] = rest.sub_(rounded)
    return weighted


def _limit(dtype: torch.dtype) -> float:
    """Scores up to this may be exponentiated and summed as they are."""
    return 0.7 * math.log(torch.finfo(dtype).max)


def _bounded(q: Tensor, k: Tensor, softcap: float | None) -> bool:
    """True if all scores are so small that exp needs no maximum subtracted: |q k| <= |q| |k|, and a cap.

    Saves two passes over the scores. Not asked on devices that would have to be waited for.
    """
    if q.device.type != "cpu":
        return False
    if softcap is not None and softcap <= 0.99 * _limit(q.dtype):
        return True
    longest = [float(torch.linalg.vector_norm(x, dim=-1).max()) for x in (q, k)]
    return longest[0] * longest[1] * q.shape[-1] ** -0.5 <= 0.99 * _limit(q.dtype)


def _scratch(q: Tensor, part: TiledPart, count: int) -> list[Tensor]:
    """Room for the scores of the largest tile."""
    most = part.group * max(tile.size for tile in part.tiles)
    return [q.new_empty(most) for _ in range(count)]


def _part_of(scratch: Tensor, shape: Sequence[int]) -> Tensor:
    return scratch[: math.prod(shape)].view(shape)


def _scores(q: Tensor, k: Tensor, scratch: Tensor) -> Tensor:
    """q (n, G, Q, d) k^T (n, W, d) / sqrt(d): (n, G * Q, W)."""
    n, group, rows, dim = q.shape
    scores = _part_of(scratch, (n, group * rows, k.shape[1]))
    return scores.baddbmm_(q.flatten(1, 2), k.transpose(1, 2), beta=0, alpha=dim**-0.5)


def _hide(scores: Tensor, queries: Sequence[int], tile: Tile, part: TiledPart) -> None:
    """Set scores (n, G * Q, W) of `queries` (n, G, Q, d) to -inf where one does not see the key."""
    n, group, rows, _ = queries
    batch = tile.batch.stop - tile.batch.start
    by_row = scores.view(batch, n // batch * group, rows, -1)
    for border in tile.borders:
        columns = torch.arange(border.start, border.stop, device=scores.device)
        low, high = (x[tile.batch, tile.rows].unsqueeze(-1) for x in (part.low, part.high))
        hidden = ((columns < low) | (columns >= high)).unsqueeze(1)
        first = tile.columns.start
        by_row[..., border.start - first : border.stop - first].masked_fill_(hidden, -math.inf)


def row_products(grad: Tensor, out: Tensor) -> Tensor:
    """`part_backward`'s delta (N, G, T) of the output (N, G, T, d) and its gradient."""
    return (grad.to(torch.promote_types(grad.dtype, torch.float32)) * out).sum(-1)


class PartOperators(NamedTuple):
    """One way to attend to keys part by part: what plans a part, and what computes by such a plan."""

    plan: Callable[[AttentionIntervals, Tensor, int, int], Any]
    """`make_part`'s parameters -> the plan of a part."""
    forward: Callable[[Tensor, Tensor, Tensor, Any, Tensor, Tensor], None]
    """`part_forward`'s."""
    remember: Callable[[Tensor, Tensor], Tensor]
    """(the gradient of the whole's output, that output) -> what `backward` takes second."""
    backward: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Any, Tensor], Tensor]
    """`part_backward`'s."""


TILES = PartOperators(make_part, part_forward, row_products, part_backward)


@lru_cache  # plans are kept by operators
def tiles(softcap: float | None) -> PartOperators:
    """`TILES`, with scores that are capped if there is a cap."""
    if softcap is None:
        return TILES
    forward, backward = partial(part_forward, softcap=softcap), partial(part_backward, softcap=softcap)
    return PartOperators(make_part, forward, row_products, backward)


# Layouts --------------------------------------------------------------------------------------------


def by_query_head(x_BTHd: Tensor, kv_heads: int) -> Tensor:
    """(B, T, H, d) -> (N, G, T, d), contiguous."""
    return x_BTHd.unflatten(2, (kv_heads, -1)).permute(0, 2, 3, 1, 4).contiguous().flatten(0, 1)


def from_query_head(x_NGTd: Tensor, like_BTHd: Tensor) -> Tensor:
    """(N, G, T, d) -> (B, T, H, d), contiguous, in the dtype of `like_BTHd`."""
    split = x_NGTd.unflatten(0, (like_BTHd.shape[0], -1)).permute(0, 3, 1, 2, 4)
    out = like_BTHd.new_empty(like_BTHd.shape)
    out.view(split.shape).copy_(split)
    return out


def by_key_head(k_BSKd: Tensor, v_BSKd: Tensor) -> Tensor:
    """k and v as (2, N, S, d), contiguous: one message."""
    batch, length, heads, dim = k_BSKd.shape
    both = k_BSKd.new_empty(2, batch, heads, length, dim)
    for place, x in zip(both, (k_BSKd, v_BSKd), strict=True):
        place.copy_(x.transpose(1, 2))
    return both.flatten(1, 2)


def from_key_head(x_NSd: Tensor, like_BSKd: Tensor) -> Tensor:
    """(N, S, d) -> (B, S, K, d), contiguous, in the dtype of `like_BSKd`."""
    split = x_NSd.unflatten(0, (like_BSKd.shape[0], -1)).transpose(1, 2)
    return like_BSKd.new_empty(split.shape).copy_(split)
