"""Curves of a run's rows over its steps."""

from __future__ import annotations

from collections.abc import Sequence

from meshwright.report import format as fmt
from meshwright.report.chart import Chart, Series
from meshwright.runs.record import RecordedRun, Row, missing_steps


def rows_with(run: RecordedRun, key: str) -> list[Row]:
    """Return the metrics rows that have `key`, by step."""
    return sorted((row for row in run.metrics if key in row and "step" in row), key=lambda row: row["step"])


def with_gaps(run: RecordedRun, rows: Sequence[Row]) -> list[Row]:
    """Return training rows by step, and for each part of the run that lacks them one with its step alone."""
    parts = missing_steps(run.info, run.metrics, max((row["step"] for row in rows), default=0))
    return sorted([*rows, *({"step": part[0]} for part in parts)], key=lambda row: row["step"])


def series(name: str, rows: Sequence[Row], key: str, colour: int = 0, css: str = "line") -> Series:
    """Return the curve of a key of `rows`; rows with their step alone are steps that were lost."""
    values = [row[key] if fmt.is_number(row.get(key)) else None for row in rows]
    lost = frozenset(row["step"] for row in rows if row.keys() == {"step"})
    return Series(name, [row["step"] for row in rows], values, colour, css, lost)


def chart(rows: Sequence[Row], title: str, names: dict[str, str], colour: int = 0, **options: bool) -> Chart:
    """Return a chart with a curve for each key of `rows`; `names` maps keys to the names of curves."""
    curves = [series(name, rows, key, colour + place) for place, (key, name) in enumerate(names.items())]
    return Chart(next(iter(names)).replace("_", "-"), title, curves, **options)
