"""Matrix products by format and recipe, at the shapes of Llama 3.2 1B and Llama 3 8B."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from math import ceil
from typing import NamedTuple

import torch
from torch import Tensor

from gpu_day.devices import cluster_here, device_here, fake_tensors
from gpu_day.kernel_clock import rate_of, seconds_of
from gpu_day.parts import MODELS
from gpu_day.results import Row, Work
from meshwright.spec import load

TOKENS = 8192


class Kind(NamedTuple):
    """A kind of product (m, k) x (k, n): the format whose peak counts, and what makes the call."""

    format: str
    prepare: Callable[[int, int, int, torch.device], Callable[[], Tensor]]


def run(work: Work) -> None:
    """A row for each model, kind and shape; of a product that fails one with the reason."""
    device = device_here()
    cluster = cluster_here(device)
    for name, kind in KINDS.items():
        peak = cluster.device.peak.get(kind.format) if cluster else None
        for model in MODELS:
            for product, (m, k, n) in shapes_of(model).items():
                told: Row = {"kind": name, "model": model, "product": product, "m": m, "k": k, "n": n}
                if work.left < 3:
                    work.leave_out(f"{name}, {model}, {product}")
                    continue
                with fake_tensors(work, device):
                    work.attempt(told, partial(measure, kind, (m, k, n), device, peak))


def shapes_of(model: str) -> dict[str, tuple[int, int, int]]:
    """(m, k, n) of the forward products of a model, and of one gradient of a weight."""
    spec = load(None, [("model.preset", MODELS[model]), ("data.corpus", "synthetic")]).model
    hidden, inner = spec.hidden, spec.heads * spec.head_dim
    return {
        "q, k and v": (TOKENS, hidden, (spec.heads + 2 * spec.kv_heads) * spec.head_dim),
        "output": (TOKENS, inner, hidden),
        "gate and up": (TOKENS, hidden, 2 * spec.ffn),
        "down": (TOKENS, spec.ffn, hidden),
        "gradient of down": (hidden, TOKENS, spec.ffn),
    }


def measure(kind: Kind, shape: tuple[int, int, int], device: torch.device, peak: float | None) -> Row:
    """The rate of a product."""
    m, k, n = shape
    return rate_of(2.0 * m * k * n, seconds_of(kind.prepare(m, k, n, device)), peak)


def _plain(
    m: int, k: int, n: int, device: torch.device, out: torch.dtype | None = None
) -> Callable[[], Tensor]:
    left = torch.randn(m, k, device=device, dtype=torch.bfloat16)
    right = torch.randn(n, k, device=device, dtype=torch.bfloat16).t()
    if out is None:
        return lambda: torch.mm(left, right)
    return lambda: torch.mm(left, right, out_dtype=out)


def _scaled(
    left: Tensor, right: Tensor, scale_left: Tensor, scale_right: Tensor, fast: bool = False
) -> Callable[[], Tensor]:
    """left (m, k) by the transpose of right (n, k)."""
    return lambda: torch._scaled_mm(
        left, right.t(), scale_left, scale_right, out_dtype=torch.bfloat16, use_fast_accum=fast
    )


def _numbers(rows: int, columns: int, device: torch.device) -> Tensor:
    return torch.randn(rows, columns, device=device, dtype=torch.bfloat16).to(torch.float8_e4m3fn)


def _by_tensor(m: int, k: int, n: int, device: torch.device, fast: bool = False) -> Callable[[], Tensor]:
    scale = torch.ones((), device=device)
    return _scaled(_numbers(m, k, device), _numbers(n, k, device), scale, scale, fast)


def _by_row(m: int, k: int, n: int, device: torch.device) -> Callable[[], Tensor]:
    scales = torch.ones(m, 1, device=device), torch.ones(1, n, device=device)
    return _scaled(_numbers(m, k, device), _numbers(n, k, device), *scales)


def _by_block(m: int, k: int, n: int, device: torch.device) -> Callable[[], Tensor]:
    """A scale for 1 x 128 numbers of the left operand, and for 128 x 128 of the right."""
    scales = torch.ones(k // 128, m, device=device).t(), torch.ones(n // 128, k // 128, device=device).t()
    return _scaled(_numbers(m, k, device), _numbers(n, k, device), *scales)


def _block_scales(rows: int, columns: int, block: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Scales of blocks of `block` numbers of a row, in tiles of 128 x 4 as the tensor cores read them."""
    count = ceil(rows / 128) * 128 * ceil(ceil(columns / block) / 4) * 4
    return torch.ones(count, device=device).to(dtype)


def _mxfp8(m: int, k: int, n: int, device: torch.device) -> Callable[[], Tensor]:
    scales = [_block_scales(rows, k, 32, torch.float8_e8m0fnu, device) for rows in (m, n)]
    return _scaled(_numbers(m, k, device), _numbers(n, k, device), *scales)


def _nvfp4(m: int, k: int, n: int, device: torch.device) -> Callable[[], Tensor]:
    scales = [_block_scales(rows, k, 16, torch.float8_e4m3fn, device) for rows in (m, n)]
    pairs = [
        torch.zeros(rows, k // 2, device=device, dtype=torch.uint8).view(torch.float4_e2m1fn_x2)
        for rows in (m, n)
    ]
    return _scaled(pairs[0], pairs[1], *scales)


KINDS = {
    "bf16": Kind("bf16", _plain),
    "bf16, fp32 out": Kind("bf16", partial(_plain, out=torch.float32)),
    "fp8, scale of a tensor": Kind("fp8", _by_tensor),
    "fp8, scale of a tensor, fast sums": Kind("fp8", partial(_by_tensor, fast=True)),
    "fp8, scales of rows": Kind("fp8", _by_row),
    "fp8, scales of 128 and 128 x 128": Kind("fp8", _by_block),
    "mxfp8, scales of 32": Kind("fp8", _mxfp8),
    "nvfp4, scales of 16": Kind("fp4", _nvfp4),
}
