"""The verb that sets predictions beside measured runs: validate. It imports no torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from meshwright import atomic
from meshwright.cli import output as show
from meshwright.cli.parser import JSON, Argument, Call, Flag, Verb, choice, file_name
from meshwright.spec import UserError

_NAMED = 24
"""Columns of a source's, model's or GPU's name in the table."""


def validate(call: Call) -> int:
    """Predict every run of a table."""
    from meshwright import api
    from meshwright.planner.validation import page as validation_page

    by = call.flags["by"] or "source"
    result = api.validate(call.path(), rows=bool(call.flags["rows"]), by=by)
    if path := call.flags["markdown"]:
        _write(Path(path), validation_page.page(result))
    if call.flags["json"]:
        show.as_json(result)
        return 0
    show.table(validation_page.table(result, by, _NAMED))
    _tell(result)
    if path:
        print(f"wrote {path}")
    return 0


def _write(path: Path, text: str) -> None:
    try:
        atomic.write(path, text)
    except OSError as error:
        raise UserError(f"--markdown: {path} cannot be written: {error.strerror}") from None


def _tell(result: dict[str, Any]) -> None:
    print()
    for reason, count in result["skipped"].items():
        show.line(f"{show.count(count, 'row')} not predicted: {reason}", 5)
    if "each" in result:
        print("rows, from 0, without the heading:")
    for each in result.get("each", ()):
        model = " ".join(each["model"].split())[:18]
        print(f"{each['row']:4d} {model:18s} {each['layout'][:36]:36s} {_told(each)}"[: show.WIDTH].rstrip())
    for each in result.get("skipped_rows", ()):
        show.line(f"{each['row']:4d} not predicted: {each['reason']}", 5)


def _told(row: dict[str, Any]) -> str:
    """What was measured of a row, and what was predicted."""
    if row["time_error_pct"] is not None:
        return f"{row['seconds']:.4g} s measured, {row['predicted']:.4g} predicted"
    if row["memory_error_pct"] is not None:
        return f"{row['memory_bytes'] / 1e9:.4g} GB measured, {row['predicted_bytes'] / 1e9:.4g} predicted"
    return f"did not fit, predicted {'to fit' if row['predicted_to_fit'] else 'not to fit'}"


VERBS = (
    Verb(
        "validate",
        "set the planner's predictions beside measured runs: published ones, or a table of yours",
        validate,
        (Argument("RUNS.csv", "a table of measured runs; by default the published ones", required=False),),
        (
            Flag(
                "by",
                "a line for each: source (the default), model or gpu",
                "COLUMN",
                choice("source", "model", "gpu"),
            ),
            Flag("rows", "every row with what was measured and predicted"),
            Flag("markdown", "page to write", "FILE.md", file_name(".md")),
            JSON,
        ),
    ),
)
