"""Few cases that cover every pair of choices of a full product: pairwise testing (Cohen et al. 1997)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import Any

import pytest

Case = Mapping[str, object]


def pairwise(cases: Sequence[Case], always: Sequence[Case] = ()) -> list[Case]:
    """A subset of `cases` in which every two choices that are made together in some case are so in one.

    A case is {factor: choice}. `always` belong to the subset. The choice is greedy and depends on the cases
    and their order alone.
    """
    pairs = [set(combinations(sorted((key, str(value)) for key, value in case.items()), 2)) for case in cases]
    chosen = [number for number, case in enumerate(cases) if case in always]
    left = set[Any]().union(*pairs).difference(*(pairs[number] for number in chosen))
    while left:
        best = max(range(len(cases)), key=lambda number: len(pairs[number] & left))
        chosen.append(best)
        left -= pairs[best]
    return [cases[number] for number in sorted(chosen)]


def marked(cases: Sequence[Case], quick: Sequence[Case]) -> list[Any]:
    """The cases as parameters, with the marker `full` but for those that are `quick`."""
    return [
        pytest.param(case, id=name(case), marks=() if case in quick else pytest.mark.full) for case in cases
    ]


def covered(cases: Sequence[Case], always: Sequence[Case] = ()) -> list[Any]:
    """All cases as parameters: `make test` runs a subset that covers all pairs, `make test-all` all."""
    return marked(cases, pairwise(cases, always))


def name(case: Case) -> str:
    """The choices of a case, for pytest."""
    return "-".join(
        f"{key}{value}".replace("layout__", "").replace("model__", "") for key, value in case.items()
    )
