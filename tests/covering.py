"""Cases as parameters of tests: a few that make every choice, and all of them."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Any

import pytest

from meshwright.verify.covering import Case


def each_choice(cases: Sequence[Case]) -> list[Case]:
    """A few of the cases that make every choice which some case makes."""
    chosen, left = [], {item for case in cases for item in case.items()}
    while left:
        best = max(cases, key=lambda case: len(left.intersection(case.items())))
        chosen.append(best)
        left -= set(best.items())
    return chosen


def marked(cases: Sequence[Case], quick: Sequence[Case]) -> list[Any]:
    """The cases as parameters, with the marker `full` but for those that are `quick`."""
    return [
        pytest.param(case, id=name(case), marks=() if case in quick else pytest.mark.full) for case in cases
    ]


def some(cases: Iterable[Any], quick: Collection[Any]) -> list[Any]:
    """The cases, each an argument or a tuple of them, with the marker `full` but for those in `quick`."""
    return [
        pytest.param(
            *(case if isinstance(case, tuple) else (case,)), marks=() if case in quick else pytest.mark.full
        )
        for case in cases
    ]


def covered(cases: Sequence[Case]) -> list[Any]:
    """All cases as parameters: `make test` runs a few that make every choice, `make test-all` all."""
    return marked(cases, each_choice(cases))


def name(case: Case) -> str:
    """The choices of a case, for pytest."""
    return "-".join(
        f"{key}{value}".replace("layout__", "").replace("model__", "") for key, value in case.items()
    )
