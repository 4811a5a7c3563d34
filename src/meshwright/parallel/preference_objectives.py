"""Objectives of a preference loss: pairs of answers, or answers that are judged one by one.

Documents of a sample come in twos, of which a two counts where both have a token that is trained on. Of pairs
they are the chosen and the rejected answer; of judged answers one answer, and its prompt before another's,
and every other two is of answers that are not wanted (`data/judged.py`).

Shapes: n samples, P twos of documents in each at most; D = 2 P.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from meshwright.model.preference_loss import Answers, judged_losses, pair_losses
from meshwright.spec.preference import METRICS, PreferenceSpec


class DocumentSums(NamedTuple):
    """Log-probabilities (n, D) of documents, their numbers of tokens that are trained on, and what the log-
    probabilities of the reference are, 0 without one."""

    log_probs: Tensor
    lengths: Tensor
    reference: Tensor

    @property
    def counted(self) -> Tensor:
        """True for twos (n, P) that count."""
        return both(self.lengths)

    def side(self, number: int) -> Answers:
        """The first or the second document of each two (n, P); of those that do not count, numbers that leave
        a loss finite."""
        given = ((self.log_probs, -1), (self.lengths, 1), (self.reference, -1))
        return Answers(*(torch.where(self.counted, each[:, number::2], filler) for each, filler in given))


class Found(NamedTuple):
    """The losses of twos (n, P), and numbers in float64 that a step sums for `Objective.metrics`."""

    losses: Tensor
    numbers: Tensor


class Objective(ABC):
    """A loss of twos of documents."""

    group: ClassVar[int]
    """Document numbers that belong together."""

    def __init__(self, how: PreferenceSpec) -> None:
        self.how = how

    @abstractmethod
    def losses(self, sums: DocumentSums, kl: Tensor) -> Found:
        """The losses of samples, given the estimate of the KL divergence over their batch, a scalar."""

    @abstractmethod
    def metrics(self, numbers: Sequence[float]) -> dict[str, float]:
        """Fields of a step's metrics, from the sums of `Found.numbers` over it; none of no numbers."""


class PairObjective(Objective):
    """A loss of pairs of answers."""

    group = 2

    def losses(self, sums: DocumentSums, kl: Tensor) -> Found:
        """Those of pairs."""
        found = pair_losses(self.how, sums.side(0), sums.side(1))
        margins = found.chosen - found.rejected
        rewards = (found.chosen, found.rejected, margins, (margins > 0).to(margins))
        counted = sums.counted
        numbers = [counted.sum().double(), *((counted * each).double().sum() for each in rewards)]
        return Found(torch.where(counted, found.loss, 0), torch.stack(numbers))

    def metrics(self, numbers: Sequence[float]) -> dict[str, float]:
        """Mean rewards, their mean margin, and the share of chosen answers that have the larger one."""
        pairs, *sums = numbers
        return {name: each / pairs for name, each in zip(METRICS, sums, strict=True)} if pairs else {}


class JudgedObjective(Objective):
    """KTO's loss of answers that are judged one by one."""

    group = 4

    def losses(self, sums: DocumentSums, kl: Tensor) -> Found:
        """Those of the answers, whose documents are the first ones of each two."""
        answers, counted = sums.side(0), sums.counted
        rewards = self.how.beta * (answers.log_probs - answers.reference)
        wanted = (torch.arange(counted.shape[1], device=counted.device) % 2 == 0).expand_as(counted)
        losses = judged_losses(self.how, rewards, wanted, kl)
        kinds = [counted & wanted, counted & ~wanted]
        summed = [(kind * rewards.detach()).double().sum() for kind in kinds]
        numbers = torch.stack([*(kind.sum().double() for kind in kinds), *summed, counted.sum() * kl])
        return Found(torch.where(counted, losses, 0), numbers)

    def metrics(self, numbers: Sequence[float]) -> dict[str, float]:
        """Mean rewards of answers that are wanted and of the others, their difference, and the estimate of
        the KL divergence."""
        wanted, unwanted, of_wanted, of_unwanted, kl = numbers
        chosen, rejected = of_wanted / max(wanted, 1), of_unwanted / max(unwanted, 1)
        found = {"rewards_chosen": chosen} if wanted else {}
        found |= {"rewards_rejected": rejected} if unwanted else {}
        found |= {"rewards_margins": chosen - rejected} if wanted and unwanted else {}
        return {**found, "kl": kl / (wanted + unwanted)} if found else {}


def log_ratios(sums: DocumentSums) -> Tensor:
    """The log ratios of the second documents of twos, summed, and their number: (2,) in float64."""
    others, counted = sums.side(1), sums.counted
    ratios = (others.log_probs - others.reference) * counted
    return torch.stack([ratios.double().sum(), counted.sum().double()])


def both(lengths_ND: Tensor) -> Tensor:
    """True for twos (n, P) of which both documents have tokens that are trained on."""
    return (lengths_ND[:, 0::2] > 0) & (lengths_ND[:, 1::2] > 0)


def by_document(values_NT: Tensor, documents_NT: Tensor, count: int) -> Tensor:
    """DocumentSums of numbers by document, (n, count).

    They are taken document by document in one order, where a scattered sum of CUDA takes any.
    """
    zero = torch.zeros((), dtype=values_NT.dtype, device=values_NT.device)
    parts = [torch.where(documents_NT == number, values_NT, zero).sum(1) for number in range(count)]
    return torch.stack(parts, 1) if parts else values_NT.new_zeros(len(values_NT), 0)


def objective_of(how: PreferenceSpec) -> Objective:
    """The objective of a run's loss."""
    return JudgedObjective(how) if how.judged else PairObjective(how)
