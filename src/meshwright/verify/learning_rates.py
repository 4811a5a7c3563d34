"""Learning rates of steps all over a run, beside those that the reference computes."""

from __future__ import annotations

import torch
from torch import Tensor

from meshwright.optim.lr_schedule import learning_rate
from meshwright.spec.train import TrainSpec
from meshwright.verify.reference.schedule import rate_of_step

EVENLY = 16
"""Steps that are looked at besides the first, the last and those where a schedule turns."""
MOST_STEPS = 100_000
"""The last step that is looked at, since the reference counts the tokens of all steps before."""


def learning_rates(train: TrainSpec) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The learning rates of a run and the reference's, by step."""
    total = min(train.total_steps, MOST_STEPS)
    warmup = train.rising_steps
    decay = train.total_steps - round(train.decay_fraction * train.total_steps)
    near = [turn + by for turn in (0, warmup, decay, total) for by in (-1, 0, 1, 2)]
    even = [1 + (total - 1) * place // EVENLY for place in range(EVENLY)]
    steps = sorted({step for step in (*near, *even) if 1 <= step <= total})
    found, wanted = (
        {f"step {step}": torch.tensor(of(train, step), dtype=torch.float64) for step in steps}
        for of in (learning_rate, rate_of_step)
    )
    return found, wanted
