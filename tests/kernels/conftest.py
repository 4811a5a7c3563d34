"""Fixtures of the tests of kernels."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from interpreter import interpreter


@pytest.fixture(scope="session")
def interpreted() -> Iterator[Callable[..., Any]]:
    """`interpreted(function, *args)`: its result in a process where Triton kernels run on tensors of the CPU.

    The function is one of a module, which is imported there; an assertion that fails there is raised here.
    """
    pytest.importorskip("triton", reason="Triton has no package for this platform")
    with interpreter() as process:
        yield lambda function, *args: process.submit(function, *args).result()
