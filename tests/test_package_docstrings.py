"""Each package's docstring is a map of it: it names every module and package in its folder, and no others."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent / "src" / "meshwright"
PACKAGES = sorted(path.parent for path in ROOT.rglob("__init__.py"))


def named(package: Path) -> set[str]:
    """The names in backticks that a package's docstring gives, without `.py`."""
    doc = ast.get_docstring(ast.parse((package / "__init__.py").read_text(encoding="utf-8"))) or ""
    return set(re.findall(r"`([a-z][a-z0-9_]*)(?:\.py)?`", doc))


def modules(package: Path) -> set[str]:
    """The modules and folders of a package."""
    found = {path.stem for path in package.iterdir() if path.suffix == ".py" or path.is_dir()}
    return {name for name in found if not name.startswith("__")}


def test_there_are_packages() -> None:
    assert ROOT in PACKAGES and ROOT / "planner" / "cost" in PACKAGES


@pytest.mark.parametrize("package", PACKAGES, ids=lambda path: path.relative_to(ROOT.parent).as_posix())
def test_a_packages_docstring_names_its_modules(package: Path) -> None:
    folders = {path.name for path in package.iterdir() if path.is_dir()}
    files = {name for name in folders if not (package / name / "__init__.py").exists()}  # tables, templates
    assert named(package) - files == modules(package) - files
