"""Rows of the table of launchers (`tools/launcher_table.py`), for the tests that see them."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1] / "tools"))

from launcher_table import PAGE, Row, page, row_of, rows

__all__ = ["PAGE", "Row", "hold", "page", "rows"]


def hold(launcher: str, event: str, test: str, **seen: str) -> Row:
    """Return the row of an event under a launcher, which names this test, and has what it has seen."""
    row = row_of(launcher, event)
    assert row.function == test
    assert {name: getattr(row, name) for name in seen} == seen
    return row
