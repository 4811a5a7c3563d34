"""Specs of mixtures of experts and of multi-head latent attention (DeepSeek)."""

from __future__ import annotations

from math import ceil
from typing import Literal

from pydantic import Field

from meshwright.spec.base import MAX_HEADS, MAX_WIDTH, FrozenModel

CLAMPED_ALPHA, CLAMPED_LIMIT = 1.702, 7.0
"""Numbers of `clamped_swiglu`, (clamp(u, -limit, limit) + 1) g sigmoid(alpha g) with g = min(gate, limit)
(OpenAI 2025, gpt-oss)."""


class MoeSpec(FrozenModel):
    """A mixture of experts in place of the feed-forward layer: each token takes `top_k` of `experts`.

    Routers: softmax over all experts (Shazeer et al. 2017; Jiang et al. 2024, Mixtral), or sigmoid scores
    (DeepSeek-AI 2024, DeepSeek-V3, §2.1.2). Both choose within the best `top_groups` of `groups`, and by the
    score plus a bias where there is one. Softmax scores that are renormalised are the softmax over the chosen
    logits alone.
    """

    experts: int = Field(ge=1, le=MAX_HEADS, description="routed experts of a layer")
    top_k: int = Field(ge=1, description="experts that a token takes")
    ffn: int = Field(ge=1, le=MAX_WIDTH, description="channels of one routed expert")
    shared_ffn: int = Field(
        0, ge=0, le=MAX_WIDTH, description="channels of the shared experts together, which all take"
    )
    shared_gate: bool = Field(
        False, description="multiply what the shared experts add by the sigmoid of a linear map of the token"
    )
    activation: Literal["swiglu", "clamped_swiglu"] = Field(
        "swiglu", description="of the routed experts: SwiGLU, or that of GPT-OSS with clamped inputs"
    )
    expert_bias: bool = Field(False, description="a bias in each linear layer of the routed experts")
    router_bias: bool = Field(False, description="a bias on the router's logits, which is trained")
    router: Literal["softmax", "sigmoid"] = Field("softmax", description="how logits become scores")
    renormalise: bool = Field(True, description="divide the scores of a token's experts by their sum")
    scale: float = Field(1.0, gt=0, description="factor on the weights of the routed experts")
    groups: int = Field(1, ge=1, description="groups that the experts are dealt into")
    top_groups: int = Field(1, ge=1, description="groups that a token chooses its experts from")
    group_score: Literal["top2", "max"] = Field(
        "top2", description="by what a group is chosen: the sum of its two best scores, or its best"
    )
    bias: bool = Field(
        False, description="balance by a bias on the scores that choose, not on those that weigh"
    )
    bias_rate: float = Field(0.001, ge=0, description="step of that bias, after each optimiser step")
    aux_loss: float = Field(0.0, ge=0, description="factor of the balance loss, a mean over sequences")
    z_loss: float = Field(0.0, ge=0, description="factor of the router z-loss, a mean over sequences")
    capacity_factor: float | None = Field(
        None,
        gt=0,
        description="most tokens of a sequence in one expert, in even shares; by default none is dropped",
    )
    dense_first: int = Field(0, ge=0, description="first layers that are dense, of `model.ffn` channels")
    every: int = Field(1, ge=1, description="of the layers after those, each n-th has experts")

    def has_experts(self, layer: int) -> bool:
        """True if layer `layer` (from 0) has experts."""
        return layer >= self.dense_first and (layer - self.dense_first + 1) % self.every == 0

    def capacity(self, length: int) -> int | None:
        """Most tokens of a sequence of `length` in one expert, at least one; None where there is no limit."""
        if self.capacity_factor is None:
            return None
        return max(1, -int(-self.capacity_factor * self.top_k * length // self.experts))

    def buffer_rows(self, tokens: int, ranks: int, factor: float) -> int:
        """Copies of `tokens` that have room on the way to one of `ranks` that share the experts: `factor`
        even shares, but no more than there can be."""
        return min(
            ceil(factor * tokens * self.top_k / ranks), tokens * min(self.top_k, self.experts // ranks)
        )


class MlaSpec(FrozenModel):
    """Multi-head latent attention (DeepSeek-AI 2024, DeepSeek-V2, §2.1).

    Keys and values are made of a latent of `kv_rank` channels, and so are queries where `q_rank` is given.
    Of a head's `model.head_dim` channels the last `rope_dim` carry the position; those of the keys are shared
    by all heads.
    """

    kv_rank: int = Field(ge=1, le=MAX_WIDTH, description="channels of the latent of keys and values")
    q_rank: int | None = Field(
        None, ge=1, le=MAX_WIDTH, description="channels of the latent of queries; none: no latent"
    )
    rope_dim: int = Field(ge=2, description="channels of a head that carry the position")
    v_dim: int = Field(ge=1, description="channels of a head's values")
