"""Fixtures of tests of supervised runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from supervised import spec_of, train


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("supervised") / "text"
    folder.mkdir()
    for number in range(30):
        words = " ".join(f"word{(number * 7 + i * i) % 97}" for i in range(120))
        (folder / f"{number:02d}.txt").write_text(f"document {number}: {words}\n", encoding="utf-8")
    return folder


@pytest.fixture(scope="session")
def whole(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The result of the run that no fault befalls."""
    return train(spec_of(corpus), tmp_path_factory.mktemp("whole") / "run")[0]
