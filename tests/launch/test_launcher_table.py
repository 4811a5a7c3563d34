"""The table of launchers on the page, and that every row has a test that sees it."""

from __future__ import annotations

import ast
from collections import Counter
from pathlib import Path

import pytest

from launcher_rows import PAGE, Row, page, rows

HERE = Path(__file__).parent


def test_the_table_of_launchers_is_on_the_page() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert page(text) == text, "run python tools/launcher_table.py"
    assert text.count("| `srun` |") >= 2


def test_no_end_of_a_launcher_has_two_rows() -> None:
    assert max(Counter((row.launcher, row.event) for row in rows()).values()) == 1


@pytest.mark.parametrize("row", rows(), ids=lambda row: f"{row.launcher}-{row.event}".replace("`", ""))
def test_the_test_of_a_row_holds_it(row: Row) -> None:
    """It calls `hold` with its own name."""
    file = HERE / row.test.partition("::")[0]
    tests = {
        node.name: node for node in ast.parse(file.read_text()).body if isinstance(node, ast.FunctionDef)
    }
    calls = [node for node in ast.walk(tests[row.function]) if isinstance(node, ast.Call)]
    held = [call for call in calls if isinstance(call.func, ast.Name) and call.func.id == "hold"]
    assert any(ast.unparse(call.args[2]).strip("'") == row.function for call in held)
