"""The section `[preference]` of a run file: training on pairs of answers, of which one was preferred, or on
answers that were judged one by one.

For a prompt x, a chosen answer c and a rejected one r, log p(y) is the sum of the log-probabilities of the
tokens of an answer y, |y| their number, and ref the reference:

    dpo     u = beta (log p(c) - log ref(c) - log p(r) + log ref(r)),
            loss = -(1 - e) log sigmoid(u) - e log sigmoid(-u), with e the label smoothing
    simpo   the same with u = beta (log p(c) / |c| - log p(r) / |r|) - gamma
    orpo    loss = -a - beta log sigmoid(a - b - log(1 - exp a) + log(1 - exp b)),
            with a = log p(c) / |c| and b = log p(r) / |r|

Of answers that are judged one by one, y to x, with the estimate k of the KL divergence of the model from the
reference: the mean of log p(y') - log ref(y') over a step's prompts with answers y' of others, 0 if it is
below:

    kto     loss = desirable_weight (1 - sigmoid(beta (log p(y) - log ref(y) - k))) of one that is wanted,
            loss = undesirable_weight (1 - sigmoid(beta (k - log p(y) + log ref(y)))) of another
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field, PositiveFloat

from meshwright.spec.base import FrozenModel

PreferenceLoss = Literal["dpo", "kto", "orpo", "simpo"]
ForwardAhead = Literal["base", "model"]
"""A forward without gradients of the samples of a step before it: of the run's model, or of that without its
adapters."""
METRICS = ("rewards_chosen", "rewards_rejected", "rewards_margins", "rewards_accuracies")
"""Fields of a step's metrics, means over its pairs, which TRL names with a slash."""
KTO_METRICS = ("rewards_chosen", "rewards_rejected", "rewards_margins", "kl")
"""Those of a step on judged answers: mean rewards of those that are wanted and of the others, and the
estimate of the KL divergence."""


class PreferenceSpec(FrozenModel):
    """The loss of whole answers, in the place of cross-entropy."""

    loss: PreferenceLoss = Field(
        "dpo",
        description="'dpo' (Rafailov et al. 2023) or 'kto' (Ethayarajh et al. 2024), which compare with a "
        "reference, 'orpo' (Hong et al. 2024) or 'simpo' (Meng et al. 2024), which need none; 'kto' takes "
        "answers that are judged one by one, too",
    )
    beta: PositiveFloat = Field(
        0.1,
        description="factor of the rewards: in 'dpo' and 'kto' the more, the closer to the reference; "
        "in 'orpo' the weight of the odds ratio",
    )
    label_smoothing: float = Field(
        0.0,
        ge=0,
        lt=0.5,
        description="share of pairs that are taken to be the wrong way round, in 'dpo' and 'simpo'",
    )
    simpo_gamma: float = Field(
        0.5, ge=0, description="margin that the chosen answer's reward is to have, in 'simpo'"
    )
    desirable_weight: PositiveFloat = Field(
        1.0, description="weight of the losses of answers that are wanted, in 'kto'"
    )
    undesirable_weight: PositiveFloat = Field(
        1.0, description="weight of the losses of answers that are not wanted, in 'kto'"
    )
    reference: Literal["base"] = Field(
        "base", description="the reference of 'dpo' and 'kto': 'base' is the run's model without its adapters"
    )

    precompute_ref_log_probs: bool = Field(
        False,
        description="compute the log-probabilities of the reference, which then is the model that "
        "the run begins with, once before training, and keep them in the run's folder; with it "
        "all weights may be trained",
    )

    @property
    def has_reference(self) -> bool:
        """True if the loss compares the model with a reference."""
        return self.loss in ("dpo", "kto")

    @property
    def judged(self) -> bool:
        """True if the loss is one of answers that are judged one by one, and no pairs."""
        return self.loss == "kto"

    @property
    def forwards_ahead(self) -> tuple[ForwardAhead, ...]:
        """The forwards that each step takes of its samples before it."""
        own: tuple[ForwardAhead, ...] = ("model",) if self.judged else ()
        return (*own, "base") if self.has_reference and not self.precompute_ref_log_probs else own

    @property
    def numbers(self) -> int:
        """Numbers that a step sums over all ranks for its metrics."""
        return 5
