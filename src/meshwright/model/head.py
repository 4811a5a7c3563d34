"""The head of the decoder: the last norm, and logits or the loss.

Shapes: B batch, T sequence, D hidden, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from meshwright.model.hooks import Hooks
from meshwright.model.log_probs import LogProbLoss
from meshwright.model.norm import make_norm
from meshwright.model.soft_targets import SoftTargets
from meshwright.spec import ModelSpec


class Head(nn.Module):
    """x (B, T, D) -> logits (B, T, V), or with targets (B, T) `scale` times the summed loss, a scalar, which
    `soft` change, or the loss of log-probabilities that stands there.

    With tied embeddings the weight is `embedding`, that of `Embed`.
    """

    def __init__(self, spec: ModelSpec, embedding: nn.Parameter, hooks: Hooks) -> None:
        super().__init__()
        self.hooks = hooks
        self.norm = make_norm(spec)
        self.scale, self.softcap = spec.logit_scale, spec.logit_softcap
        untied = (spec.vocab_size, spec.hidden)
        self.weight = embedding if spec.tied else nn.Parameter(torch.empty(untied))

    def forward(
        self,
        x_BTD: Tensor,
        targets_BT: Tensor | None = None,
        scale: float = 1.0,
        soft: SoftTargets | LogProbLoss | None = None,
    ) -> Tensor:
        return self.predict(self.norm(x_BTD), targets_BT, scale, soft)

    def predict(
        self,
        x_BTD: Tensor,
        targets_BT: Tensor | None,
        scale: float,
        soft: SoftTargets | LogProbLoss | None = None,
    ) -> Tensor:
        """Logits, or the loss, of x that is normed."""
        x_BTD = x_BTD if self.scale == 1.0 else x_BTD * self.scale
        if isinstance(soft, LogProbLoss):
            assert targets_BT is not None
            found = self.hooks.log_probs(x_BTD, self.weight, targets_BT, self.softcap, soft.entropy)
            return soft.loss(*found, scale)
        return self.hooks.predict(x_BTD, self.weight, targets_BT, scale, soft, self.softcap)
