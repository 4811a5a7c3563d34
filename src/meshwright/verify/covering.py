"""Covering arrays: few cases that hold every pair of choices of many (Cohen et al. 1997, greedy)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import Any

import numpy as np
from numpy.typing import NDArray

Case = Mapping[str, object]
"""The choice of each factor by its name; all cases have the same factors."""


class Pairs:
    """The pairs of choices that some of `cases` makes, numbered; `of_case` has a row of numbers for each."""

    def __init__(self, cases: Sequence[Case]) -> None:
        columns = [_codes([case[name] for case in cases]) for name in sorted(cases[0])]
        sizes = [int(column.max()) + 1 for column in columns]
        rows: list[NDArray[np.int32]] = []
        count = 0
        for one, other in combinations(range(len(columns)), 2):
            rows.append(count + columns[one] * sizes[other] + columns[other])
            count += sizes[one] * sizes[other]
        self.of_case = np.stack(rows, axis=1) if rows else np.zeros((len(cases), 0), np.int32)
        self.possible = np.zeros(count, bool)
        self.possible[self.of_case] = True

    @property
    def total(self) -> int:
        """Number of pairs that some case makes."""
        return int(self.possible.sum())

    def covered(self, chosen: Sequence[int]) -> int:
        """Number of pairs that the chosen cases make."""
        return len(np.unique(self.of_case[list(chosen)])) if chosen else 0

    def covering(self, always: Sequence[int] = (), costs: Sequence[float] = (1.0,)) -> list[int]:
        """Choose cases that make all pairs; `always` begin, and the next is the first of those that add most
        for their cost. `costs` has one for each case, or for all."""
        chosen, left, each = list(always), self.possible.copy(), np.array(costs)
        left[self.of_case[chosen]] = False
        while left.any():
            best = int((left[self.of_case].sum(1) / each).argmax())
            chosen.append(best)
            left[self.of_case[best]] = False
        return chosen


def _codes(values: Sequence[Any]) -> NDArray[np.int32]:
    """Number the different values from 0, in order of their first occurrence."""
    numbers: dict[str, int] = {}
    return np.array([numbers.setdefault(str(value), len(numbers)) for value in values], np.int32)
