"""The page of several runs beside each other: curves over one another, figures, and the keys that differ."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from meshwright.report import format as fmt
from meshwright.report import run_facts as facts
from meshwright.report.chart import Chart, Series, moving_mean
from meshwright.report.curves import axes, rows_with, series, with_gaps
from meshwright.report.page import render
from meshwright.report.run_page import SMOOTH_FROM
from meshwright.runs.record import RecordedRun, read_run, write_atomically
from meshwright.spec import UserError

MOST_RUNS = 8
"""More curves in one chart could not be told apart."""
_STROKES = ("", "dash", "dotted", "dashdot")
_CHARTS: dict[str, tuple[str, dict[str, bool]]] = {
    "loss": ("Training loss (nats per token)", {"log": True, "wide": True}),
    "val_loss": ("Validation loss (nats per token)", {"log": True}),
    "val_bits_per_byte": ("Held-out text (bits per byte)", {}),
    "tokens_per_second": ("Throughput (tokens/s)", {"from_zero": True}),
    "grad_norm": ("Gradient norm", {"log": True}),
    "lr": ("Learning rate", {"from_zero": True}),
}
"""Key of the rows -> title and options of the chart."""


def read_runs(folders: Sequence[Path]) -> list[RecordedRun]:
    """Read the records of the runs in `folders`.

    Raises `UserError`, also where they are too many, or one is given twice.
    """
    if len(folders) > MOST_RUNS:
        raise UserError(
            f"RUN: {len(folders)} runs are given; a page compares at most {MOST_RUNS}, give fewer"
        )
    places = [folder.resolve() for folder in folders]
    twice = [folder for place, folder in enumerate(folders) if places[place] in places[:place]]
    if twice:
        raise UserError(f"RUN: {twice[0]} is given twice; give each run once")
    return [read_run(folder) for folder in folders]


def compared(runs: Sequence[RecordedRun]) -> dict[str, Any]:
    """Return the `runs`, each with folder and final figures, and the `keys` in which their specs differ."""
    return {
        "runs": [{"run": str(run.out), **facts.figures(run)} for run in runs],
        "keys": dict(facts.keys_apart(runs)),
    }


def write_comparison(path: Path, runs: Sequence[RecordedRun]) -> Path:
    """Write the page of several runs to `path`, and return it. Raises `UserError` if it cannot be written."""
    names = names_of([run.out for run in runs])
    found = compared(runs)
    html = render(
        "comparison.html",
        title=" and ".join(names) if len(names) == 2 else ", ".join(names),
        names=names,
        strokes=[_stroke(place) for place in range(len(names))],
        abouts=[[*facts.about(run), facts.machine(run)] for run in runs],
        figures=[
            (
                title,
                [
                    _figure(show, row[key], found["runs"][0][key], place)
                    for place, row in enumerate(found["runs"])
                ],
            )
            for key, (title, show) in facts.FIGURES.items()
            if any(row[key] is not None for row in found["runs"])
        ],
        curves=[chart for key in _CHARTS if (chart := _chart(runs, names, key)).series],
        axes=[axes(run) for run in runs],
        keys=list(found["keys"].items()),
        record=found,
    )
    write_atomically(path, html)
    return path


def names_of(folders: Sequence[Path]) -> list[str]:
    """Return the names of folders; where two are alike, the parts of their paths in which they differ."""
    places = [folder.resolve() for folder in folders]
    names = [place.name for place in places]
    if len(set(names)) < len(names):
        common = os.path.commonpath(places)
        names = [os.path.relpath(place, common) for place in places]
    return names


def _stroke(place: int) -> str:
    return _STROKES[place % len(_STROKES)]


def _figure(show: Any, value: Any, first: Any, place: int) -> tuple[str, str]:
    """Return a figure, and how far it is from that of the first run."""
    if place == 0 or not (fmt.is_number(value) and fmt.is_number(first)) or first == 0 or value == first:
        return show(value), ""
    return show(value), f"{100 * (value / first - 1):+.1f}%"


def _chart(runs: Sequence[RecordedRun], names: Sequence[str], key: str) -> Chart:
    """Return the chart of a key with a curve of each run that has it."""
    title, options = _CHARTS[key]
    curves = [
        _curve(run, name, key, place) for place, (run, name) in enumerate(zip(runs, names, strict=True))
    ]
    return Chart(key.replace("_", "-"), title, [curve for curve in curves if curve is not None], **options)


def _curve(run: RecordedRun, name: str, key: str, place: int) -> Series | None:
    """Return a run's curve of a key, a long one as its mean; None where it has none."""
    rows = rows_with(run, key)
    if not rows:
        return None
    of_text = key.startswith("val_")
    curve = series(name, rows if of_text else with_gaps(run, rows), key, place, "line")
    if key == "loss" and len(curve.x) >= SMOOTH_FROM:
        means = moving_mean(curve.y, len(curve.x) // 50 | 1)
        kept = [None if step in curve.lost else value for step, value in zip(curve.x, means, strict=True)]
        curve = replace(curve, y=kept)
    return replace(curve, run=place, stroke=_stroke(place))
