"""Learning rates of steps, written apart from `optim/lr_schedule.py`."""

from __future__ import annotations

import math
from itertools import islice

from meshwright.spec.train import TrainSpec
from meshwright.verify.reference.batches import batch_sizes


def rate_of_step(train: TrainSpec, step: int) -> float:
    """Learning rate of optimiser step `step`, from 1, as the keys of `[train]` describe it.

    Linear warm-up to the peak; then half a cosine (Loshchilov & Hutter 2017) or a line down to `min_lr_ratio`
    of the peak, or in the last steps one of these or 1 - sqrt (Hu et al. 2024; Haegele et al. 2024), or the
    peak for ever. The peak is scaled with the step's own batch.
    """
    exponent = {"none": 0.0, "linear": 1.0, "sqrt": 0.5}[train.lr_scaling]
    peak = train.lr
    if exponent:
        peak *= (next(islice(batch_sizes(train), step - 1, None)) / train.lr_base_batch_tokens) ** exponent
    total, warmup = train.total_steps, train.warmup_steps
    if warmup is None:
        share = train.warmup_fraction
        warmup = max(1, round(share * total)) if share > 0 else 0
    if step <= warmup:
        return peak * step / warmup
    lowest = peak * train.min_lr_ratio
    left = (total - step) / (total - warmup) if step < total else 0.0  # share of the fall that is to come
    form = str(train.schedule)
    if train.schedule == "wsd":
        form = train.decay
        left = min(1.0, (total - step) / max(1, round(train.decay_fraction * total)))
    if form == "cosine":
        left = (1 - math.cos(math.pi * left)) / 2
    elif form == "1-sqrt":
        left = 1 - math.sqrt(1 - left)
    elif form == "constant":
        left = 1.0
    return lowest + (peak - lowest) * left
