"""Files of prompts and of their continuations."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from meshwright import atomic
from meshwright.spec import UserError
from meshwright.spec.files import MAX_JSON, parse_json, read_text
from meshwright.spec.records import show

Row = dict[str, Any]


def read_prompts(file: Path) -> list[Row]:
    """Return the objects of a JSONL file, each with a text "prompt". Raises `UserError`."""
    wanted = '{"prompt": "Once"}'
    rows = read_rows(file, wanted)
    for place, row in rows:
        if not isinstance(row.get("prompt"), str):
            raise UserError(
                f'--prompts: {place} has no text "prompt"; write objects such as {wanted}, one a line'
            )
    return [row for _, row in rows]


def read_rows(file: Path, wanted: str) -> list[tuple[str, Row]]:
    """Return the objects of a JSONL file with the place of each; `wanted` is one as messages show it.

    Raises `UserError` for anything else, and where there is none.
    """
    try:
        lines = read_text(file, MAX_JSON).split("\n")
    except (OSError, ValueError) as error:
        raise UserError(f"--prompts: {file} cannot be read ({error})") from None
    rows: list[tuple[str, Row]] = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        place = f"line {number} of {file}"
        try:
            row = parse_json(line)
        except ValueError as error:
            raise UserError(f"--prompts: {place} is not JSON ({error}); mend or remove it") from None
        if not isinstance(row, dict):
            raise UserError(
                f"--prompts: {place} is {show(row)}, not an object; write objects such as {wanted}"
            )
        rows.append((place, row))
    if not rows:
        raise UserError(f"--prompts: {file} has no prompt; write objects such as {wanted}")
    return rows


def write_rows(file: Path, rows: Sequence[Row]) -> None:
    """Write rows as JSONL; the file appears whole, or stays as it was. Raises `UserError`."""
    write_text(file, "".join(json.dumps(row) + "\n" for row in rows))


def write_text(file: Path, text: str) -> None:
    """Write the file of --out, which appears whole, or stays as it was. Raises `UserError`."""
    try:
        atomic.write(file, text)
    except OSError as error:
        raise UserError(f"--out: {file} cannot be written ({error.strerror}); give another file") from error


def check_out(file: Path, prompts: Path | None = None) -> None:
    """Raise `UserError` if nothing can be written to a file, or if it is the file of the prompts."""
    problem = ""
    if file.is_dir():
        problem = "is a folder"
    elif not file.parent.is_dir():
        problem = f"cannot be written, as there is no folder {file.parent}"
    elif not os.access(file.parent, os.W_OK) or (file.exists() and not file.is_file()):
        problem = "cannot be written"
    elif prompts is not None and file.exists() and prompts.exists() and file.samefile(prompts):
        problem = "is the file of --prompts"
    if problem:
        raise UserError(f"--out: {file} {problem}; give another file")
