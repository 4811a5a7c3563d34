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

from meshwright.model.block import Block
from meshwright.model.head import Head
from meshwright.model.hooks import Hooks
from meshwright.model.moe import Moe
from meshwright.model.multi_token_prediction import (
    Further,
    FurtherTokens,
    MultiTokenHead,
    PredictionLayer,
)
from meshwright.model.rope import Rope, rope_table
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
        self.blocks.extend(PredictionLayer(spec, layer, self.hooks) for layer in spec.mtp_layers)
        head = MultiTokenHead if spec.mtp_num_layers else Head
        self.head = head(spec, self.embed.weight, self.hooks)

    def each_mixture(self) -> Iterator[tuple[int, Moe]]:
        """(layer index, `Moe`) of each layer with experts, also of those that predict further tokens."""
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
        x_BTD = self.through(range(self.spec.layers), x_BTD, length, positions_BT, documents_BT)
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
        around = self._around(layers, x_BTD, length, positions, documents_BT)
        for layer, each in zip(layers, around, strict=True):
            x_BTD = self.blocks[layer](x_BTD, *each)
        return x_BTD

    def further(
        self, given: FurtherTokens, length: int, positions: Tensor, documents_BT: Tensor | None
    ) -> Further:
        """Further tokens `given` for the head, with their layer, in sequences of `length` tokens."""
        layers = self.spec.mtp_layers

        def through(e_BTD: Tensor, h_BTD: Tensor) -> Tensor:
            (around,) = self._around(layers, h_BTD, length, positions, documents_BT)
            found: Tensor = self.blocks[layers.start](e_BTD, h_BTD, *around)
            return found

        return Further(given, through)

    def _around(
        self, layers: range, x_BTD: Tensor, length: int, positions: Tensor, documents_BT: Tensor | None
    ) -> list[tuple[Rope | None, Any]]:
        """The rotary positions and the attention mask that each layer takes beside x of `length` tokens."""
        spec = self.spec
        kinds = [spec.kind_of(layer) for layer in layers]
        whole = self.hooks.whole_length(length)
        ropes = {
            rope: None if rope is None else rope_table(rope, positions, x_BTD.dtype, whole)
            for rope in dict.fromkeys(kind.rope for kind in kinds)
        }
        masks = {
            window: self.hooks.mask(length, length, window, documents_BT, x_BTD, flash_channels(spec))
            for window in dict.fromkeys(kind.window for kind in kinds)
        }
        return [(ropes[kind.rope], masks[kind.window]) for kind in kinds]
