"""Each Triton kernel compiles for GPUs of capability 8.0, 9.0 and 10.0, and spills no registers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules
from typing import Any

import pytest

pytest.importorskip("triton", reason="Triton has no package for this platform")

from cubins import CAPABILITIES, resources
from planted_kernels import case, scaled_by_interpreter

import meshwright.kernels.triton as kernels
from meshwright.kernels.triton.specialisation import Specialisation


def specialisations() -> Iterator[tuple[str, Specialisation]]:
    """Those of all files of the package, by names."""
    for file in iter_modules(kernels.__path__):
        if file.name == "specialisation":
            continue
        for at, each in enumerate(import_module(f"{kernels.__name__}.{file.name}").SPECIALISATIONS):
            yield f"{file.name}-{each.kernel.__name__.strip('_')}-{at}", each


CASES = dict(specialisations())


@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize("name", CASES)
def test_a_kernel_compiles_without_spills(name: str, capability: int, tmp_path: Path) -> None:
    found = resources(CASES[name], capability, tmp_path)
    assert found.spilled == 0, found


def test_a_kernel_that_spills_is_found(tmp_path: Path) -> None:
    small = resources(case(rows=2, block=256), 90, tmp_path)
    large = resources(case(rows=8, block=4096), 90, tmp_path)
    assert small.spilled == 0 and small.registers > 0
    assert large.spilled > 1000 and large.registers > small.registers


def test_kernels_are_interpreted(interpreted: Callable[..., Any]) -> None:
    assert interpreted(scaled_by_interpreter, 4, 100) < 1e-7
