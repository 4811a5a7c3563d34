"""Fixtures of the tests on dry runs."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from meshwright.fake_cuda.process import FakeCudaProcess


@pytest.fixture(scope="module")
def process() -> Iterator[FakeCudaProcess]:
    """A process with a faked GPU, for all tests of a file."""
    with FakeCudaProcess() as started:
        yield started
