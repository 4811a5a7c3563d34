"""The most of a thing that still fits."""

from __future__ import annotations

from collections.abc import Callable


def most_that(fits: Callable[[int], bool], low: int, high: int) -> int:
    """The largest number from `low` to `high` that fits, where all below it do; `low` is known to."""
    if high > low and fits(high):
        return high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def doubled(fits: Callable[[int], bool], least: int, most: int) -> int:
    """The largest number up to `most` that fits, where all below it do; 0 if `least` does not.

    It tries `least` times powers of two first, since large ones may take long to find too large.
    """
    if least > most or not fits(least):
        return 0
    low = least
    while 2 * low <= most:
        if not fits(2 * low):
            return most_that(fits, low, 2 * low)
        low *= 2
    return most_that(fits, low, most)
