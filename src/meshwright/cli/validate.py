"""The verb validate, which compares predictions with measured runs; it imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from meshwright import api
from meshwright.api.options import file_name
from meshwright.cli import output as show
from meshwright.cli.parser import JSON, Argument, Call, Flag, verb
from meshwright.hardware.hardware_file import check_writable
from meshwright.planner.validation.table import by_reason, rows_in_words
from meshwright.runs.record import write_atomically
from meshwright.spec import UserError

_NAMED = 16
"""Most columns of a source's, model's or GPU's name in the table."""


@verb(
    "validate",
    Argument("RUNS.csv", "a table of measured runs; by default the published ones", required=False),
    api.validate,
    Flag("markdown", "page to write", "FILE.md", file_name(".md")),
    JSON,
)
def validate(call: Call) -> None:
    """Predict every run of a table, and show the errors."""
    from meshwright.planner.validation import page as validation_page

    by, path = call.flags["by"], call.flags["markdown"]
    if call.words == ("",):
        raise UserError("RUNS.csv: '' names no file; give a table of runs, or nothing for the published ones")
    check_writable(path, "--markdown")
    result = api.validate(call.path(), rows=call.flags["rows"], by=by)
    if path is not None:
        write_atomically(path, validation_page.page(result, by))

    def text(values: Mapping[str, Any]) -> None:
        show.table(validation_page.table(result, by, _NAMED))
        print()
        for name, shown in validation_page.shortened(result[f"by_{by}"], _NAMED).items():
            if shown != name:
                show.line(f"{shown} is {show.text(name)}", 5)
        _show_cells(values)
        _show_rows(values)

    show.result(call, result, text, wrote=[path])


def _show_cells(result: Mapping[str, Any]) -> None:
    """Show how well layouts are ranked that compete: in a line, and with --rows cell by cell."""
    if not result["groups"]:
        return
    show.line(
        f"ranking: in {show.count(result['groups'], 'cell')} of three or more layouts of a model and batch "
        f"on as many devices, the first choice takes {result['regret_median_pct']:.1f}% more than the "
        f"fastest (median), which is among the first three in {result['fastest_shown']}"
    )
    if "each" not in result:
        return
    rows = [
        {
            "model": show.text(cell["model"])[:30], "devices": f"{cell['gpus']:,}",
            "batch": f"{cell['batch_tokens']:,}", "layouts": str(cell["layouts"]),
            "tau": "" if cell["tau"] is None else f"{cell['tau']:.2f}",
            "regret": f"{cell['regret_pct']:.1f}%",
            "fastest in three": "yes" if cell["fastest_shown"] else "no",
        }
        for cell in result["cells"]
    ]  # fmt: skip
    show.table(rows)


def _show_rows(result: Mapping[str, Any]) -> None:
    if "left_out" in result:
        frontier, unseen = result["frontier"], result["left_out"]
        show.line(
            f"the table is of {result['rows']} published runs; of {frontier['rows']} on newer hardware, "
            f"which --markdown and --json list: {frontier['time']['mean_abs_pct']:.1f}% mean, "
            f"{frontier['time']['median_abs_pct']:.1f}% median"
        )
        show.line(
            f"{unseen['rows']} runs of both tables, each predicted without its source: "
            f"{unseen['mean_abs_pct']:.1f}% mean, {unseen['median_abs_pct']:.1f}% median, bias "
            f"{unseen['bias_pct']:+.1f}%; 90% intervals hold {100 * unseen['covered']:.0f}%"
        )
    if unread := result["unread_columns"]:
        show.line(f"columns that are not read: {show.text(', '.join(unread))}", 5)
    for reason, numbers in by_reason(result["skipped_rows"]).items():
        rows = show.count(len(numbers), "row")
        show.line(f"{rows} not predicted ({rows_in_words(numbers)}, from 0): {show.text(reason)}", 5)
    for note, numbers in by_reason(result["notes"], "note").items():
        show.line(f"{rows_in_words(numbers)}, from 0: {show.text(note)}", 5)
    if "each" in result:
        print("rows, from 0, without the heading:")
    for row in result.get("each", ()):
        model = show.text(" ".join(row["model"].split()))[:18]
        print(f"{row['row']:4d} {model:18s} {row['layout'][:36]:36s} {_measured(row)}"[: show.WIDTH].rstrip())
    for row in result["skipped_rows"] if "each" in result else ():
        show.line(f"{row['row']:4d} not predicted: {show.text(row['reason'])}", 5)


def _measured(row: dict[str, Any]) -> str:
    """Return what was measured and predicted of a row, in words."""
    if row["time_error_pct"] is not None:
        return f"{row['seconds']:.4g} s measured, {row['predicted']:.4g} predicted"
    if row["memory_error_pct"] is not None:
        return f"{row['memory_bytes'] / 1e9:.4g} GB measured, {row['predicted_bytes'] / 1e9:.4g} predicted"
    if not row["program_runs_layout"]:
        return "did not fit, predicted not to run"
    return f"did not fit, predicted {'to fit' if row['predicted_to_fit'] else 'not to fit'}"
