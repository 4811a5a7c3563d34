"""Attention on x86 processors in C++ (`attention_cpu.cpp`), compiled for the processor at hand on first use.

It needs a C++ compiler, Linux and AVX2. The result lies in `~/.cache/meshwright/kernels`, so that later
processes, on this host or on one like it, load it at once. Without it `attention_cpu` takes torch's
operators.
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
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from meshwright import atomic
from meshwright.host import cpu_info
from meshwright.model.processor import SUPPORTED

SWITCH = "MESHWRIGHT_CPP_DISABLE"
"""Set to 1 to use torch's operators."""
SOURCE = Path(__file__).with_name("attention_cpu.cpp")
_FLAGS = (
    "-std=c++20 -O3 -march=native -mprefer-vector-width=512 -fno-math-errno -fno-trapping-math -fopenmp "
    "-shared -fPIC"
)


class _Sizes(ctypes.Structure):
    """`Sizes` of the source."""

    _fields_ = [
        (name, ctypes.c_int64)
        for name in (
            "batch", "queries", "keys", "heads", "key_heads", "dim", "value_dim", "bias_batch", "threads"
        )
    ]  # fmt: skip


def takes(q: Tensor, k: Tensor, v: Tensor, *_others: Any) -> bool:
    """True if the kernel computes attention of these q (B, T, H, d), k (B, S, K, d) and v (B, S, K, v).

    Its threads share out key heads of sequences, so there must be as many of these as threads.
    """
    if isinstance(q, FakeTensor) or q.device.type != "cpu" or q.shape[3] % 2 or v.shape[3] % 2:
        return False
    name = _name(q.dtype)
    return name is not None and q.shape[0] * k.shape[2] >= torch.get_num_threads() and _works(name)


def forward(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """Attention (B, T, H, v) and its log-sum-exp (B, H, T) in fp32, as `attention_cpu.attend_in_blocks`."""
    out = q.new_empty(*q.shape[:3], v.shape[3])
    lse = q.new_empty(q.shape[0], q.shape[2], q.shape[1], dtype=torch.float32)
    _call("forward", q, k, v, bias, [q, k, v, bias], [out, lse])
    return out, lse


def backward(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, out: Tensor, lse: Tensor, grad: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of q, k and v from that of `out`."""
    found = q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)
    _call("backward", q, k, v, bias, [grad, q, k, v, bias, out, lse], found)
    return found


def _call(
    direction: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    inputs: Sequence[Tensor | None],
    outputs: Sequence[Tensor],
) -> None:
    (batch, queries, heads, dim), (_, keys, key_heads, value_dim) = q.shape, v.shape
    bias_batch = 1 if bias is None else bias.shape[0]
    sizes = _Sizes(
        batch, queries, keys, heads, key_heads, dim, value_dim, bias_batch, torch.get_num_threads()
    )
    given = [None if each is None else each.contiguous() for each in inputs]
    pointers = [ctypes.c_void_p(None if each is None else each.data_ptr()) for each in [*given, *outputs]]
    name = f"{_name(q.dtype)}_{direction}"
    library = _library()
    assert library is not None
    if not getattr(library, name)(ctypes.byref(sizes), *pointers):
        raise RuntimeError(
            f"attention on the CPU ({name}) of {tuple(q.shape)} on {keys} keys had no memory for its buffers "
            f"or no kernel of oneDNN's; set {SWITCH}=1 to use torch's operators"
        )


def _name(dtype: torch.dtype) -> str | None:
    """The prefix of the source's functions for tensors in `dtype`; None where torch's operators are taken."""
    if dtype == torch.float32:
        return "fp32"
    if dtype not in SUPPORTED or not torch.backends.mkldnn.is_available():
        return None
    if SUPPORTED[dtype]():
        return "bf16" if dtype == torch.bfloat16 else None
    return "bf16_by_fp32" if dtype == torch.bfloat16 else "fp16_by_fp32"


@cache
def _works(name: str) -> bool:
    """True if oneDNN makes such products on this processor."""
    if (library := _library()) is None:
        return False
    one = torch.zeros(64, dtype=torch.float32)
    sizes = _Sizes(1, 1, 1, 1, 1, 2, 2, 1, 1)
    pointers = [ctypes.c_void_p(one.data_ptr())] * 3
    return getattr(library, f"{name}_forward")(ctypes.byref(sizes), *pointers, None, *pointers[:2])


@cache
def _library() -> ctypes.CDLL | None:
    """The compiled source; None where it cannot be had, or is not wanted."""
    x86 = sys.platform == "linux" and {"avx2", "fma"} <= set(cpu_info("flags").split())
    if not x86 or os.environ.get(SWITCH) == "1":
        return None
    try:
        return ctypes.CDLL(str(build(Path("~/.cache/meshwright/kernels").expanduser())))
    except (OSError, subprocess.SubprocessError) as error:
        output = getattr(error, "stderr", None) or str(error)
        reason = next((line for line in output.splitlines() if "error" in line), output.strip())
        warnings.warn(
            f"attention on the CPU takes about twice as long as it could, since {SOURCE.name} was not "
            f"compiled: {reason}; install g++, name another compiler in CXX, or set {SWITCH}=1 to be told no "
            "more",
            stacklevel=2,
        )
        return None


def build(folder: Path, *options: str) -> Path:
    """Compile the source with further `options` into `folder`, unless it is there, and return the file.

    Of several processes one compiles, and the others wait for it. Raises `OSError` and
    `subprocess.SubprocessError`.
    """
    command = [*shlex.split(os.environ.get("CXX", "g++")), *_FLAGS.split(), *options]
    processor = cpu_info("model name"), cpu_info("flags")
    key = repr((command, torch.__version__, torch.__file__, processor)).encode() + SOURCE.read_bytes()
    target = folder / f"attention_cpu-{hashlib.sha256(key).hexdigest()[:16]}.so"
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
                    [*command, f"-I{torch_at / 'include'}", str(SOURCE), "-o", str(made), *libraries],
                    check=True, capture_output=True, text=True, timeout=600,
                )  # fmt: skip
    return target
