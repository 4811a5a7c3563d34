"""Which published runs calibrated the planner's constants, and which constants they are.

Every tenth row of `planner/validation/data/published_runs.csv`: 30 of 303, chosen by their number alone. What
`bench/calibrate.py` found was rounded by hand, and the link of an A100 held to 0.9 of its rate where it found
0.99. Every other constant of `hardware/peak_rates.py` and `planner/cost/software.py`, those of memory among
them, and the forms of the formulas, were settled by hand with all rows in view: errors on the other rows are
not those of unseen data. How the planner does on unseen data, tables that are not in this project tell.
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
