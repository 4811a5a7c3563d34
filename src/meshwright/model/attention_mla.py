"""Multi-head latent attention (DeepSeek-AI 2024, DeepSeek-V2, §2.1): keys and values come from a latent.

A head's query and key channels have two parts: the first d - r carry no position, and those of the keys are
projected from the latent; the last r are rotary, and all heads share those of the keys. Values may have fewer
channels than keys.

Shapes: B batch, T queries, S keys, D hidden, H heads, d channels of a query or key (r of them rotary), v of a
value, c of the key-value latent. Head counts are read from the weights.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from meshwright.model.attention import KeyValueCache
from meshwright.model.hooks import AttentionHooks
from meshwright.model.linear import Linear
from meshwright.model.norm import RmsNorm
from meshwright.model.rope import Rope, rotate, score_factor
from meshwright.spec import ModelSpec
from meshwright.spec.layers import LayerKind

_EPS = 1e-6
"""Epsilon of the latents' norms in DeepSeek's models, whatever `ModelSpec.norm_eps` is."""


class LatentAttention(nn.Module):
    """Causal self-attention over latents, x (B, T, D) -> (B, T, D).

    `score_scale` multiplies the scores in addition to d^-0.5 (YaRN).
    """

    def __init__(self, spec: ModelSpec, kind: LayerKind, hooks: AttentionHooks) -> None:
        super().__init__()
        self.hooks = hooks
        assert spec.mla is not None and kind.rope is not None
        mla = self.mla = spec.mla
        self.score_scale = score_factor(kind.rope)
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
        q, latent, rotary = self._latents(x_BTD)
        q = rotate(q.unflatten(-1, (-1, self.head_dim)), rope)
        q = q if self.score_scale == 1.0 else q * self.score_scale
        rotary = rotate(self.hooks.gather_rotary_key(rotary).unsqueeze(2), rope)
        if cache is not None:
            seen = cache.filled
            (stored,) = cache.append(torch.cat([latent, rotary.squeeze(2)], -1))
            if seen:
                return self.hooks.output(self._in_latents(q, stored.unsqueeze(2), mask).flatten(2), self.o)
        (kv,) = self.hooks.project(latent, (self.kv,))
        k, v = kv.unflatten(-1, (-1, self.plain + self.mla.v_dim)).split([self.plain, self.mla.v_dim], -1)
        k = torch.cat([k, rotary.expand(*k.shape[:3], -1)], -1)
        # A copy: the view would keep the keys' memory alive until the backward.
        return self.hooks.output(self.hooks.attend(q, k, v.contiguous(), mask).flatten(2), self.o)

    def _latents(self, x_BTD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries (B, T, H d), the normed key-value latent (B, T, c), and the keys' rotary part (B, T, r)."""
        if self.q_a is None or self.q_a_norm is None:
            (kv_a,) = self.hooks.project_latents(x_BTD, (self.kv_a,))
            (q,) = self.hooks.project(x_BTD, (self.q,))
        else:
            q_a, kv_a = self.hooks.project_latents(x_BTD, (self.q_a, self.kv_a))
            (q,) = self.hooks.project(self.q_a_norm(q_a), (self.q,))
        latent, rotary = kv_a.split([self.mla.kv_rank, self.mla.rope_dim], -1)
        return q, self.kv_a_norm(latent), rotary

    def _in_latents(self, q_BTHd: Tensor, stored_BS1c: Tensor, mask: Any) -> Tensor:
        """Attention (B, T, H, v) to the cached latents (B, S, 1, c + r), one key for all heads.

        The weights that would expand latents into keys and values are applied to the queries and to the
        output instead (DeepSeek-V2, §2.1.2). Scores are scaled as for d channels.
        """
        per_head = self.kv.matrix().unflatten(0, (-1, self.plain + self.mla.v_dim))
        to_keys, to_values = per_head.split([self.plain, self.mla.v_dim], 1)
        plain, rotary = q_BTHd.split([self.plain, self.mla.rope_dim], -1)
        q = torch.cat([torch.einsum("bthn,hnc->bthc", plain, to_keys), rotary], -1)
        q = q * (q.shape[-1] / self.head_dim) ** 0.5
        mixed = self.hooks.attend(q, stored_BS1c, stored_BS1c[..., : self.mla.kv_rank], mask)
        return torch.einsum("bthc,hvc->bthv", mixed, to_values)
