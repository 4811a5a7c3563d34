"""The loss of a student with a teacher's answers on one device, in plain softmaxes and sums.

Shapes: n sequences of T tokens, V vocabulary, D channels.
"""

from __future__ import annotations

import torch
from torch import Tensor

from meshwright.data.loader import Batch
from meshwright.spec import ModelSpec
from meshwright.spec.distil import DistilSpec
from meshwright.verify.reference.decoder import ReferenceDecoder
from meshwright.verify.reference.steps import Heads


class ReferenceTeacher:
    """A frozen teacher, as the loss of a student that learns from its answers: a `Loss` of `steps.py`."""

    def __init__(self, how: DistilSpec, model: ModelSpec, weights: dict[str, Tensor]) -> None:
        self.how = how
        self._last: dict[str, Tensor] = {}
        self._decoder = ReferenceDecoder(model, weights, self._tap)

    def _tap(self, path: str, x: Tensor) -> Tensor:
        self._last[path] = x
        return x

    def __call__(self, batch: Batch, student: Heads, cross_entropy: Tensor) -> Tensor:
        loss = distillation_loss(self.how, student, self.answers(batch), batch.targets)
        return (1 - self.how.weight) * cross_entropy + loss

    @torch.no_grad()
    def answers(self, batch: Batch) -> Heads:
        """Compute the teacher's logits and hidden states."""
        logits = self._decoder(batch.tokens, batch.positions, batch.documents).logits
        return Heads(logits, self._last["head.norm"])


def distillation_loss(how: DistilSpec, student: Heads, teacher: Heads, targets: Tensor) -> Tensor:
    """The mean of the weighed KL and hidden error over the targets (n, T) that are predicted."""
    p, q = (torch.softmax(heads.logits / how.temperature, -1) for heads in (teacher, student))
    if how.top_k is not None:
        order = p.argsort(-1, descending=True)
        p, q = (x.gather(-1, order).split([how.top_k, x.shape[-1] - how.top_k], -1) for x in (p, q))
        p, q = (torch.cat([told, others.sum(-1, keepdim=True)], -1) for told, others in (p, q))
    ratio = torch.log(p) - torch.log(q)
    kl = (p * ratio if how.loss == "forward_kl" else -q * ratio).sum(-1)
    losses = how.weight * how.temperature**2 * kl
    if how.hidden:
        losses = losses + how.hidden * (student.hidden - teacher.hidden).pow(2).mean(-1)
    predicted = targets >= 0
    return (losses * predicted).sum() / max(1, int(predicted.sum()))
