"""Learning rates as a function of the step."""

from __future__ import annotations

import math

from meshwright.spec.train import TrainSpec


def peak_rate(train: TrainSpec, step: int) -> float:
    """`lr` scaled with the batch of the step: linearly (Goyal et al. 2017) or by its root (Malladi et al.
    2022)."""
    ratio = train.batch_of_step(step) / train.lr_base_batch_tokens
    return train.lr * {"none": 1.0, "linear": ratio, "sqrt": math.sqrt(ratio)}[train.lr_scaling]


def learning_rate(train: TrainSpec, step: int) -> float:
    """The learning rate of optimiser step `step` (1 to `total_steps`).

    Linear warm-up, then: cosine (Loshchilov & Hutter 2017) or linear to `min_lr_ratio`; stable, then a decay
    in the last `decay_fraction` of the steps (warm-up-stable-decay, Hu et al. 2024), linear, by half a cosine
    or by 1 - sqrt (Haegele et al. 2024); or constant.
    """
    total, warmup = train.total_steps, train.rising_steps
    peak = peak_rate(train, step)
    if step <= warmup:
        return peak * step / warmup
    if train.schedule == "constant":
        return peak
    shape: str = train.schedule
    start = warmup
    if train.schedule == "wsd":
        shape, start = train.decay, total - max(1, round(train.decay_fraction * total))
    done = min(1.0, max(0.0, (step - start) / max(1, total - start)))
    fall = {"cosine": 0.5 * (1 + math.cos(math.pi * done)), "1-sqrt": 1 - math.sqrt(done)}.get(
        shape, 1 - done
    )
    return peak * (train.min_lr_ratio + (1 - train.min_lr_ratio) * fall)
