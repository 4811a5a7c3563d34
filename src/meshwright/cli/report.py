"""The verb report: pages of runs; it imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from meshwright import api
from meshwright.cli import output as show
from meshwright.cli.parser import JSON, Argument, Call, verb
from meshwright.report.comparison_page import names_of
from meshwright.report.format import value_text
from meshwright.report.run_facts import FIGURES


@verb("report", Argument("RUN", "the folder of a run", repeated=True), api.report, JSON)
def report(call: Call) -> None:
    """Make the page of a run again, or of several beside each other."""
    result = api.report([Path(word) for word in call.words], **call.flags)
    show.result(call, result, _show, wrote=[Path(result["page"])])


def _show(result: Mapping[str, Any]) -> None:
    """Print the figures and the keys that differ, a column for each run."""
    runs = result["runs"]
    names = names_of([Path(run["run"]) for run in runs])
    if len(runs) == 1:
        show.pairs(
            {
                title: write(runs[0][key])
                for key, (title, write) in FIGURES.items()
                if runs[0][key] is not None
            }
        )
        return
    rows = [(title, [write(run[key]) for run in runs]) for key, (title, write) in FIGURES.items()]
    rows += [(key, [value_text(value) for value in values]) for key, values in result["keys"].items()]
    show.table([{" ": title, **dict(zip(names, values, strict=True))} for title, values in rows])
