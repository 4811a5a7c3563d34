"""Formats in which the processor at hand has instructions for products of matrices."""

from __future__ import annotations

import platform
from collections.abc import Callable

import torch


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
