"""The runs that the planner's fitted numbers were calibrated on, and the names of these numbers.

They are all of `data/published_runs.csv`, and those of two models of `data/published_runs_frontier.csv`,
less than a third of it. `bench/calibrate.py` fits the numbers, and predicts each source by numbers that were
fitted without it (`data/left_out.csv`), which is what `docs/validation.md` reports first.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from meshwright.planner.validation.table import FRONTIER, PUBLISHED, Row

MODELS = ("Qwen3_30B_a3B", "Nemotron4-340B")
"""Models of the frontier's runs that calibrate: 47 of its 151 runs."""
OF_STACKS: Mapping[str, Mapping[str, float] | float] = {
    "elementwise": {"unfused": 1.0, "eager": 1.5, "fused": 1.0, "compiled": 1.0},
    "launch": {"modules": 50e-6, "eager": 10e-6, "compiled": 5e-6},
    "overlap": {"data": 0.75, "tensor": 0.75, "expert": 0.75},
    "contention": 0.2,
    "step": 0.02,
}
"""Fitted numbers of `[defaults.numbers]` in `planner/cost/stacks.toml`, and what is assumed of each before
any run is seen: a fit returns to this where no run tells otherwise."""
OF_RATES: Mapping[str, Mapping[str, float]] = {
    "defaults": {"matmul": 0.75, "power": 0.25, "network": 0.75},
    "ampere": {"link": 0.8},
    "hopper": {"link": 0.8},
}
"""Fitted numbers of the tables of rates in `hardware/data/clusters.toml`, and what is assumed before."""
BY_HAND = {
    "_TILES": 3,
    "_DEPTH": 1,
    "_SHORT": 1,
    "_UNALIGNED": 1,
    "_UNALIGNED_BATCHED": 1,
    "_DRAW": 1,
    "fragmentation": 1,
    "kept_messages": 1,
    "copying": 1,
    "staged_launch": 1,
    "spread": 1,
}
"""Numbers fitted by hand, with all runs of the first table in view, and how many they are: the constants of
`planner/cost/kernels.py`, fields of `planner/cost/stacks.toml`, and bytes of a draw by vLLM, of one log."""
SHARES = ("overlap", "network", "link")
"""Numbers that are shares, at most 1."""


def is_used(row: Row, table: Path) -> bool:
    """True if a row of a table calibrated the numbers."""
    model = row.words["model"].split("(")[0].strip()
    return table == PUBLISHED or (table == FRONTIER and model in MODELS)
