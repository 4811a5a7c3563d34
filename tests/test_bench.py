"""Every benchmark can be imported: renames in the package reach it."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

BENCH = Path(__file__).parents[1] / "bench"
OTHERS = {"megatron_side"}
"""Programs of another environment, that of Megatron-Core."""


@pytest.mark.parametrize("name", sorted({path.stem for path in BENCH.glob("*.py")} - OTHERS))
def test_a_benchmark_is_imported(name: str) -> None:
    importlib.import_module(name)
