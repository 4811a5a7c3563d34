"""Operations of the decoder that a parallel layout replaces: one frozen dataclass of functions per module.

The defaults compute on one device. `parallel/parallelize.py` fills in a layout's own, in `decoder_hooks`;
docs/design.md lists both. Shapes: B batch, T tokens, D hidden, N = B T, k experts of a token, R rows at the
experts, F channels.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from meshwright.kernels.gradient_accumulation_fusion import GradientSum, no_sum
from meshwright.kernels.score_changes import capped
from meshwright.model.attention import Attend, attend, attention_mask
from meshwright.model.chunked_cross_entropy import linear_cross_entropy
from meshwright.model.embedding import embed_tokens
from meshwright.model.linear import Linear, apply_linear, project
from meshwright.model.log_probs import linear_log_probs
from meshwright.model.low_precision_linear import Products
from meshwright.model.norm import RmsNorm
from meshwright.model.router import Routing, admit_by_capacity
from meshwright.model.soft_targets import SoftTargets
from meshwright.model.token_dispatcher import TokenDispatcher
from meshwright.spec import MoeSpec

Project = Callable[[Tensor, Sequence[Linear]], tuple[Tensor, ...]]
"""Applies several linear layers to one input."""

Output = Callable[[Tensor, Linear], Tensor]
"""Applies the linear layer that ends an attention or feed-forward layer."""

Results = tuple[Tensor, ...]
Cached = Callable[[Callable[[], Results], bool], Results]
"""(computation, whether a recomputing forward reads its results) -> results, now or from a recompute
cache."""

Defer = Callable[[Sequence[nn.Parameter], Callable[[], Sequence[Tensor | None]]], bool]
"""Takes a computation of parameters' gradients to run later; returns False if they are due now."""

Admit = Callable[[MoeSpec, int, Routing, int], tuple[Tensor, Tensor | None]]
"""(moe, layer, routing, B) -> weights (N, k), and which copies (N, k) their experts admit; None for all."""

Dispatch = Callable[[Tensor, Tensor | None, int, bool], TokenDispatcher]
"""(experts (N, k), admitted copies (N, k) or None, number of experts, whether the kernel of all experts takes
the ends of their rows from the device) -> the dispatcher of these tokens."""

Mask = Callable[[int, int, int | None, Tensor | None, Tensor, int | None], Any]
"""`attention_mask`'s parameters -> the mask that `Attend` takes."""

EmbedTokens = Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor]
"""(tokens (B, T), positions, weight (V, D), position weight or None) -> (B, T, D)."""

Predict = Callable[[Tensor, Tensor, Tensor | None, float, SoftTargets | None, float | None], Tensor]
"""(x (B, T, D), weight (V, D), targets (B, T) or None, scale, soft targets (B, T, C) or None, soft cap of the
logits or None) -> `scale` x summed loss, or logits (B, T, V)."""

LogProbs = Callable[[Tensor, Tensor, Tensor, float | None, bool], tuple[Tensor, Tensor]]
"""(x (B, T, D), weight (V, D), targets (B, T), soft cap of the logits or None, whether entropies are asked
for) -> log-probabilities of targets, and entropies, (B, T) each."""

FurtherLoss = Callable[[Tensor, Callable[[float], Tensor]], Tensor]
"""(loss, computation of the summed loss of further tokens times a factor) -> the loss, whose gradient
includes that of further tokens where they are trained."""

NormHeads = Callable[[Tensor, Tensor, RmsNorm, RmsNorm], tuple[Tensor, Tensor]]
"""(queries (B, T, H d), keys (B, T, K d), their norms) -> both normed."""


def norm_heads(q: Tensor, k: Tensor, q_norm: RmsNorm, k_norm: RmsNorm) -> tuple[Tensor, Tensor]:
    """Queries (B, T, H d) and keys (B, T, K d), each normed over all its channels."""
    return q_norm(q), k_norm(k)


def next_token_alone(loss: Tensor, _further: Callable[[float], Tensor]) -> Tensor:
    """The loss itself."""
    return loss


