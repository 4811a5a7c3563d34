"""The decoder: embedding, blocks, head. It contains no collectives; `hooks.py` lists what a layout replaces.

Shapes: B batch, T sequence, D hidden, V vocabulary. The units {embed, each block, head} use only their own
parameters, and only inside their `__call__`, around which data parallelism gathers and releases them.
Everything computes in the dtype of the parameters; norms, softmax and the loss accumulate in at least fp32.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from meshwright.model.attention import KeyValueCache
from meshwright.model.attention_gqa import Attention
from meshwright.model.attention_mla import LatentAttention
from meshwright.model.hooks import Hooks
from meshwright.model.mlp import Mlp
from meshwright.model.moe import Moe
from meshwright.model.norm import make_norm
from meshwright.model.rope import Rope, rope_table
from meshwright.model.soft_targets import SoftTargets
from meshwright.spec import ModelSpec


class Embed(nn.Module):
    """Tokens (B, T) -> x (B, T, D): token embeddings, plus position embeddings if those are learned."""

    def __init__(self, spec: ModelSpec, hooks: Hooks) -> None:
        super().__init__()
        self.hooks = hooks
        self.weight = nn.Parameter(torch.empty(spec.vocab_size, spec.hidden))
        learned = spec.position == "learned"
        self.positions = nn.Parameter(torch.empty(spec.max_seq_len, spec.hidden)) if learned else None
        self.scale = spec.embedding_scale

    def forward(self, tokens_BT: Tensor, positions: Tensor) -> Tensor:
        x_BTD = self.hooks.embed(tokens_BT, positions, self.weight, self.positions)
        return x_BTD if self.scale == 1.0 else x_BTD * self.scale


class Block(nn.Module):
    """x (B, T, D) -> (B, T, D): attention, then the feed-forward layer, each on the residual stream, to which
    it adds; in a parallel block both have one input. There are norms before them, after them, or both."""

    def __init__(self, spec: ModelSpec, layer: int, hooks: Hooks) -> None:
        super().__init__()
        self.scale, self.parallel = spec.residual_scale, spec.parallel_block
        self.attn_norm = make_norm(spec) if spec.norms_before else None
        kind = spec.layer_kinds[layer]
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


class Head(nn.Module):
    """x (B, T, D) -> logits (B, T, V), or with targets (B, T) `scale` times the summed loss, a scalar, which
    `soft` change.

    With tied embeddings the weight is that of `Embed`.
    """

    def __init__(self, spec: ModelSpec, tied: nn.Parameter | None, hooks: Hooks) -> None:
        super().__init__()
        self.hooks = hooks
        self.norm = make_norm(spec)
        self.scale, self.softcap = spec.logit_scale, spec.logit_softcap
        self.weight = tied if tied is not None else nn.Parameter(torch.empty(spec.vocab_size, spec.hidden))

    def forward(
        self,
        x_BTD: Tensor,
        targets_BT: Tensor | None = None,
        scale: float = 1.0,
        soft: SoftTargets | None = None,
    ) -> Tensor:
        x_BTD = self.norm(x_BTD)
        x_BTD = x_BTD if self.scale == 1.0 else x_BTD * self.scale
        return self.hooks.predict(x_BTD, self.weight, targets_BT, scale, soft, self.softcap)


def flash_channels(spec: ModelSpec) -> int | None:
    """Channels of a head for flash attention; None for a model whose scores it cannot compute."""
    return spec.head_dim if spec.attention_softcap is None else None


class Decoder(nn.Module):
    """A decoder-only transformer whose parameters are allocated but not filled; `meta` is a valid device.

    With tied embeddings `embed.weight` and `head.weight` are one Parameter, named `embed.weight`.
    """

    def __init__(self, spec: ModelSpec, hooks: Hooks | None = None) -> None:
        super().__init__()
        self.spec, self.hooks = spec, hooks or Hooks()
        self.embed = Embed(spec, self.hooks)
        self.blocks = nn.ModuleList(Block(spec, layer, self.hooks) for layer in range(spec.layers))
        self.head = Head(spec, self.embed.weight if spec.tied else None, self.hooks)

    def each_mixture(self) -> Iterator[tuple[int, Moe]]:
        """(layer index, `Moe`) of each layer with experts."""
        for layer, block in enumerate(self.blocks):
            if isinstance(block.mlp, Moe):
                yield layer, block.mlp

    def balance_biases(self) -> dict[str, Tensor]:
        """Load-balancing biases (E,) of the routers by name: not parameters, but part of a saved model."""
        return {
            f"blocks.{layer}.mlp.router.bias": mixture.router.bias
            for layer, mixture in self.each_mixture()
            if mixture.router.bias is not None
        }

    def tensors(self) -> dict[str, Tensor]:
        """All tensors of a saved model by name: parameters and routers' biases."""
        return {**dict(self.named_parameters()), **self.balance_biases()}

    def forward(
        self,
        tokens_BT: Tensor,
        positions_BT: Tensor | None = None,
        documents_BT: Tensor | None = None,
        targets_BT: Tensor | None = None,
    ) -> Tensor:
        """Logits (B, T, V), or with `targets_BT` the sum of -log p(target), in nats, a scalar.

        `positions_BT` default to 0, 1, ... `documents_BT` are document ids; attention does not cross
        documents. Targets of -100 do not count.
        """
        length = tokens_BT.shape[1]
        if positions_BT is None:
            positions_BT = torch.arange(length, device=tokens_BT.device)
        x_BTD = self.embed(tokens_BT, positions_BT)
        x_BTD = self.through(range(len(self.blocks)), x_BTD, length, positions_BT, documents_BT)
        return self.head(x_BTD, targets_BT)

    def loss(
        self,
        tokens_BT: Tensor,
        targets_BT: Tensor,
        positions_BT: Tensor | None = None,
        documents_BT: Tensor | None = None,
    ) -> Tensor:
        """Sum of -log p(target), in nats, over the targets that are not -100: a scalar, not averaged."""
        return self(tokens_BT, positions_BT, documents_BT, targets_BT)

    def through(
        self, layers: range, x_BTD: Tensor, length: int, positions: Tensor, documents_BT: Tensor | None
    ) -> Tensor:
        """Pass x of `length` tokens through some consecutive blocks, for each of whose kinds there is one
        table of rotary positions and one attention mask."""
        spec = self.spec
        kinds = [spec.layer_kinds[layer] for layer in layers]
        whole = self.hooks.whole_length(length)
        ropes = {
            rope: None if rope is None else rope_table(rope, positions, x_BTD.dtype, whole)
            for rope in dict.fromkeys(kind.rope for kind in kinds)
        }
        masks = {
            window: self.hooks.mask(length, length, window, documents_BT, x_BTD, flash_channels(spec))
            for window in dict.fromkeys(kind.window for kind in kinds)
        }
        for layer, kind in zip(layers, kinds, strict=True):
            x_BTD = self.blocks[layer](x_BTD, ropes[kind.rope], masks[kind.window])
        return x_BTD
