"""Problems of attention over documents and windows, and their results by definition."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from meshwright.kernels.attention_intervals import AttentionIntervals

HEADS, KV_HEADS, DIM = 4, 2, 4
GROUP = HEADS // KV_HEADS


def documents_of(length: int, batch: int, chance: float | None, seed: int) -> Tensor | None:
    if chance is None:
        return None
    make = torch.Generator().manual_seed(seed)
    return (torch.rand(batch, length, generator=make) < chance).cumsum(1)


def deal(length: int, pieces: int, seed: int) -> list[Tensor]:
    """The places in `pieces` parts: runs of random lengths, dealt out at random."""
    make = torch.Generator().manual_seed(seed)
    runs = (torch.rand(length, generator=make) < 0.15).cumsum(0)
    owner = torch.randint(pieces, (int(runs[-1]) + 1,), generator=make)[runs]
    return [torch.nonzero(owner == piece).flatten() for piece in range(pieces)]


def visible(seen: AttentionIntervals, keys_at: Tensor) -> Tensor:
    """(B, T, S) of whether a query sees a key, by definition."""
    return (keys_at >= seen.first.unsqueeze(2)) & (keys_at <= seen.positions.unsqueeze(1))


def whole_softmax(q: Tensor, k: Tensor, v: Tensor, seen: AttentionIntervals) -> tuple[Tensor, Tensor]:
    """(out, log-sum-exp) (B, T, H, d), (B, T, H) of the whole by definition, with probabilities."""
    scores = torch.einsum("bthd,bshd->bhts", q, k.repeat_interleave(GROUP, 2)) * DIM**-0.5
    scores = scores.masked_fill(~visible(seen, torch.arange(seen.length)).unsqueeze(1), -math.inf)
    out = torch.einsum("bhts,bshd->bthd", scores.softmax(-1), v.repeat_interleave(GROUP, 2))
    return out, scores.logsumexp(-1).transpose(1, 2)


def draw(batch: int, length: int, seed: int, loud: float = 1.0) -> list[Tensor]:
    """q, k, v and the output's gradient in float64."""
    make = torch.Generator().manual_seed(seed)
    made = [
        torch.randn(batch, length, heads, DIM, generator=make, dtype=torch.float64)
        for heads in (HEADS, KV_HEADS, KV_HEADS, HEADS)
    ]
    return [made[0] * loud, *made[1:]]


def by_definition(q: Tensor, k: Tensor, v: Tensor, visible_BTS: Tensor) -> Tensor:
    """Row by row, without any fused operator."""
    group = q.shape[2] // k.shape[2]
    k, v = k.repeat_interleave(group, 2), v.repeat_interleave(group, 2)
    scores = torch.einsum("bthd,bshd->bhts", q, k) / math.sqrt(q.shape[-1])
    scores = scores.masked_fill(~visible_BTS.unsqueeze(1), float("-inf"))
    return torch.einsum("bhts,bshd->bthd", scores.softmax(-1), v)
