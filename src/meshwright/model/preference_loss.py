"""Losses of pairs of answers: DPO (Rafailov et al. 2023), with the label smoothing of conservative DPO
(Mitchell 2023), SimPO (Meng et al. 2024) and ORPO (Hong et al. 2024); and of answers that are judged one by
one: KTO (Ethayarajh et al. 2024). All are as `spec/preference.py` states them.

Shapes: P pairs, or judged answers.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from meshwright.spec.preference import PreferenceSpec


class Answers(NamedTuple):
    """The sums (P,) of the log-probabilities of the answers' tokens, their numbers, and what the reference's
    sums are, 0 without one."""

    log_probs: Tensor
    lengths: Tensor
    reference: Tensor

    @property
    def mean(self) -> Tensor:
        """The mean log-probability of a token (P,)."""
        return self.log_probs / self.lengths.clamp(min=1)


class PairLosses(NamedTuple):
    """The loss of each pair (P,), and the rewards of its answers, without gradients."""

    loss: Tensor
    chosen: Tensor
    rejected: Tensor


def pair_losses(how: PreferenceSpec, chosen: Answers, rejected: Answers) -> PairLosses:
    """The losses of pairs and their answers' implicit rewards: beta (log p - log ref) in DPO, and else beta
    times the mean log-probability of a token."""
    if how.has_reference:
        scores = [each.log_probs - each.reference for each in (chosen, rejected)]
    else:
        scores = [each.mean for each in (chosen, rejected)]
    better, worse = (how.beta * each for each in scores)
    if how.loss == "orpo":
        loss = odds_ratio_loss(how.beta, *scores)
    else:
        loss = sigmoid_loss(better - worse - (how.simpo_gamma if how.loss == "simpo" else 0), how)
    return PairLosses(loss, better.detach(), worse.detach())


def sigmoid_loss(margin: Tensor, how: PreferenceSpec) -> Tensor:
    """-log sigmoid of the margins (P,), where a share of the pairs is taken to be the wrong way round."""
    loss = -(1 - how.label_smoothing) * F.logsigmoid(margin)
    if how.label_smoothing:
        loss = loss - how.label_smoothing * F.logsigmoid(-margin)
    return loss


def odds_ratio_loss(beta: float, chosen: Tensor, rejected: Tensor) -> Tensor:
    """The chosen answer's mean negative log-likelihood, and beta times -log sigmoid of the log odds ratio, of
    mean log-probabilities (P,)."""
    odds = (chosen - rejected) - (log_1_minus_exp(chosen) - log_1_minus_exp(rejected))
    return -chosen - beta * F.logsigmoid(odds)


def log_1_minus_exp(x: Tensor) -> Tensor:
    """log(1 - e^x) for x below 0, exact near 0 and far from it (Maechler 2012)."""
    near = x > -0.6931471805599453
    # Each branch gets numbers that are its own, so that neither's gradient is infinite where it is not taken.
    close, far = torch.where(near, x, -0.5), torch.where(near, -1.0, x)
    return torch.where(near, torch.log(-torch.expm1(close)), torch.log1p(-torch.exp(far)))


def judged_losses(how: PreferenceSpec, rewards: Tensor, wanted: Tensor, kl: Tensor) -> Tensor:
    """KTO's losses (P,) of answers with these `rewards`, beta (log p - log ref), of which some are `wanted`.

    `kl` is the estimate of the divergence of the model from the reference, a scalar without a gradient.
    """
    margin = torch.where(wanted, 1, -1) * (rewards - how.beta * kl)
    losses = 1 - torch.sigmoid(margin)
    return torch.where(wanted, how.desirable_weight * losses, how.undesirable_weight * losses)


def estimated_kl(log_ratios: Tensor, count: Tensor) -> Tensor:
    """KTO's estimate of a KL divergence, which moves where an answer's reward saturates: the mean of `count`
    log ratios that were summed, 0 if it is below."""
    return (log_ratios / count.clamp(min=1)).clamp(min=0)
