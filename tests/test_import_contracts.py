"""Who may import whom: the contracts find an import that is planted, and tests import helpers alone."""

from __future__ import annotations

import ast
import os
import shutil
import subprocess
import sys
import sysconfig
from importlib.metadata import packages_distributions
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def test_no_file_of_the_reference_may_import_what_it_checks(tmp_path: Path) -> None:
    shutil.copytree(
        ROOT / "src", tmp_path / "src", ignore=shutil.ignore_patterns("__pycache__", "*.egg-info")
    )
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    files = sorted((tmp_path / "src" / "meshwright" / "verify" / "reference").glob("*.py"))
    for file in files:
        with file.open("a") as text:
            text.write("\nimport meshwright.islands.outer\n")
    lint = Path(sysconfig.get_path("scripts")) / "lint-imports"
    found = subprocess.run(
        [lint, "--no-cache"],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(tmp_path / "src")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert found.returncode == 1, found.stdout
    names = {"" if file.stem == "__init__" else f".{file.stem}" for file in files}
    unseen = [
        name for name in names
        if f"meshwright.verify.reference{name} -> meshwright.islands.outer" not in found.stdout
    ]  # fmt: skip
    assert not unseen


def test_tests_import_helpers_that_they_find_and_no_other_test() -> None:
    """A helper stands in `tests/` or in the folder of those that import it, so any file runs alone."""
    files = {file.stem: file for file in (ROOT / "tests").rglob("*.py") if file.stem != "conftest"}
    for file in (ROOT / "tests").rglob("*.py"):
        for name in imported(file) & files.keys():
            assert not name.startswith("test_"), f"{file} imports {name}"
            assert files[name].parent in (ROOT / "tests", file.parent), f"{file} imports {name}"


def test_names_of_test_files_are_their_own() -> None:
    """pytest imports files of tests by their base names."""
    stems = [file.stem for file in (ROOT / "tests").rglob("*.py") if file.stem != "conftest"]
    assert len(stems) == len(set(stems))
    assert not set(stems) & (sys.stdlib_module_names | packages_distributions().keys())


def imported(file: Path) -> set[str]:
    """The modules that a file imports anywhere, by their first names."""
    found = ast.walk(ast.parse(file.read_text()))
    names = [
        [alias.name for alias in node.names] if isinstance(node, ast.Import) else [node.module or ""]
        for node in found
        if isinstance(node, ast.Import | ast.ImportFrom)
    ]
    return {name.partition(".")[0] for each in names for name in each}
