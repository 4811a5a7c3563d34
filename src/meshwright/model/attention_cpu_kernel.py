"""Attention on x86 processors by a kernel in C++ (`attention_cpu.cpp`)."""

from __future__ import annotations

import ctypes
import warnings
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from meshwright.model.cpu_kernels import SWITCH, library, pointers
from meshwright.model.processor import SUPPORTED


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
    enough = q.shape[0] * k.shape[2] >= torch.get_num_threads()
    return enough and _name(q.dtype) is not None and _works(q.dtype)


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
    name, kernels = f"{_name(q.dtype)}_{direction}", library()
    assert kernels is not None
    if not getattr(kernels, name)(ctypes.byref(sizes), *pointers(*given, *outputs)):
        raise RuntimeError(
            f"attention on the CPU ({name}) of {tuple(q.shape)} on {keys} keys had no memory for its buffers "
            f"or no kernel of oneDNN's; {SWITCH}=1 takes torch's operators in its place"
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
        backward(q, k, k, None, *forward(q, k, k, None), q)
    except RuntimeError as error:
        warnings.warn(f"{error}, as is done now", stacklevel=2)
        return False
    return True
