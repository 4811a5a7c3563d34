"""`chaos.html`: a run under faults, in one page that opens offline."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from meshwright.report.chart import Points, scatter
from meshwright.report.page import render
from meshwright.runs.record import write_atomically
from meshwright.units import seconds

COLUMNS = {
    "kind": "kind",
    "n": "n",
    "noticed_median": "noticed, median s",
    "noticed_worst": "noticed, worst s",
    "back_median": "back, median s",
    "back_worst": "back, worst s",
    "lost": "steps lost",
    "unnoticed": "unnoticed",
    "misnamed": "misnamed",
}


def write_chaos_page(path: Path, report: Mapping[str, Any], oracles: Mapping[str, str]) -> None:
    """Write the page of a run under faults; `oracles` says in words what must hold."""
    rows = [row for row in report["faults"] if row["back"] is not None]
    points: dict[str, list[tuple[float, float, str]]] = {}
    for row in rows:
        words = f"{row['kind']}, rank {row['rank']}, {row['phase']}: {seconds(row['back'])}"
        points.setdefault(row["kind"], []).append((row["step"] + 1, row["back"], words))
    groups = [Points(kind, f"c{place % 8}", own) for place, (kind, own) in enumerate(points.items())]
    chart = None
    if rows:
        limit, words = report["step_seconds"], "a step without faults"
        title = "Seconds until a new step is done"
        chart = scatter(title, groups, "step of the fault", "seconds until a new step", limit, words)
    title = path.parent.resolve().name
    values = {"report": report, "oracles": oracles, "columns": COLUMNS, "chart": chart}
    write_atomically(path, render("chaos.html", title=title, **values))
