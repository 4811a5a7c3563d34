"""Losses of whole answers on one device, written apart from `model/preference_loss.py`.

The log-probability of an answer is summed token by token from a softmax of all logits. Those of the reference
are of the weights that the run began with, without adapters.

Shapes: n sequences of T tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from meshwright.data.loader import Batch
from meshwright.spec import RunSpec
from meshwright.spec.preference import PreferenceSpec
from meshwright.verify.reference.decoder import ReferenceDecoder
from meshwright.verify.reference.lora import is_adapter


class Answer(NamedTuple):
    """The log-probability of all tokens of an answer, a scalar, and their number."""

    log_prob: Tensor
    tokens: int


class TwoAnswers(NamedTuple):
    """Two documents, of which the first has this number in its sample."""

    number: int
    answers: tuple[Answer, Answer]


class ReferencePreference:
    """The mean loss of the answers of a batch: a loss of `steps.py`, of a run and its initial weights."""

    def __init__(self, spec: RunSpec, how: PreferenceSpec, weights: Mapping[str, Tensor]) -> None:
        self.how = how
        base = {name: weight.detach().clone() for name, weight in weights.items() if not is_adapter(name)}
        self._reference = ReferenceDecoder(spec.model, base)
        self._model = ReferenceDecoder(spec.model, dict(weights), lora=spec.lora)
        """The run's model as its weights are, without dropout."""

    def __call__(self, batch: Batch, logits: Tensor) -> Tensor:
        """The mean over pairs, or judged answers, of which both documents have a token that is learned; 0
        without any."""
        found = list(twos_of(batch, logits))
        with torch.no_grad():
            fixed = self._reference(batch.tokens, batch.positions, batch.documents).logits
            references = list(twos_of(batch, fixed))
        if not found:
            return (logits * 0).sum()
        if self.how.loss != "kto":
            return torch.stack(self._pairs(found, references)).mean()
        with torch.no_grad():
            logits = self._model(batch.tokens, batch.positions, batch.documents).logits
            undropped = list(twos_of(batch, logits))
        return torch.stack(self._judged(found, references, undropped)).mean()

    def _pairs(self, found: list[TwoAnswers], references: list[TwoAnswers]) -> list[Tensor]:
        both = zip(found, references, strict=True)
        return [pair_loss(self.how, *own.answers, *reference.answers) for own, reference in both]

    def _judged(
        self, found: list[TwoAnswers], references: list[TwoAnswers], undropped: list[TwoAnswers]
    ) -> list[Tensor]:
        """Ethayarajh et al. 2024, section 4: v = weight * sigmoid(beta (r - z)), or of (z - r) for an answer
        that is not wanted, and the loss is weight - v."""
        others = zip(undropped, references, strict=True)
        ratios = [float(own.answers[1].log_prob - reference.answers[1].log_prob) for own, reference in others]
        z = max(0.0, sum(ratios) / len(ratios))
        losses = []
        for own, reference in zip(found, references, strict=True):
            r = own.answers[0].log_prob - reference.answers[0].log_prob
            if own.number % 4 == 0:
                losses.append(self.how.desirable_weight * torch.sigmoid(self.how.beta * (z - r)))
            else:
                losses.append(self.how.undesirable_weight * torch.sigmoid(self.how.beta * (r - z)))
        return losses


def twos_of(batch: Batch, logits: Tensor) -> Iterator[TwoAnswers]:
    """Yield the documents 2k and 2k + 1 of each sample, where both count: of a pair the chosen and the
    rejected answer, of a judged answer that and its prompt before another's."""
    log_probs = torch.log(torch.softmax(logits, -1))
    for row, (targets, documents) in enumerate(zip(batch.targets, batch.documents, strict=True)):
        own = documents.to(targets.device)
        for first in range(0, int(own.max()) + 1, 2):
            answers = []
            for document in (first, first + 1):
                places = [t for t in range(len(targets)) if own[t] == document and targets[t] >= 0]
                each = [log_probs[row, t, targets[t]] for t in places]
                answers.append(
                    Answer(torch.stack(each).sum() if each else log_probs.new_zeros(()), len(each))
                )
            if answers[0].tokens and answers[1].tokens:
                yield TwoAnswers(first, (answers[0], answers[1]))


def pair_loss(
    how: PreferenceSpec, chosen: Answer, rejected: Answer, chosen_before: Answer, rejected_before: Answer
) -> Tensor:
    """The loss of a pair, given the reference's log-probabilities of both answers."""
    if how.loss == "dpo":
        ratio = (chosen.log_prob - chosen_before.log_prob) - (rejected.log_prob - rejected_before.log_prob)
        right = torch.sigmoid(how.beta * ratio)
    else:
        a, b = (each.log_prob / each.tokens for each in (chosen, rejected))
        if how.loss == "orpo":
            ratio = (a.exp() / (1 - a.exp())) / (b.exp() / (1 - b.exp()))
            return -a - how.beta * torch.log(torch.sigmoid(torch.log(ratio)))
        right = torch.sigmoid(how.beta * (a - b) - how.simpo_gamma)
    return -(1 - how.label_smoothing) * torch.log(right) - how.label_smoothing * torch.log(1 - right)
