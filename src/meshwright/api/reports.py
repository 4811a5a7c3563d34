"""Pages of runs: that of one again, or of several beside each other."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

from meshwright.api.options import Option, file_name
from meshwright.hardware.hardware_file import check_writable
from meshwright.spec import UserError

COMPARISON = "comparison.html"
"""The name of a page of several runs, in the folder of the first."""


def report(
    runs: Sequence[Path],
    *,
    out: Annotated[Path | None, Option(
        "page to write, which opens offline; default report.html in the run's folder, or with several runs "
        "comparison.html in the first one's", "FILE.html", file_name(".html"))] = None,
) -> dict[str, Any]:  # fmt: skip
    """Write the page of a run, which may still be going, or one that compares several.

    Returns the `page`, the `runs` with their final figures, and the `keys` in which their specs differ, with
    the value of each run. Raises `UserError`.
    """
    from meshwright.report.comparison_page import compared, read_runs, write_comparison
    from meshwright.report.run_page import REPORT, write_report

    if not runs:
        raise UserError("RUN: is missing; give the folder of a run, or of several to compare them")
    read = read_runs([Path(run) for run in runs])
    path = Path(out) if out is not None else read[0].out / (REPORT if len(read) == 1 else COMPARISON)
    check_writable(path)
    if len(read) == 1:
        write_report(read[0].out, path)
    else:
        write_comparison(path, read)
    return {"page": str(path), **compared(read)}
