"""Multi-head latent attention (DeepSeek-AI 2024, DeepSeek-V2, §2.1): keys and values are made of a latent.

A head's channels are in two parts: the first have no position, those of keys being made of the latent; the
last turn with it, and those of keys are shared by all heads. Values may be narrower than keys.

Shapes: B batch, T queries, S keys, D hidden, H heads, d channels of a head's queries and keys, of which r
turn, v channels of its values, c of the latent of keys and values. Numbers of heads are read off the weights.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from meshwright.model.attention import Attend, KeyValueCache, attend
from meshwright.model.linear import Leave, Linear, Project, leave, project
from meshwright.model.norm import RmsNorm
from meshwright.model.rope import Rope, rotate, score_factor
from meshwright.spec import ModelSpec

_EPS = 1e-6
"""Of the latents' norms, whatever that of the others is: DeepSeek's own."""


class LatentAttention(nn.Module):
    """x (B, T, D) -> (B, T, D), each position looking at itself and at those before it.

    `narrow` makes the latents, of the tokens that are here; `project` makes heads of them, and `share` gives
    all heads the keys' turning part; `attend` and `leave` are those of `Attention`. A parallel layout puts
    its own there. `score_scale` is a factor on the scores beside d^-0.5.
    """

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        assert spec.mla is not None
        mla = self.mla = spec.mla
        self.narrow: Project = project
        self.project: Project = project
        self.share: Callable[[Tensor], Tensor] = _same
        self.attend: Attend = attend
        self.leave: Leave = leave
        self.score_scale = score_factor(spec)
        self.head_dim, self.plain = spec.head_dim, spec.head_dim - mla.rope_dim
        self.q_a = Linear(spec.hidden, mla.q_rank, False) if mla.q_rank is not None else None
        self.q_a_norm = RmsNorm(mla.q_rank, _EPS) if mla.q_rank is not None else None
        self.q = Linear(mla.q_rank or spec.hidden, spec.heads * spec.head_dim, False)
        self.kv_a = Linear(spec.hidden, mla.kv_rank + mla.rope_dim, False)
        self.kv_a_norm = RmsNorm(mla.kv_rank, _EPS)
        self.kv = Linear(mla.kv_rank, spec.heads * (self.plain + mla.v_dim), False)
        self.o = Linear(spec.heads * mla.v_dim, spec.hidden, False)

    def forward(
        self, x_BTD: Tensor, rope: Rope | None, mask: Any, cache: KeyValueCache | None = None
    ) -> Tensor:
        assert rope is not None
        q, latent, turning = self._latents(x_BTD)
        q = rotate(q.unflatten(-1, (-1, self.head_dim)), rope)
        q = q if self.score_scale == 1.0 else q * self.score_scale
        turning = rotate(self.share(turning).unsqueeze(2), rope)
        if cache is not None:
            seen = cache.filled
            (stored,) = cache.append(torch.cat([latent, turning.squeeze(2)], -1))
            if seen:
                return self.leave(self._in_latents(q, stored.unsqueeze(2), mask).flatten(2), self.o)
        (kv,) = self.project(latent, (self.kv,))
        k, v = kv.unflatten(-1, (-1, self.plain + self.mla.v_dim)).split([self.plain, self.mla.v_dim], -1)
        k = torch.cat([k, turning.expand(*k.shape[:3], -1)], -1)
        # A copy, since the view would hold the keys beside it until the backward.
        return self.leave(self.attend(q, k, v.contiguous(), mask).flatten(2), self.o)

    def _latents(self, x_BTD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries of all heads, flat, the normed latent of keys and values, and the keys' turning part."""
        if self.q_a is None or self.q_a_norm is None:
            (made,) = self.narrow(x_BTD, (self.kv_a,))
            (q,) = self.project(x_BTD, (self.q,))
        else:
            of_queries, made = self.narrow(x_BTD, (self.q_a, self.kv_a))
            (q,) = self.project(self.q_a_norm(of_queries), (self.q,))
        latent, turning = made.split([self.mla.kv_rank, self.mla.rope_dim], -1)
        return q, self.kv_a_norm(latent), turning

    def _in_latents(self, q_BTHd: Tensor, stored_BS1c: Tensor, mask: Any) -> Tensor:
        """(B, T, H, v) by attention to what the cache holds, (B, S, 1, c + r), one key for all heads.

        The maps that would make keys and values of the latents are multiplied with the queries, and with
        what comes out (DeepSeek-V2, §2.1.2). Scores are as ever those of d channels.
        """
        per_head = self.kv.weight.unflatten(0, (-1, self.plain + self.mla.v_dim))
        to_keys, to_values = per_head.split([self.plain, self.mla.v_dim], 1)
        plain, turning = q_BTHd.split([self.plain, self.mla.rope_dim], -1)
        q = torch.cat([torch.einsum("bthn,hnc->bthc", plain, to_keys), turning], -1)
        q = q * (q.shape[-1] / self.head_dim) ** 0.5
        mixed = self.attend(q, stored_BS1c, stored_BS1c[..., : self.mla.kv_rank], mask)
        return torch.einsum("bthc,hvc->bthv", mixed, to_values)


def _same(x: Tensor) -> Tensor:
    return x
