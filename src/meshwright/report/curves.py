"""Curves of a run's rows over its steps, and the tokens and the time of these."""

from __future__ import annotations

from collections.abc import Sequence

from meshwright.report import format as fmt
from meshwright.report.chart import Chart, Series
from meshwright.runs.record import RecordedRun, Row, missing_steps

MOST_PLACES = 300
"""Steps of which a page has the tokens and the time; those between lie between."""


def rows_with(run: RecordedRun, key: str) -> list[Row]:
    """Return the metrics rows that have `key`, by step."""
    return sorted((row for row in run.metrics if key in row and "step" in row), key=lambda row: row["step"])


def with_gaps(run: RecordedRun, rows: Sequence[Row]) -> list[Row]:
    """Return training rows by step, and for each part of the run that lacks them one with its step alone."""
    parts = missing_steps(run.info, run.metrics, max((row["step"] for row in rows), default=0))
    return sorted([*rows, *({"step": part[0]} for part in parts)], key=lambda row: row["step"])


def axes(run: RecordedRun) -> dict[str, list[float]]:
    """Return steps of a run with the tokens and the seconds in training until each, as far as it has them.

    The seconds are those of its starts, without the time between them and that of steps that were lost.
    """
    rows = [row for row in rows_with(run, "loss") if fmt.is_number(row["step"])]
    found: dict[str, list[float]] = {"step": [row["step"] for row in rows]}
    if rows and all(fmt.is_number(row.get("tokens")) for row in rows):
        found["tokens"] = [row["tokens"] for row in rows]
    if rows and all(fmt.is_number(row.get("elapsed_seconds")) for row in rows):
        found["time"] = _running_seconds(run, rows)
    every = max(1, -(-len(rows) // MOST_PLACES))
    kept = [place for place in range(len(rows)) if place % every == 0 or place == len(rows) - 1]
    return {name: [0, *(values[place] for place in kept)] for name, values in found.items()}


def _running_seconds(run: RecordedRun, rows: Sequence[Row]) -> list[float]:
    """Return the seconds in training until each row: those of earlier starts count to their last row."""
    starts = sorted(
        start["step"] for start in run.info.get("starts") or [] if fmt.is_number(start.get("step"))
    )
    found: list[float] = []
    before = last = 0.0
    for earlier, row in zip([None, *rows], rows, strict=False):
        restarted = earlier and any(earlier["step"] <= start < row["step"] for start in starts)
        if restarted or row["elapsed_seconds"] < last:
            before += last
        last = row["elapsed_seconds"]
        found.append(round(before + last, 3))
    return found


def series(name: str, rows: Sequence[Row], key: str, colour: int = 0, css: str = "line") -> Series:
    """Return the curve of a key of `rows`; rows with their step alone are steps that were lost."""
    values = [row[key] if fmt.is_number(row.get(key)) else None for row in rows]
    lost = frozenset(row["step"] for row in rows if row.keys() == {"step"})
    return Series(name, [row["step"] for row in rows], values, colour, css, lost)


def chart(rows: Sequence[Row], title: str, names: dict[str, str], colour: int = 0, **options: bool) -> Chart:
    """Return a chart with a curve for each key of `rows`; `names` maps keys to the names of curves."""
    curves = [series(name, rows, key, colour + place) for place, (key, name) in enumerate(names.items())]
    return Chart(next(iter(names)).replace("_", "-"), title, curves, **options)
