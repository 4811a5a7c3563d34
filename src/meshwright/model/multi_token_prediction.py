"""Multi-token prediction: a layer after the last that predicts the token after the next one, in training.

Source: DeepSeek-AI 2024, "DeepSeek-V3 Technical Report" (arXiv 2412.19437), section 2.2. At place i, whose
normed hidden state is h_i, a block like the model's last one takes eh_proj [enorm(E(t_i+1)); hnorm(h_i)],
with the model's embedding E; what it returns goes through a norm of its own and the model's head, which then
predicts t_i+2. As in DeepSeek's own weights, h_i is what the last norm returns.

Shapes: B batch, T sequence, D hidden.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from meshwright.model.block import Block
from meshwright.model.chunked_cross_entropy import IGNORE
from meshwright.model.head import Head
from meshwright.model.hooks import Hooks
from meshwright.model.linear import Linear
from meshwright.model.log_probs import LogProbLoss
from meshwright.model.norm import make_norm
from meshwright.model.rope import Rope
from meshwright.model.soft_targets import SoftTargets
from meshwright.spec import ModelSpec


@dataclass(frozen=True)
class FurtherTokens:
    """For each token (B, T) of sequences, the `tokens` after it, and the `targets` after those."""

    tokens: Tensor
    targets: Tensor

    def each(self, change: Callable[[Tensor], Tensor]) -> FurtherTokens:
        """Both with `change` applied."""
        return FurtherTokens(change(self.tokens), change(self.targets))


def further_tokens(tokens_BS: Tensor, targets_BS: Tensor, documents_BS: Tensor) -> FurtherTokens:
    """The further tokens of whole sequences (B, S).

    The second target of a place is the target of the next place; it is not predicted (-100) where that is
    not, at the end of a sequence, and where the next place is in another document.
    """
    next_BS = torch.cat([tokens_BS[:, 1:], targets_BS[:, -1:].clamp(min=0)], 1)
    same_BS = documents_BS[:, 1:] == documents_BS[:, :-1]
    within_BS = targets_BS[:, 1:].where(same_BS, IGNORE)
    return FurtherTokens(next_BS, torch.cat([within_BS, torch.full_like(targets_BS[:, :1], IGNORE)], 1))


class PredictionLayer(Block):
    """Embeddings (B, T, D) of the next tokens, and hidden states (B, T, D) of those before -> x (B, T, D) for
    the head and its norm."""

    def __init__(self, spec: ModelSpec, layer: int, hooks: Hooks) -> None:
        super().__init__(spec, layer, hooks)
        self.enorm, self.hnorm = make_norm(spec), make_norm(spec)
        self.eh_proj = Linear(2 * spec.hidden, spec.hidden, False)

    def forward(  # type: ignore[override]
        self, e_BTD: Tensor, h_BTD: Tensor, rope: Rope | None, mask: Any
    ) -> Tensor:
        both_BTD = torch.cat([self.enorm(e_BTD), self.hnorm(h_BTD)], -1)
        return super().forward(self.eh_proj(both_BTD), rope, mask)


@dataclass(frozen=True)
class Further:
    """Further tokens for a `MultiTokenHead`, and the layer that predicts them, which `through` calls with
    embeddings and hidden states."""

    given: FurtherTokens
    through: Callable[[Tensor, Tensor], Tensor]


class MultiTokenHead(Head):
    """A `Head` whose loss has the gradient of that of further tokens, too (`Hooks.further`)."""

    def __init__(self, spec: ModelSpec, embedding: nn.Parameter, hooks: Hooks) -> None:
        super().__init__(spec, embedding, hooks)
        self.mtp_norm = make_norm(spec)
        self.tied, self.embedding_scale = spec.tied, spec.embedding_scale
        if not spec.tied:
            self.embedding = embedding

    def forward(
        self,
        x_BTD: Tensor,
        targets_BT: Tensor | None = None,
        scale: float = 1.0,
        soft: SoftTargets | LogProbLoss | None = None,
        further: Further | None = None,
    ) -> Tensor:
        h_BTD = self.norm(x_BTD)
        found = self.predict(h_BTD, targets_BT, scale, soft)
        if further is None:
            return found
        return self.hooks.further(found, partial(self._further_loss, h_BTD, further))

    def _further_loss(self, h_BTD: Tensor, further: Further, scale: float) -> Tensor:
        """`scale` times the summed loss of further tokens."""
        weight, tokens_BT = self.weight if self.tied else self.embedding, further.given.tokens
        e_BTD = self.hooks.embed(tokens_BT, tokens_BT, weight, None)  # which reads no positions then
        e_BTD = e_BTD if self.embedding_scale == 1.0 else e_BTD * self.embedding_scale
        x_BTD = self.mtp_norm(further.through(e_BTD, h_BTD))
        return self.predict(x_BTD, further.given.targets, scale)
