"""The verb validate, which compares predictions with measured runs; it imports no torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from meshwright.cli import output as show
from meshwright.cli.parser import JSON, Argument, Call, Flag, Verb, choice, file_name
from meshwright.spec import UserError

_NAMED = 24
"""Most columns of a source's, model's or GPU's name in the table."""


def validate(call: Call) -> int:
    """Predict every run of a table, and show the errors."""
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
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UserError(
            f"--markdown: {path} cannot be written ({error.strerror}); give another file"
        ) from None


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
    """Return what was measured and predicted of a row, in words."""
    if row["time_error_pct"] is not None:
        return f"{row['seconds']:.4g} s measured, {row['predicted']:.4g} predicted"
    if row["memory_error_pct"] is not None:
        return f"{row['memory_bytes'] / 1e9:.4g} GB measured, {row['predicted_bytes'] / 1e9:.4g} predicted"
    return f"did not fit, predicted {'to fit' if row['predicted_to_fit'] else 'not to fit'}"


VERBS = (
    Verb(
        "validate",
        "compare the planner's predictions with measured runs: published ones, or a table of yours",
        validate,
        (Argument("RUNS.csv", "a table of measured runs; by default the published ones", required=False),),
        (
            Flag(
                "by",
                "column to group by: source (the default), model or gpu",
                "COLUMN",
                choice("source", "model", "gpu"),
            ),
            Flag("rows", "also show every row, measured and predicted"),
            Flag("markdown", "page to write", "FILE.md", file_name(".md")),
            JSON,
        ),
    ),
)
