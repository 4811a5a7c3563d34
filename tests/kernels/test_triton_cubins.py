"""Each Triton kernel compiles for GPUs of capability 8.0, 9.0 and 10.0, and spills no registers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib import import_module
from itertools import product
from pathlib import Path
from pkgutil import iter_modules
from typing import Any

import pytest

pytest.importorskip("triton", reason="Triton has no package for this platform")

from cubins import CAPABILITIES, resources
from planted_kernels import case, scaled_by_interpreter

import meshwright.kernels.triton as kernels
from covering import marked
from meshwright.kernels.triton.specialisation import Specialisation


def specialisations() -> Iterator[tuple[str, Specialisation]]:
    """Those of all files of the package, by names."""
    for file in iter_modules(kernels.__path__):
        if file.name == "specialisation":
            continue
        for at, each in enumerate(import_module(f"{kernels.__name__}.{file.name}").SPECIALISATIONS):
            yield f"{file.name}-{each.kernel.__name__.strip('_')}-{at}", each


SPECIALISATIONS = dict(specialisations())
CASES = [
    {"name": name, "capability": capability} for name, capability in product(SPECIALISATIONS, CAPABILITIES)
]
NUMBER = len(CAPABILITIES)
QUICK = [case for place, case in enumerate(CASES) if place % NUMBER == place // NUMBER % NUMBER]
"""Each specialisation for one capability, and the next one for another."""


@pytest.mark.parametrize("case", marked(CASES, QUICK))
def test_a_kernel_compiles_without_spills(case: dict[str, Any], tmp_path: Path) -> None:
    found = resources(SPECIALISATIONS[case["name"]], case["capability"], tmp_path)
    assert found.spilled == 0, found


def test_a_kernel_that_spills_is_found(tmp_path: Path) -> None:
    small = resources(case(rows=2, block=256), 90, tmp_path)
    large = resources(case(rows=8, block=2048), 90, tmp_path)
    assert small.spilled == 0 and small.registers > 0
    assert large.spilled > 1000 and large.registers > small.registers


def test_kernels_are_interpreted(interpreted: Callable[..., Any]) -> None:
    assert interpreted(scaled_by_interpreter, 4, 100) < 1e-7
