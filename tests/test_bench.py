"""Every benchmark can be imported: renames in the package reach it."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

BENCH = Path(__file__).parents[1] / "bench"


@pytest.mark.parametrize("name", sorted({path.stem for path in BENCH.glob("*.py")}))
def test_a_benchmark_is_imported(name: str) -> None:
    importlib.import_module(name)
