"""Kernels in C++ for x86 processors, compiled for the processor at hand on first use.

They need a C++ compiler, Linux and AVX2. The result lies in `~/.cache/meshwright/kernels`, so that later
processes, on this host or on one like it, load it at once. Without it all is computed by torch's operators.
"""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import os
import shlex
import subprocess
import sys
import warnings
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from meshwright import atomic
from meshwright.host import cpu_info

SWITCH = "MESHWRIGHT_CPP_DISABLE"
"""Set to 1 to use torch's operators."""
SOURCES = tuple(Path(__file__).with_name(name) for name in ("attention_cpu.cpp", "elementwise_cpu.cpp"))
_HEADER = Path(__file__).with_name("cpu_kernels.h")
_FLAGS = (
    "-std=c++20 -O3 -march=native -mprefer-vector-width=512 -fno-math-errno -fno-trapping-math -fopenmp "
    "-shared -fPIC"
)


def cache_folder() -> Path:
    """The folder of compiled kernels."""
    return Path("~/.cache/meshwright/kernels").expanduser()


@cache
def library() -> ctypes.CDLL | None:
    """The compiled sources; None where they cannot be had, or are not wanted."""
    x86 = sys.platform == "linux" and {"avx2", "fma"} <= set(cpu_info("flags").split())
    if not x86 or os.environ.get(SWITCH) == "1":
        return None
    try:
        return ctypes.CDLL(str(build(cache_folder())))
    except (OSError, subprocess.SubprocessError) as error:
        output = error.stderr if isinstance(error, subprocess.CalledProcessError) else str(error)
        reason = next((line for line in output.splitlines() if "error" in line), output.strip())
        warnings.warn(
            "this CPU trains about a sixth slower than it could, since its kernels were not compiled: "
            f"{reason}; install g++, name another compiler in CXX, or set {SWITCH}=1 to be told no more",
            stacklevel=2,
        )
        return None


def pointers(*tensors: Tensor | None) -> list[Any]:
    """Arguments of a kernel for tensors, which stay alive as long as these."""
    found = [ctypes.c_void_p(None if each is None else each.data_ptr()) for each in tensors]
    for pointer, tensor in zip(found, tensors, strict=True):
        pointer.tensor = tensor  # type: ignore[attr-defined]
    return found


def build(folder: Path, *options: str) -> Path:
    """Compile the sources with further `options` into `folder`, unless that was done, and return the file.

    Of several processes one compiles, and the others wait for it. Raises `OSError` and
    `subprocess.SubprocessError`.
    """
    command = [*shlex.split(os.environ.get("CXX", "g++")), *_FLAGS.split(), *options]
    known = command, torch.__version__, torch.__file__, cpu_info("model name"), cpu_info("flags")
    content = b"".join(path.read_bytes() for path in (_HEADER, *SOURCES))
    target = folder / f"kernels-{hashlib.sha256(repr(known).encode() + content).hexdigest()[:16]}.so"
    if target.exists():
        return target
    folder.mkdir(parents=True, exist_ok=True)
    torch_at = Path(torch.__file__).parent
    libraries = [f"-L{torch_at / 'lib'}", f"-Wl,-rpath,{torch_at / 'lib'}", "-ltorch_cpu", "-lc10"]
    with (folder / f"{target.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not target.exists():
            with atomic.file(target) as made:
                subprocess.run(
                    [*command, f"-I{torch_at / 'include'}", *map(str, SOURCES), "-o", str(made), *libraries],
                    check=True, capture_output=True, text=True, timeout=600,
                )  # fmt: skip
    return target
