"""Kinds of layers: how a layer attends, its rotary positions, and its feed-forward network.

`Architecture.layer_kinds` is the table of a model. The decoder and the reference make one mask for each
window and one table of rotary positions for each `RopeSpec` in it; the planner counts seconds and bytes of a
block of each kind; pipelines are cut by it, and narrowed copies keep every kind.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field

from meshwright.spec.base import FrozenModel

PairFactor = Annotated[float, Field(gt=0)]


class LinearRope(FrozenModel):
    """Positions divided by `factor` (Chen et al. 2023, position interpolation)."""

    kind: Literal["linear"] = "linear"
    factor: float = Field(gt=0)


class Llama3Rope(FrozenModel):
    """Long wavelengths divided by `factor`, short ones kept, a ramp between (Llama 3.1, 2024)."""

    kind: Literal["llama3"] = "llama3"
    factor: float = Field(8.0, gt=0)
    low_freq_factor: float = Field(1.0, gt=0)
    high_freq_factor: float = Field(4.0, gt=0)
    original_max_seq_len: int = Field(8192, ge=1)


class YarnRope(FrozenModel):
    """YaRN: long wavelengths divided by `factor`, short ones kept, a ramp between (Peng et al. 2023).

    The ramp is between the channels that turn `beta_fast` and `beta_slow` times in the original length.
    Cosines and sines are multiplied by `attention_factor`, by default f(1) with f(m) = 0.1 m ln(factor) + 1,
    or f(mscale) / f(mscale_all_dim) if both are given. The scores of latent attention are multiplied by the
    square of f(mscale_all_dim) (DeepSeek-AI 2024).
    """

    kind: Literal["yarn"] = "yarn"
    factor: float = Field(gt=0)
    original_max_seq_len: int = Field(ge=1)
    beta_fast: float = Field(32.0, gt=0)
    beta_slow: float = Field(1.0, gt=0)
    attention_factor: float | None = Field(None, gt=0)
    mscale: float = Field(0.0, ge=0)
    mscale_all_dim: float = Field(0.0, ge=0)
    truncate: bool = Field(True, description="the ramp begins and ends at whole channels")


class LongRope(FrozenModel):
    """LongRoPE: the angle of each pair of channels is divided by a factor of its own (Ding et al. 2024).

    Sequences of more than `original_max_seq_len` tokens take `long_factors`, others `short_factors`. Cosines
    and sines are multiplied by `attention_factor`, by default sqrt(1 + ln(factor) / ln(original_max_seq_len))
    where `factor` is more than 1.
    """

    kind: Literal["longrope"] = "longrope"
    factor: float = Field(gt=0, description="the longest sequences over the original ones")
    original_max_seq_len: int = Field(ge=1)
    short_factors: tuple[PairFactor, ...] = Field(min_length=1)
    long_factors: tuple[PairFactor, ...] = Field(min_length=1)
    attention_factor: float | None = Field(None, gt=0)

    def factors(self, length: int) -> tuple[float, ...]:
        """The factor of each pair of channels in sequences of `length` tokens."""
        return self.long_factors if length > self.original_max_seq_len else self.short_factors


Scaling = LinearRope | Llama3Rope | YarnRope | LongRope
RopeScaling = Annotated[Scaling, Field(discriminator="kind")]


Activation = Literal["swiglu", "geglu_tanh", "gelu", "gelu_tanh"]
"""Activations of a feed-forward layer. SwiGLU and GEGLU, with the tanh form of GELU, multiply by a gate
(Shazeer 2020); GELU and its tanh form do not."""

LayerType = Literal["full_attention", "sliding_attention"]
"""How far a layer attends, in the words of HF's configs: to all tokens so far, or to those of the window."""


@dataclass(frozen=True)
class RopeSpec:
    """Rotary positions of a layer."""

    theta: float
    """Base of the wavelengths."""
    dim: int
    """Channels of a head that turn."""
    scaling: Scaling | None


@dataclass(frozen=True)
class LayerKind:
    """All by which the layers of a model may differ, but for their weights."""

    attention: Literal["gqa", "mla"]
    """Grouped queries, or latents."""
    window: int | None
    """Positions that a query attends to, its own included; None for all before it."""
    rope: RopeSpec | None
    """None where positions are learned."""
    mlp: Literal["dense", "experts"]

    def __hash__(self) -> int:
        """A hash of some fields: the planner looks up kinds by the million; few differ in `rope` alone."""
        return hash((self.window, self.mlp))

    @property
    def has_experts(self) -> bool:
        """True if the layer's feed-forward network is a mixture of experts."""
        return self.mlp == "experts"

    def keys_seen(self, seq_len: int) -> int:
        """Keys that each query of a sequence is counted with: all, or as many as the window holds."""
        return seq_len if self.window is None else min(seq_len, self.window)

    def keys_visible(self, seq_len: int) -> float:
        """Mean number of keys that a causal mask leaves a query of a sequence, to half a key.

        That is half of the sequence without a window. The first queries see fewer than a window of w keys
        holds: in n tokens w - w^2 / 2n on average.
        """
        seen = self.keys_seen(seq_len)
        return seen - seen**2 / (2 * seq_len) if seq_len else 0.0
