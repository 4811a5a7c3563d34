"""Checks of what callers of the engine pass beside a batch, before anything is computed."""

from __future__ import annotations

import math
from numbers import Integral
from typing import Any

from meshwright.spec import UserError
from meshwright.spec.records import show


def checked_count(count: Any) -> float:
    """Return the `count` of a batch as a number. Raises `UserError` unless it is finite and at least 0."""
    found = _number(count)
    if found is None or not 0 <= found < math.inf:
        raise UserError(
            f"count: {show(count)} does not count tokens or samples; give a finite one of at least 0, such "
            "as len(rows), or leave it out for the number of labels"
        )
    return found


def check_micro_batch(micro_batch: Any) -> None:
    """Raise `UserError` unless `micro_batch` is None or a whole number of at least 1."""
    if micro_batch is None:
        return
    if isinstance(micro_batch, bool) or not isinstance(micro_batch, Integral) or micro_batch < 1:
        raise UserError(
            f"micro_batch: {show(micro_batch)} does not count samples; give a whole number of at least 1, "
            "or leave it out for the run's layout.micro_batch"
        )


def check_loss_fn(loss_fn: Any) -> None:
    """Raise `UserError` unless `loss_fn` is None or can be called."""
    if loss_fn is not None and not callable(loss_fn):
        raise UserError(
            f"loss_fn: {show(loss_fn)} cannot be called; give a function of log-probabilities and rows, and "
            "the count as count=..."
        )


def check_total(total: float, given: bool) -> None:
    """Raise `UserError` if the counts of all data ranks add up to 0, by which no loss can be divided.

    `given` says that the caller passed them, and did not leave them to the number of labels.
    """
    if total > 0:
        return
    if given:
        raise UserError(
            "count: adds up to 0 over all data ranks, and the loss is divided by it; give one of them more "
            "than 0"
        )
    raise UserError(
        "batch.labels: no token of any data rank is trained, as all labels are -100, padding, or a "
        "document's first token; leave such a batch out, or give a count"
    )


def check_rate(lr: Any) -> None:
    """Raise `UserError` unless `lr` is None or a finite number of at least 0."""
    found = _number(lr)
    if lr is not None and (found is None or not 0 <= found < math.inf):
        raise UserError(f"step: lr is {show(lr)}, which no step can take; give 0 or a positive number")


def _number(value: Any) -> float | None:
    """Return a number, also that of a tensor with one element; None for what is none."""
    if isinstance(value, str):
        return None
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError):
        return None
