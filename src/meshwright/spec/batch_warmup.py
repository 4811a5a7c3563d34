"""Batch-size warm-up: the first steps take smaller batches (Brown et al. 2020; Llama 3, Dubey et al. 2024).

A stage has steps of one batch size, and lasts until the run has seen so many tokens. Sizes, and the tokens
before a step, are functions of the step's number alone.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise
from typing import Any, NamedTuple

from meshwright.spec.errors import UserError
from meshwright.spec.records import show

Warmup = tuple[tuple[int, ...], ...]
"""(tokens of a batch, tokens seen at which the stage ends) of each stage but the last, which has no end."""

_KEY = "train.batch_warmup"


class BatchStage(NamedTuple):
    """Consecutive steps whose batches have one size."""

    batch_tokens: int
    steps_before: int
    tokens_before: int


def read_warmup(given: Any) -> Warmup:
    """Return stages that a run file has as pairs, and a flag as 'SIZE:UNTIL' texts. Raises `UserError`."""
    stages = [_pair(item) for item in given] if isinstance(given, (list, tuple)) else [None]
    found = tuple(pair for pair in stages if pair is not None)
    if len(found) < len(stages):
        raise UserError(
            f"{_KEY}: {show(given)} is not valid: it should be a list of stages, each the tokens of a batch "
            f"and the tokens seen at which it ends (whole numbers from 1 to 2^63 - 1), such as "
            f"[[4096, 100000], [8192, 300000]] or, as a flag, 4096:100000,8192:300000"
        )
    return found


def _pair(item: Any) -> tuple[int, ...] | None:
    """Return the two whole numbers of a stage, within 1 and 2^63 - 1; None for anything else."""
    try:
        parts = [json.loads(part) for part in item.split(":")] if isinstance(item, str) else item
    except ValueError:
        return None
    if not isinstance(parts, (list, tuple)) or len(parts) != 2:
        return None
    for part in parts:  # TOML and JSON read 1e9 as a number with a fraction of 0
        if isinstance(part, bool) or not isinstance(part, (int, float)) or part != part // 1:
            return None
    return tuple(map(int, parts)) if all(0 < part < 2**63 for part in parts) else None


def check_warmup(warmup: Warmup, batch_tokens: int) -> None:
    """Raise `UserError` unless batches grow up to `batch_tokens`, and every stage has a step."""
    for (size, until), (following, _) in pairwise((*warmup, (batch_tokens, 0))):
        if size >= following:
            last = following == batch_tokens
            raise UserError(
                f"{_KEY}: batches of {size} tokens until {until} are followed by "
                f"{'train.batch_tokens = ' if last else 'batches of '}{following}, which is not larger; give "
                f"stages in the order of their sizes, all below train.batch_tokens = {batch_tokens}"
            )
    stages = batch_stages(warmup, batch_tokens)
    for (size, until), (stage, after) in zip(warmup, pairwise(stages), strict=True):
        if after.steps_before == stage.steps_before:
            raise UserError(
                f"{_KEY}: no step has batches of {size} tokens until {until}, since the stage before it ends "
                f"at {stage.tokens_before} tokens; try {size}:{stage.tokens_before + size}, or leave it out"
            )


@lru_cache(maxsize=256)
def batch_stages(warmup: Warmup, batch_tokens: int) -> tuple[BatchStage, ...]:
    """Return the stages in order. A stage ends with the step in which its limit of tokens is reached."""
    found, steps, tokens = [], 0, 0
    for size, until in warmup:
        found.append(BatchStage(size, steps, tokens))
        count = max(0, -(-(until - tokens) // size))
        steps, tokens = steps + count, tokens + count * size
    return (*found, BatchStage(batch_tokens, steps, tokens))


def one_step_each(sizes: Sequence[int]) -> Warmup:
    """Return the warm-up whose stages have a step each, of batches of these sizes."""
    return tuple((size, sum(sizes[: place + 1])) for place, size in enumerate(sizes))
