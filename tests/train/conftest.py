"""Fixtures of tests of whole runs."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("corpus")
    for number in range(30):
        words = " ".join(f"word{(number * 7 + i * i) % 97}" for i in range(120))
        (folder / f"{number:02d}.txt").write_text(f"document {number}: {words}\n", encoding="utf-8")
    return folder
