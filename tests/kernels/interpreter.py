"""A process in which Triton interprets its kernels, on tensors of the CPU."""

from __future__ import annotations

import os
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context


def interpreter() -> ProcessPoolExecutor:
    """The process, which ends with the context."""
    return ProcessPoolExecutor(1, get_context("spawn"), _interpret)


def _interpret() -> None:
    os.environ["TRITON_INTERPRET"] = "1"  # read when Triton is imported, and when kernels are decorated
