"""Fields of a run's page about its islands, where they were worlds of their own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from meshwright.islands.island_log import island_folder
from meshwright.report.chart import Chart
from meshwright.report.curves import axes, rows_with, series, with_gaps
from meshwright.runs.record import RUN, Row, read_run


def island_fields(out: Path, result: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of the page of the run in folder `out`, with no curves where it had no islands."""
    islands = [row for row in result.get("islands") or [] if isinstance(row, dict)]
    found, curves = _curves(out, islands) if islands else ([], [])
    return {"curves": curves, "axes": found, "islands": islands, "lateness": _lateness(result)}


def _curves(out: Path, islands: Sequence[Row]) -> tuple[list[dict[str, list[float]]], list[Chart]]:
    """Return the axes of each island of the run in folder `out`, and charts with a curve for each."""
    folders = {row["island"]: island_folder(out, row["island"]) for row in islands}
    runs = {island: read_run(folder) for island, folder in folders.items() if (folder / RUN).is_file()}

    def of_all(key: str, title: str, **options: bool) -> Chart:
        curves = [
            replace(
                series(f"island {island}", rows if key == "val_loss" else with_gaps(run, rows), key, island),
                run=place,
            )
            for place, (island, run) in enumerate(runs.items())
            if (rows := rows_with(run, key))
        ]
        return Chart(key.replace("_", "-"), title, curves, **options)

    return [axes(run) for run in runs.values()], [
        of_all("loss", "Loss (nats per token)", log=True, mark_gaps=True, wide=True),
        of_all("val_loss", "Validation loss (nats per token)", log=True),
        of_all("tokens_per_second", "Throughput of an island (tokens/s)", from_zero=True),
    ]


def _lateness(result: dict[str, Any]) -> dict[int, int]:
    """Return how often a part of an island came how many exchanges late, from 0 to the most."""
    found = {int(late): count for late, count in (result.get("lateness") or {}).items()}
    return {late: found.get(late, 0) for late in range(max(found) + 1)} if found else {}
