"""A process in which Triton interprets its kernels, on tensors of the CPU."""

from __future__ import annotations

import os
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any


def interpreter() -> ProcessPoolExecutor:
    """The process, which ends with the context."""
    return ProcessPoolExecutor(1, get_context("spawn"), _interpret)


def _interpret() -> None:
    os.environ["TRITON_INTERPRET"] = "1"  # read when Triton is imported, and when kernels are decorated
    _round_to_bf16()


def _round_to_bf16() -> None:
    """Let the interpreter round fp32 to the nearest number in bf16, as GPUs do; that of Triton 3.7 cuts bits
    off."""
    import torch
    import triton.language as tl
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    others = InterpreterBuilder.cast_impl

    def cast(self: Any, value: Any, to: Any) -> Any:
        if (value.dtype.scalar, to.scalar) != (tl.float32, tl.bfloat16):
            return others(self, value, to)
        rounded = torch.from_numpy(value.data.astype("float32")).bfloat16()
        return TensorHandle(rounded.view(torch.uint16).numpy(), to.scalar)

    InterpreterBuilder.cast_impl = cast