def identity(x: Tensor) -> Tensor:
    """Return `x` itself."""
    return x


def predict(
    x_BTD: Tensor,
    weight: Tensor,
    targets_BT: Tensor | None,
    scale: float,
    soft: SoftTargets | None = None,
    softcap: float | None = None,
) -> Tensor:
    """Logits (B, T, V), or with targets (B, T) the scalar `scale` x summed loss."""
    if targets_BT is None:
        return capped(F.linear(x_BTD, weight), softcap)
    tokens, targets = x_BTD.flatten(0, 1), targets_BT.flatten()
    return linear_cross_entropy(tokens, weight, targets, scale=scale, soft=flat(soft), softcap=softcap)


def log_probs(
    x_BTD: Tensor, weight: Tensor, targets_BT: Tensor, softcap: float | None, entropy: bool
) -> tuple[Tensor, Tensor]:
    """Log-probabilities of targets, and entropies of their predictions, (B, T) each."""
    tokens, targets = x_BTD.flatten(0, 1), targets_BT.flatten()
    found = linear_log_probs(tokens, weight, targets, softcap=softcap, entropy=entropy)
    return found[0].view_as(targets_BT), found[1].view_as(targets_BT)


def flat(soft: SoftTargets | None) -> SoftTargets | None:
    """Soft targets of tokens (B, T, C) as (N, C)."""
    return None if soft is None else soft.each(lambda x: x.flatten(0, 1))


@dataclass(frozen=True)
class AttentionHooks:
    """Operations of `Attention` and `LatentAttention`."""

    project: Project = project
    """Hidden states, or latents, to the heads' queries, keys and values."""
    attend: Attend = attend
    output: Output = apply_linear
    project_latents: Project = project
    """Hidden states of this rank's tokens to latents."""
    gather_rotary_key: Callable[[Tensor], Tensor] = identity
    """Rotary part of the keys of this rank's tokens -> that of all tokens."""
    norm_heads: NormHeads = norm_heads
    """Norms of the queries and of the keys of all heads together."""


@dataclass(frozen=True)
class MlpHooks:
    """Operations of `Mlp`, shared experts included."""

    project: Project = project
    output: Output = apply_linear


@dataclass(frozen=True)
class ExpertsHooks:
    """Operations of `Experts`."""

    cached: Cached = lambda compute, _read_again: compute()
    defer: Defer = lambda _parameters, _compute: False
    gradient_sum: GradientSum = no_sum
    products: Products = field(default_factory=Products)
    slice: int = 0
    """Which slice of each expert's channels this rank has."""
    group: int = 0
    """Which group of experts this rank has."""


@dataclass(frozen=True)
class MoeHooks:
    """Operations of `Moe`."""

    admit: Admit = admit_by_capacity
    dispatch: Dispatch = TokenDispatcher
    scatter_tokens: Callable[[Tensor], Tensor] = identity
    """(B, T, D) -> the tokens that this rank routes."""
    gather_tokens: Callable[[Tensor], Tensor] = identity
    """The inverse of `scatter_tokens`."""
    chunks: int = 1
    """Number of chunks of tokens; messages of one overlap with the computation of another."""
    shard: int = 0
    """Whose share of all tensor ranks' tokens this rank routes."""
    experts: ExpertsHooks = field(default_factory=ExpertsHooks)


@dataclass(frozen=True)
class Hooks:
    """All replaceable operations of a `Decoder`."""

    mask: Mask = attention_mask
    whole_length: Callable[[int], int] = lambda length: length
    """Tokens of a sequence that this rank has -> those of the whole sequence."""
    embed: EmbedTokens = embed_tokens
    predict: Predict = predict
    log_probs: LogProbs = log_probs
    further: FurtherLoss = next_token_alone
    attention: AttentionHooks = field(default_factory=AttentionHooks)
    mlp: MlpHooks = field(default_factory=MlpHooks)
    moe: MoeHooks = field(default_factory=MoeHooks)
