"""Which published runs calibrated the planner's constants, and which constants they are.

Every tenth row of `planner/data/published_runs.csv`: 30 of 303, chosen by their number alone. The forms of
the formulas were developed with all rows in view, so that errors on the others are not those of unseen
data; what no row of ours decided is how they do on tables that are not in this project.
"""

from __future__ import annotations

_EVERY, _FIRST = 10, 3

OF_DEVICES = ("matmul", "attention", "link", "network")
"""Fields of `planner.hardware.Rates`."""
OF_STACKS = ("elementwise", "launch", "contention", "overlap_data")
"""Fields of `planner.stack.Stack`, where they are not 0."""
UNBOUNDED = ("elementwise", "launch", "contention")
"""Those that may exceed 1."""


def is_used(number: int) -> bool:
    """Whether row `number` of the table, from 0, calibrated the constants."""
    return number % _EVERY == _FIRST and number < 303
