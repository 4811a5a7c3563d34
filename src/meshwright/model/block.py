"""A block of the decoder: attention and a feed-forward layer on the residual stream.

Shapes: B batch, T sequence, D hidden.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from meshwright.model.attention import KeyValueCache
from meshwright.model.attention_gqa import Attention
from meshwright.model.attention_mla import LatentAttention
from meshwright.model.hooks import Hooks
from meshwright.model.mlp import Mlp
from meshwright.model.moe import Moe
from meshwright.model.norm import make_norm
from meshwright.model.rope import Rope
from meshwright.spec import ModelSpec


class Block(nn.Module):
    """x (B, T, D) -> (B, T, D): attention, then the feed-forward layer, each on the residual stream, to which
    it adds; in a parallel block both have one input. There are norms before them, after them, or both."""

    def __init__(self, spec: ModelSpec, layer: int, hooks: Hooks) -> None:
        super().__init__()
        self.scale, self.parallel = spec.residual_scale, spec.parallel_block
        self.attn_norm = make_norm(spec) if spec.norms_before else None
        kind = spec.kind_of(layer)
        latent = kind.attention == "mla"
        self.attn = (
            LatentAttention(spec, kind, hooks.attention) if latent else Attention(spec, hooks.attention)
        )
        self.attn_post_norm = make_norm(spec) if spec.norms_after else None
        self.mlp_norm = make_norm(spec) if spec.norms_before and not self.parallel else None
        self.mlp = Moe(spec, layer, hooks) if kind.has_experts else Mlp(spec, spec.ffn, hooks.mlp)
        self.mlp_post_norm = make_norm(spec) if spec.norms_after else None

    def forward(
        self, x_BTD: Tensor, rope: Rope | None, mask: Any, cache: KeyValueCache | None = None
    ) -> Tensor:
        given_BTD = _normed(self.attn_norm, x_BTD)
        y_BTD = self._scaled(_normed(self.attn_post_norm, self.attn(given_BTD, rope, mask, cache)))
        x_BTD = x_BTD + y_BTD
        if not self.parallel:
            given_BTD = _normed(self.mlp_norm, x_BTD)
        return x_BTD + self._scaled(_normed(self.mlp_post_norm, self.mlp(given_BTD)))

    def _scaled(self, y_BTD: Tensor) -> Tensor:
        return y_BTD if self.scale == 1.0 else y_BTD * self.scale


def _normed(norm: nn.Module | None, x_BTD: Tensor) -> Tensor:
    """`norm` of x, or x itself where there is none."""
    return x_BTD if norm is None else norm(x_BTD)
