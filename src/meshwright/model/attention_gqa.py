"""Grouped-query attention (Ainslie et al. 2023).

Shapes: B batch, T queries, D hidden, H heads, K key-value heads, d channels of a head. Head counts are read
from the weights, so a module that holds some of the heads computes only those.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from meshwright.kernels.score_changes import ScoreChanges
from meshwright.model.attention import KeyValueCache
from meshwright.model.hooks import AttentionHooks
from meshwright.model.linear import Linear
from meshwright.model.norm import rms_norm
from meshwright.model.rope import Rope, rotate
from meshwright.spec import ModelSpec


class Attention(nn.Module):
    """Causal self-attention, x (B, T, D) -> (B, T, D)."""

    def __init__(self, spec: ModelSpec, hooks: AttentionHooks) -> None:
        super().__init__()
        self.hooks = hooks
        self.head_dim, self.softcap = spec.head_dim, spec.attention_softcap
        self.sinks = nn.Parameter(torch.empty(spec.heads)) if spec.attention_sinks else None
        self.q = Linear(spec.hidden, spec.heads * spec.head_dim, spec.qkv_bias)
        self.k = Linear(spec.hidden, spec.kv_heads * spec.head_dim, spec.qkv_bias)
        self.v = Linear(spec.hidden, spec.kv_heads * spec.head_dim, spec.qkv_bias)
        self.o = Linear(spec.heads * spec.head_dim, spec.hidden, spec.out_bias)
        self.norms_all_heads = spec.qk_norm_over == "all"
        queries, keys = (heads if self.norms_all_heads else 1 for heads in (spec.heads, spec.kv_heads))
        self.q_norm = rms_norm(spec, queries * spec.head_dim) if spec.qk_norm else None
        self.k_norm = rms_norm(spec, keys * spec.head_dim) if spec.qk_norm else None
        # `attend` multiplies scores by 1 / sqrt(head_dim).
        self.query_factor = 1.0 if spec.attention_scale is None else spec.attention_scale * spec.head_dim**0.5

    def forward(
        self, x_BTD: Tensor, rope: Rope | None, mask: Any, cache: KeyValueCache | None = None
    ) -> Tensor:
        flat = self.hooks.project(x_BTD, (self.q, self.k, self.v))
        if self.q_norm is not None and self.k_norm is not None and self.norms_all_heads:
            flat = *self.hooks.norm_heads(flat[0], flat[1], self.q_norm, self.k_norm), flat[2]
        q, k, v = (x.unflatten(-1, (-1, self.head_dim)) for x in flat)
        if self.q_norm is not None and self.k_norm is not None and not self.norms_all_heads:
            q, k = self.q_norm(q), self.k_norm(k)
        if rope is not None:
            q, k = rotate(q, rope), rotate(k, rope)
        if self.query_factor != 1.0:
            q = q * self.query_factor
        if cache is not None:
            k, v = cache.append(k, v)
        mixed = self.hooks.attend(q, k, v, mask, ScoreChanges(self.softcap, self.sinks))
        return self.hooks.output(mixed.flatten(2), self.o)
