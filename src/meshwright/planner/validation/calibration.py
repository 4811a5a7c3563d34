"""The published runs that calibrated the planner's constants, and the names of these constants.

The runs are every tenth row of `data/published_runs.csv`: 30 of 303, chosen by number alone. The results of
`bench/calibrate.py` were rounded by hand, and the link of an A100 held to 0.9 of its rate where the fit gave
0.99. All other constants of `hardware/data/clusters.toml` and `planner/cost/stacks.toml`, those of memory
included, and the forms of the formulas, were settled by hand with all rows in view: errors on the other rows
are not errors on unseen data, which only tables outside this project can show.
"""

from __future__ import annotations

_EVERY, _FIRST, _ROWS = 10, 3, 303

OF_DEVICES = ("matmul", "attention", "link", "network")
"""Calibrated fields of `hardware.cluster.Rates`."""
OF_STACKS = ("elementwise", "launch", "contention", "overlap_data")
"""Calibrated fields of `planner.cost.software.SoftwareStack`, where they are not 0."""
UNBOUNDED = ("elementwise", "launch", "contention")
"""Calibrated fields that may exceed 1."""


def is_used(number: int) -> bool:
    """True if row `number` of the table, from 0, calibrated the constants."""
    return number % _EVERY == _FIRST and number < _ROWS
