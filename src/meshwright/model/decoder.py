"""The decoder: embedding, blocks, head. One device's mathematics, no collectives.

Shapes: B batch, T sequence, D hidden, V vocabulary. The units {embed, each block, head} touch their own
parameters only, and only inside their `__call__`: that is where parameters are gathered and released.
Everything computes in the dtype of the parameters; norms, softmax and the loss sum in fp32 at least.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meshwright.model.attention import Attention, KeyValueCache, attention_mask
from meshwright.model.attention_mla import LatentAttention
from meshwright.model.chunked_cross_entropy import linear_cross_entropy
from meshwright.model.embedding import embedding
from meshwright.model.mlp import Mlp
from meshwright.model.moe import Moe
from meshwright.model.norm import make_norm
from meshwright.model.rope import Rope, rope_table
from meshwright.spec import ModelSpec


class Embed(nn.Module):
    """Tokens (B, T) -> x (B, T, D): a row for each token, and for each position if those are learned."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(spec.vocab_size, spec.hidden))
        learned = spec.position == "learned"
        self.positions = nn.Parameter(torch.empty(spec.max_seq_len, spec.hidden)) if learned else None

    def forward(self, tokens_BT: Tensor, positions: Tensor) -> Tensor:
        x_BTD = embedding(tokens_BT, self.weight)
        return x_BTD if self.positions is None else x_BTD + embedding(positions, self.positions)


class Block(nn.Module):
    """x (B, T, D) -> (B, T, D): attention, then the feed-forward layer, both on the normed stream."""

    def __init__(self, spec: ModelSpec, layer: int) -> None:
        super().__init__()
        self.attn_norm = make_norm(spec)
        self.attn = Attention(spec) if spec.mla is None else LatentAttention(spec)
        self.mlp_norm = make_norm(spec)
        self.mlp = Moe(spec) if spec.has_experts(layer) else Mlp(spec, spec.ffn)

    def forward(
        self, x_BTD: Tensor, rope: Rope | None, mask: Any, cache: KeyValueCache | None = None
    ) -> Tensor:
        x_BTD = x_BTD + self.attn(self.attn_norm(x_BTD), rope, mask, cache)
        return x_BTD + self.mlp(self.mlp_norm(x_BTD))


class Head(nn.Module):
    """x (B, T, D) -> logits (B, T, V), or with targets (B, T) `scale` times the summed loss.

    Tied, the weight is `embed`'s.
    """

    def __init__(self, spec: ModelSpec, tied: nn.Parameter | None) -> None:
        super().__init__()
        self.norm = make_norm(spec)
        self.weight = tied if tied is not None else nn.Parameter(torch.empty(spec.vocab_size, spec.hidden))

    def forward(self, x_BTD: Tensor, targets_BT: Tensor | None = None, scale: float = 1.0) -> Tensor:
        x_BTD = self.norm(x_BTD)
        if targets_BT is None:
            return F.linear(x_BTD, self.weight)
        return linear_cross_entropy(x_BTD.flatten(0, 1), self.weight, targets_BT.flatten(), scale=scale)


class Decoder(nn.Module):
    """A decoder-only transformer. Its parameters are allocated, not filled; it can be built on `meta`.

    Tied, `embed.weight` and `head.weight` are one Parameter, named `embed.weight`. `visible` makes what the
    blocks' attention takes as its mask; a parallel layout puts its own there.
    """

    visible: Callable[[int, int, int | None, Tensor | None, Tensor], Any]

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.spec = spec
        self.visible = partial(attention_mask, head_dim=spec.head_dim)
        self.embed = Embed(spec)
        self.blocks = nn.ModuleList(Block(spec, layer) for layer in range(spec.layers))
        self.head = Head(spec, self.embed.weight if spec.tied else None)

    def each_block(self) -> Iterator[Block]:
        """The blocks, in order."""
        for block in self.blocks:
            assert isinstance(block, Block)
            yield block

    def each_mixture(self) -> Iterator[tuple[int, Moe]]:
        """(layer, its mixture of experts) of the layers that have one."""
        for layer, block in enumerate(self.each_block()):
            if isinstance(block.mlp, Moe):
                yield layer, block.mlp

    def balance_biases(self) -> dict[str, Tensor]:
        """The routers' biases by name; no parameters, but part of the model."""
        return {
            f"blocks.{layer}.mlp.router.bias": mixture.router.bias
            for layer, mixture in self.each_mixture()
            if mixture.router.bias is not None
        }

    def tensors(self) -> dict[str, Tensor]:
        """All that a saved model holds, by name: the parameters, and the routers' biases."""
        return {**dict(self.named_parameters()), **self.balance_biases()}

    def forward(
        self,
        tokens_BT: Tensor,
        positions_BT: Tensor | None = None,
        documents_BT: Tensor | None = None,
        caches: Sequence[KeyValueCache] | None = None,
    ) -> Tensor:
        """Logits (B, T, V).

        `positions_BT` are by default those after the caches' (0 without caches). `documents_BT` are ids: no
        position sees one of another id. `caches`, one for each block, hold what came before and take this in.
        """
        logits: Tensor = self.head(self._hidden(tokens_BT, positions_BT, documents_BT, caches))
        return logits

    def loss(
        self,
        tokens_BT: Tensor,
        targets_BT: Tensor,
        positions_BT: Tensor | None = None,
        documents_BT: Tensor | None = None,
    ) -> Tensor:
        """Sum of -log p(target) over the targets that are not -100: a scalar, not divided by anything."""
        loss: Tensor = self.head(self._hidden(tokens_BT, positions_BT, documents_BT, None), targets_BT)
        return loss

    def _hidden(
        self,
        tokens_BT: Tensor,
        positions_BT: Tensor | None,
        documents_BT: Tensor | None,
        caches: Sequence[KeyValueCache] | None,
    ) -> Tensor:
        positions = positions_BT
        seen = caches[0].filled if caches else 0
        if positions is None:
            positions = torch.arange(seen, seen + tokens_BT.shape[1], device=tokens_BT.device)
        x_BTD = self.embed(tokens_BT, positions)
        look = self.look(tokens_BT.shape[1], positions, documents_BT, x_BTD, seen)
        for index, block in enumerate(self.blocks):
            x_BTD = block(x_BTD, *look, caches[index] if caches else None)
        return x_BTD

    def look(
        self, length: int, positions: Tensor, documents_BT: Tensor | None, like: Tensor, seen: int = 0
    ) -> tuple[Rope | None, Any]:
        """What blocks share for `length` tokens after `seen` others: rotary tables, and what is visible."""
        rope = rope_table(self.spec, positions, like.dtype) if self.spec.position == "rope" else None
        return rope, self.visible(length, seen + length, self.spec.sliding_window, documents_BT, like)
