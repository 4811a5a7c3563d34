"""Errors on sources of runs that were left out of the fit: what to expect of the next run.

`bench/calibrate.py --leave-out` writes the seconds of each run as the numbers predict it that were fitted
without its source; they are kept with what a report needs of the run.
"""

from __future__ import annotations

import csv
from collections.abc import Iterable
from math import log
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from meshwright.planner.cost.uncertainty import SIGMA_TIME, factor
from meshwright.planner.validation.error_statistics import errors

LEFT_OUT = Path(__file__).parent / "data" / "left_out.csv"
WORDS = {"known": "dense, known devices", "new": "dense, new devices", "experts": "experts"}
"""Regimes of `uncertainty.SIGMA_TIME` in words."""


class LeftOut(NamedTuple):
    """A run: its measured seconds, those of all fitted numbers, and of those fitted without its source."""

    table: str
    row: int
    source: str
    regime: str
    inferred: int
    """Number of inferred properties."""
    measured: float
    fitted: float
    predicted: float

    @property
    def covered(self) -> bool:
        """True if the measured time is within the 90% interval around the prediction."""
        return abs(log(self.predicted / self.measured)) <= log(factor(self.regime, unknown=self.inferred))


def read(path: Path = LEFT_OUT) -> list[LeftOut]:
    """The runs of the file."""
    with path.open(newline="", encoding="utf-8") as file:
        rows = list(csv.reader(file))[1:]
    return [LeftOut(a, int(b), c, d, int(e), *map(float, rest)) for a, b, c, d, e, *rest in rows]


def write(runs: Iterable[LeftOut], path: Path = LEFT_OUT) -> None:
    """Write the file."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(LeftOut._fields)
        for run in runs:
            writer.writerow([*run[:5], *(f"{seconds:.6g}" for seconds in run[5:])])


def summary(runs: list[LeftOut]) -> dict[str, Any]:
    """Errors in percent, and the share of the runs within their intervals."""
    found: dict[str, Any] = errors(100 * (run.predicted / run.measured - 1) for run in runs)
    return {**found, "covered": fmean(run.covered for run in runs) if runs else None}


def report(runs: list[LeftOut]) -> dict[str, Any]:
    """The figures of all runs, by regime and by source."""
    return {
        **summary(runs),
        "by_regime": {name: summary([run for run in runs if run.regime == name]) for name in SIGMA_TIME},
        "by_source": {
            name: summary([run for run in runs if run.source == name])
            for name in dict.fromkeys(run.source for run in runs)
        },
    }
