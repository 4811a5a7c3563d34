"""Products in bf16 and fp16 on processors that have no instructions for them.

torch then multiplies number by number, which takes tens of times as long as in fp32, or with AVX-512 alone
by oneDNN, which widens numbers within its products and takes four times as long. Here such a product is
computed in fp32 and rounded once, as the instructions do, in the time of fp32 and of the casts.
"""

from __future__ import annotations

import platform
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from meshwright.model.attention_cpu import BODIES


def _has_bf16_products() -> bool:
    """True if this processor has instructions to multiply bf16.

    oneDNN's own answer is yes on every x86 with AVX-512, where it widens numbers within a product.
    """
    if platform.machine() in ("x86_64", "AMD64"):
        return torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    return torch.ops.mkldnn._is_mkldnn_bf16_supported()


SUPPORTED: dict[torch.dtype, Callable[[], bool]] = {
    torch.bfloat16: _has_bf16_products,
    torch.float16: lambda: torch.ops.mkldnn._is_mkldnn_fp16_supported(),
}
"""Functions that tell if oneDNN has fast products in a format of 16 bits here; they need a build with it."""


@contextmanager
def products_in_fp32(device: torch.device, dtype: torch.dtype) -> Iterator[bool]:
    """Compute products in `dtype` in fp32 where this processor lacks them; yields whether it does so.

    It replaces torch's operators on CPUs below autograd, so what is kept for a backward stays in `dtype`.
    Attention is widened as a whole: its scores and probabilities are in fp32, too.
    """
    known = device.type == "cpu" and dtype in SUPPORTED and torch.backends.mkldnn.is_available()
    if not known or SUPPORTED[dtype]():
        yield False
        return
    library, attention = (torch.library.Library(name, "IMPL") for name in ("aten", "meshwright"))
    for product, sum_of_products in (("mm", "addmm"), ("bmm", "baddbmm")):
        exact = torch.library.get_kernel(f"aten::{product}", "CPU").call_boxed
        sums = (sum_of_products, f"{sum_of_products}.out", f"{sum_of_products}_")
        for name in (product, f"{product}.out", *sums):
            kernel = torch.library.get_kernel(f"aten::{name}", "CPU").call_boxed
            operator = _widened(kernel, exact, dtype, in_place=name.endswith("_"))
            with warnings.catch_warnings(action="ignore", category=UserWarning):  # of replacing an operator
                library.impl(name, operator, "CPU", with_keyset=True)
    for operator, body in BODIES.items():
        attention.impl(operator, _in_fp32(body, dtype), "CPU")
    try:
        yield True
    finally:
        library._destroy()
        attention._destroy()


def _widened(
    kernel: Callable[..., Tensor], product: Callable[..., Tensor], dtype: torch.dtype, in_place: bool
) -> Callable[..., Tensor]:
    """Return an operator that multiplies operands in `dtype` as fp32 by `product`, and others by `kernel`."""

    def operator(keys: Any, *operands: Tensor, out: Tensor | None = None, **scales: float) -> Tensor:
        *summand, left, right = operands
        if right.dtype != dtype:
            return kernel(keys, *operands, **scales, **({} if out is None else {"out": out}))
        result = product(keys, left.float(), right.float())
        if summand:
            result.mul_(scales.get("alpha", 1))
            if beta := scales.get("beta", 1):  # 0 takes no NaN of the summand's
                result.add_(summand[0], alpha=beta)
        into = summand[0] if in_place else out
        if into is None:
            return result.to(dtype)
        return into.resize_(result.shape).copy_(result)

    return operator


def _in_fp32(body: Callable[..., Any], dtype: torch.dtype) -> Callable[..., Any]:
    """Return `body` with tensors in `dtype` widened to fp32 before it, and its results rounded to `dtype`."""

    def operator(*tensors: Tensor | None) -> Any:
        if all(each is None or each.dtype != dtype for each in tensors):
            return body(*tensors)
        found = body(*(each if each is None else each.float() for each in tensors))
        return tuple(each.to(dtype) for each in found) if isinstance(found, tuple) else found.to(dtype)

    return operator
