"""Kernels in C++ for x86 processors, compiled for the processor at hand on first use.

They need a C++ compiler, Linux and AVX2. Without them all is computed by torch's operators.
"""

from __future__ import annotations

import ctypes
import sys
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from meshwright.cpp_library import CppLibrary
from meshwright.host import cpu_info

_TORCH = Path(torch.__file__).parent
KERNELS = CppLibrary(
    "kernels",
    tuple(Path(__file__).with_name(name) for name in ("attention_cpu.cpp", "elementwise_cpu.cpp")),
    options=(
        *("-march=native", "-mprefer-vector-width=512", "-fno-math-errno", "-fno-trapping-math", "-fopenmp"),
        f"-I{_TORCH / 'include'}",
    ),
    linked=(f"-L{_TORCH / 'lib'}", f"-Wl,-rpath,{_TORCH / 'lib'}", "-ltorch_cpu", "-lc10"),
    headers=tuple(Path(__file__).with_name(name) for name in ("cpu_kernels.h", "tile_layouts.h")),
    built_for=torch.__version__,
)


@cache
def library() -> ctypes.CDLL | None:
    """The compiled kernels; None where they cannot be had, or are not wanted."""
    x86 = sys.platform == "linux" and {"avx2", "fma"} <= set(cpu_info("flags").split())
    without = "this CPU trains about a sixth slower than it could, since its kernels were not compiled"
    return KERNELS.load(without) if x86 else None


def pointers(*tensors: Tensor | None) -> list[Any]:
    """Arguments of a kernel for tensors, which stay alive as long as these."""
    found = [ctypes.c_void_p(None if each is None else each.data_ptr()) for each in tensors]
    for pointer, tensor in zip(found, tensors, strict=True):
        pointer.tensor = tensor  # type: ignore[attr-defined]
    return found
