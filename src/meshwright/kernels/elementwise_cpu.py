"""RMSNorm, SwiGLU, rotary positions and cross-entropy on x86 processors by kernels in C++
(`elementwise_cpu.cpp`).

Each function takes tensors for which `takes` is true, of the shapes that it names: kernels see no shapes.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import Tensor

from meshwright.kernels.cpu_kernels import library, pointers
from meshwright.spec.tiling import tiling

_NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16"}


def takes(*tensors: Tensor) -> bool:
    """True if kernels compute with these tensors: real ones on the CPU, all in fp32 or all in bf16, while
    nothing is traced for a compiler."""
    first = tensors[0]
    return (
        first.dtype in _NAMES
        and not torch.compiler.is_compiling()
        and all(
            type(x) in (Tensor, torch.nn.Parameter)
            and x.is_cpu
            and x.dtype == first.dtype
            and x.is_contiguous()
            for x in tensors
        )
        and library() is not None
    )


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """weight * x * scale of rows x (..., D), and scale (..., 1) = 1 / sqrt(mean(x^2) + eps) in fp32."""
    y, scale = torch.empty_like(x), x.new_empty(*x.shape[:-1], 1, dtype=torch.float32)
    _call(x, "rms_norm", scale.numel(), x.shape[-1], ctypes.c_float(eps), *pointers(x, weight, y, scale))
    return y, scale


def rms_norm_backward(grad: Tensor, x: Tensor, weight: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """The gradients of x, and of the weight (D,) in fp32."""
    rows, width = scale.numel(), x.shape[-1]
    grad_x, grad_weight = torch.empty_like(x), x.new_empty(width, dtype=torch.float32)
    part_rows = tiling().norm_weight_rows
    sums = x.new_empty(-(-rows // part_rows), width, dtype=torch.float32)
    given = pointers(grad, x, weight, scale, grad_x, grad_weight, sums)
    _call(x, "rms_norm_backward", rows, width, part_rows, *given)
    return grad_x, grad_weight


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up."""
    y = torch.empty_like(gate)
    _call(gate, "swiglu", gate.numel(), *pointers(gate, up, y))
    return y


def swiglu_backward(grad: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    """The gradients of gate and up."""
    grad_gate, grad_up = torch.empty_like(gate), torch.empty_like(up)
    _call(gate, "swiglu_backward", gate.numel(), *pointers(grad, gate, up, grad_gate, grad_up))
    return grad_gate, grad_up


def weighted_swiglu(gate: Tensor, up: Tensor, weight: Tensor) -> Tensor:
    """silu(gate) * up * weight of rows (R, F), with a weight (R,) in fp32 each."""
    y = torch.empty_like(gate)
    _call(gate, "weighted_swiglu", *gate.shape, *pointers(gate, up, weight, y))
    return y


def weighted_swiglu_backward_(
    grad: Tensor, gate: Tensor, up: Tensor, weight: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of gate, up and weight from that of `weighted_swiglu`, whose result replaces `grad`."""
    grad_gate, grad_up, grad_weight = torch.empty_like(gate), torch.empty_like(up), torch.empty_like(weight)
    given = pointers(grad, gate, up, weight, grad_gate, grad_up, grad_weight)
    _call(gate, "weighted_swiglu_backward", *gate.shape, *given)
    return grad_gate, grad_up, grad_weight


def tables_fit(x: Tensor, cosine: Tensor, sine: Tensor) -> bool:
    """True if x is (B, T, H, d) and the tables of `rope.Rope` are (T, 1, ...) or (1 or B, T, 1, ...)."""
    *rows, _, turned = cosine.shape
    return (
        x.ndim == 4
        and tuple(rows) in {(x.shape[1],), (1, x.shape[1]), tuple(x.shape[:2])}
        and cosine.shape[:-1] == sine.shape[:-1]
        and turned <= x.shape[3]
        and sine.shape[-1] in (turned // 2, turned)
    )


def rotate(x: Tensor, cosine: Tensor, sine: Tensor, sign: int) -> Tensor:
    """x (B, T, H, d) with the last channels of each head rotated by tables of `rope.Rope`, as many as the
    cosines have, in the direction of `sign`."""
    y, turned = torch.empty_like(x), cosine.shape[-1]
    sizes = *x.shape, turned, sine.shape[-1], cosine.numel() // (x.shape[1] * turned)
    _call(x, "rotate", *sizes, ctypes.c_float(sign), *pointers(x, cosine, sine, y))
    return y


def cross_entropy_(logits: Tensor, targets: Tensor, ignored: int, with_grad: bool, factor: float) -> Tensor:
    """The losses (N,) in fp32 of logits (N, V) by targets (N,); 0 where a target is `ignored`.

    If `with_grad`, the logits become `factor` times the gradient of their sum. Raises IndexError.
    """
    (rows, width), places = logits.shape, targets.to(torch.int64).contiguous()
    losses = logits.new_empty(rows, dtype=torch.float32)
    sizes = rows, width, ignored, int(with_grad)
    if not _call(logits, "cross_entropy", *sizes, ctypes.c_float(factor), *pointers(logits, places, losses)):
        wrong = places[(places != ignored) & ((places < 0) | (places >= width))]
        raise IndexError(f"target {int(wrong[0])} is not one of {width} logits, nor {ignored}")
    return losses


def _call(like: Tensor, name: str, *arguments: Any) -> int:
    kernels = library()
    assert kernels is not None
    given = [ctypes.c_int64(x) if isinstance(x, int) else x for x in (torch.get_num_threads(), *arguments)]
    return getattr(kernels, f"{_NAMES[like.dtype]}_{name}")(*given)
