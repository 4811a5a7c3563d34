"""Numbers near a wish, for the sentences of the rules."""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache


@lru_cache(maxsize=1024)
def divisors(number: int) -> tuple[int, ...]:
    """All divisors of a positive number, ascending."""
    small = [i for i in range(1, int(number**0.5) + 1) if number % i == 0]
    return tuple(sorted({*small, *(number // i for i in small)}))


def nearest(wanted: int, choices: Iterable[int]) -> int:
    """The choice nearest to `wanted`; of two at the same distance, the larger."""
    return min(choices, key=lambda choice: (abs(choice - wanted), -choice))
