"""Measured peak matmul rate of this machine: the denominator of MFU."""

from __future__ import annotations

import time

import torch
from torch.nn.functional import linear

CPU_SIZES, CUDA_SIZES = (256, 512, 1024), (8192,)
"""A CPU's caches and libraries favour one size in one format and another in the next."""


def matmul_flops_per_second(dtype: torch.dtype, device: torch.device, seconds: float = 0.4) -> float:
    """Best rate of square matrix products over sizes and tries, in FLOP/s, with this process's threads.

    A product is that of a linear map, whose weights stand in rows: for fp16, which few CPUs multiply, others
    are a tenth as fast.
    """
    pairs = [
        tuple(torch.randn(size, size, device=device).to(dtype) for _ in range(2))
        for size in (CPU_SIZES if device.type == "cpu" else CUDA_SIZES)
    ]
    for inputs, weights in pairs:
        linear(inputs, weights)
    best, end = 0.0, time.perf_counter() + seconds
    while not best or time.perf_counter() < end:
        for inputs, weights in pairs:
            _wait(device)
            start = time.perf_counter()
            linear(inputs, weights)
            _wait(device)
            best = max(best, 2 * len(inputs) ** 3 / (time.perf_counter() - start))
    return best


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
