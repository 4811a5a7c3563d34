"""What this machine's matrix units reach, measured: the denominator of MFU."""

from __future__ import annotations

import time

import torch


def matmul_flops_per_second(dtype: torch.dtype, device: torch.device, seconds: float = 0.4) -> float:
    """Best rate of a square matrix product over repeated tries, in FLOP/s, with this process's threads."""
    size = 1024 if device.type == "cpu" else 8192
    a = torch.randn(size, size, device=device).to(dtype)
    b = torch.randn(size, size, device=device).to(dtype)
    torch.mm(a, b)
    best, end = 0.0, time.perf_counter() + seconds
    while not best or time.perf_counter() < end:
        _wait(device)
        start = time.perf_counter()
        torch.mm(a, b)
        _wait(device)
        best = max(best, 2 * size**3 / (time.perf_counter() - start))
    return best


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
