"""Attention on x86 processors by a kernel in C++ (`attention_cpu.cpp`)."""

from __future__ import annotations

import ctypes
import warnings
from functools import cache

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from meshwright.cpp_library import SWITCH
from meshwright.kernels.cpu_kernels import library, pointers
from meshwright.kernels.processor import SUPPORTED


class _Sizes(ctypes.Structure):
    """`Sizes` of the source."""

    _fields_ = [
        (name, ctypes.c_int64)
        for name in (
            "batch", "queries", "keys", "heads", "key_heads", "dim", "value_dim", "bias_batch", "threads"
        )
    ] + [("softcap", ctypes.c_float)]  # fmt: skip


def takes(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, *_others: Tensor) -> bool:
    """True if the kernel computes attention of these q (B, T, H, d), k (B, S, K, d), v (B, S, K, v) and bias
    (1 or B, 1, T, S).

    Its threads share out key heads of sequences, so there must be as many of these as threads.
    """
    given = [q, k, v] if bias is None else [q, k, v, bias]
    if any(isinstance(x, FakeTensor) or x.device.type != "cpu" or x.dtype != q.dtype for x in given):
        return False
    (batch, queries, heads, dim), (_, keys, key_heads, value_dim) = q.shape, v.shape
    masks = [(1, 1, queries, keys), (batch, 1, queries, keys)]
    fits = k.shape == (batch, keys, key_heads, dim) and v.shape[0] == batch and heads % key_heads == 0
    fits &= queries <= keys and (bias is None or tuple(bias.shape) in masks)
    enough = batch * key_heads >= torch.get_num_threads() and not (dim % 2 or value_dim % 2)
    return fits and enough and _name(q.dtype) is not None and _works(q.dtype)


def forward(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, softcap: float | None = None
) -> tuple[Tensor, Tensor]:
    """Attention (B, T, H, v) and its log-sum-exp (B, H, T) in fp32, as `attention_cpu.attend_in_blocks`."""
    out = q.new_empty(*q.shape[:3], v.shape[3])
    lse = q.new_empty(q.shape[0], q.shape[2], q.shape[1], dtype=torch.float32)
    _call("forward", _sizes(q, v, bias, softcap), q, k, v, bias, out, lse)
    return out, lse


def backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    softcap: float | None,
    out: Tensor,
    lse: Tensor,
    grad: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of q, k and v from that of `out`; `out` and `lse` may be those over more keys."""
    found = q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)
    _call("backward", _sizes(q, v, bias, softcap), grad, q, k, v, bias, out, lse, *found)
    return found


def _sizes(q: Tensor, v: Tensor, bias: Tensor | None, softcap: float | None) -> _Sizes:
    (batch, queries, heads, dim), (_, keys, key_heads, value_dim) = q.shape, v.shape
    bias_batch = 1 if bias is None else bias.shape[0]
    shapes = batch, queries, keys, heads, key_heads, dim, value_dim, bias_batch
    return _Sizes(*shapes, torch.get_num_threads(), softcap or 0.0)


def _call(direction: str, sizes: _Sizes, first: Tensor, *others: Tensor | None) -> None:
    """Run the kernel on its inputs, which are made contiguous, and its outputs, which are."""
    name, kernels = f"{_name(first.dtype)}_{direction}", library()
    assert kernels is not None
    given = pointers(*(each if each is None else each.contiguous() for each in (first, *others)))
    if not getattr(kernels, name)(ctypes.byref(sizes), *given):
        raise RuntimeError(
            f"attention on the CPU ({name}) of {sizes.queries} queries on {sizes.keys} keys had no memory "
            f"for its buffers or no kernel of oneDNN's; {SWITCH}=1 takes torch's operators in its place"
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
def _works(dtype: torch.dtype) -> bool:
    """True if oneDNN makes the kernel's products on this processor."""
    if library() is None:
        return False
    q, k = torch.zeros(1, 70, 1, 16, dtype=dtype), torch.zeros(1, 200, 1, 16, dtype=dtype)
    try:
        backward(q, k, k, None, None, *forward(q, k, k, None), q)
    except RuntimeError as error:
        warnings.warn(f"{error}, as is done now", stacklevel=2)
        return False
    return True
