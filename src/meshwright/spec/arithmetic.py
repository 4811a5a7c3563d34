"""Arithmetic of the rules: divisors, and the errors for numbers that do not divide or are too large."""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache

from meshwright.spec.errors import UserError


@lru_cache(maxsize=1024)
def divisors(number: int) -> tuple[int, ...]:
    """All divisors of a positive number, ascending."""
    small = [i for i in range(1, int(number**0.5) + 1) if number % i == 0]
    return tuple(sorted({*small, *(number // i for i in small)}))


def nearest(wanted: int, choices: Iterable[int]) -> int:
    """Return the choice nearest to `wanted`; of two at the same distance, the larger."""
    return min(choices, key=lambda choice: (abs(choice - wanted), -choice))


def check_divides(
    key: str, value: int, what: str, total: int, choices: Iterable[int] = (), among: str = ""
) -> None:
    """Raise `UserError` unless `value`, given for `key`, divides `what`, which is `total`.

    The error proposes the nearest of `choices`, by default of all divisors of `total`; `among` says in words
    what limits the choices.
    """
    if total % value:
        fits = nearest(value, choices or divisors(total))
        raise UserError(f"{key}: {value} does not divide {what} = {total}; {among}try {fits}")


def check_at_most(key: str, value: int | None, what: str, limit: int) -> None:
    """Raise `UserError` if `value`, given for `key`, is more than `what`, which is `limit`."""
    if value is not None and value > limit:
        raise UserError(f"{key}: {value} is more than {what} = {limit}; give at most {limit}")
