"""The contracts of imports see what they are for: an import that is planted breaks them."""

from __future__ import annotations

import os
import shutil
import subprocess
import sysconfig
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
