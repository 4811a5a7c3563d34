"""Products in bf16 and fp16 on processors that have no instructions for them.

torch then multiplies number by number, which takes tens of times as long as in fp32, or with AVX-512 alone
by oneDNN, which widens numbers within its products and takes four times as long. Here such a product is
computed in fp32 and rounded once, as the instructions do, in the time of fp32 and of the casts.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from meshwright.kernels import attention_cpu_kernel
from meshwright.kernels.attention_cpu import BODIES
from meshwright.kernels.processor import SUPPORTED


@contextmanager
def products_in_fp32(device: torch.device, dtype: torch.dtype) -> Iterator[bool]:
    """Compute products in `dtype` in fp32 where this processor lacks them; yields whether it does so.

    It replaces torch's operators on CPUs below autograd, so what is kept for a backward stays in `dtype`.
    Attention is widened as a whole: its scores and probabilities are in fp32, too. Its kernel in C++ knows
    what the processor lacks, and widens for itself.
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
    """Return `body`, of attention, with tensors in `dtype` widened to fp32 before it, and its results rounded
    to `dtype`, but for the log-sum-exp (B, H, T)."""

    def operator(*tensors: Any) -> Any:
        if tensors[0].dtype != dtype or attention_cpu_kernel.takes(*tensors):
            return body(*tensors)
        found = body(*(each if each is None else each.float() for each in tensors))
        return tuple(each if each.ndim == 3 else each.to(dtype) for each in found)

    return operator
