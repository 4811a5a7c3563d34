"""Rows of the published tables with some cells changed."""

from __future__ import annotations

import csv
from pathlib import Path

from meshwright.planner.validation.cases import Case, case_of
from meshwright.planner.validation.table import FRONTIER, read


def case(tmp_path: Path, table: Path = FRONTIER, number: int = 20, **changed: str) -> Case:
    """The case of a row of a table with some cells changed; row 20 is Llama 3.1 70B, fp8, on 64 H100."""
    with table.open(newline="") as file:
        reader = csv.DictReader(file)
        row, names = list(reader)[number] | changed, list(reader.fieldnames or [])
    path = tmp_path / "runs.csv"
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, [*names, *(name for name in changed if name not in names)])
        writer.writeheader()
        writer.writerow(row)
    (read_row,) = read(path)
    return case_of(read_row, [read_row])
