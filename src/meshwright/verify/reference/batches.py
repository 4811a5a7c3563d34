"""Sizes of batches, counted step by step, written apart from `spec/batch_warmup.py`."""

from __future__ import annotations

from collections.abc import Iterator

from meshwright.spec.train import TrainSpec


def batch_sizes(train: TrainSpec) -> Iterator[int]:
    """Yield the tokens of each step's batch, from the first and without end."""
    seen = 0
    while True:
        unfinished = [size for size, until in train.batch_warmup if seen < until]
        size = unfinished[0] if unfinished else train.batch_tokens
        yield size
        seen += size
