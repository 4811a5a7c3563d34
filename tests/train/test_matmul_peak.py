"""The matmul rate that MFU is a share of: the best of several sizes, and soon found."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from meshwright.train import matmul_peak as peak


@pytest.mark.parametrize("fastest", peak.CPU_SIZES)
def test_the_best_size_counts(monkeypatch: pytest.MonkeyPatch, fastest: int) -> None:
    """By a clock that only products move, at the speed of fp16 on a CPU that emulates it."""
    now = 0.0

    def linear(inputs: Tensor, weights: Tensor) -> None:
        nonlocal now
        size = len(inputs)
        assert inputs.dtype == weights.dtype == torch.float16
        now += 2 * size**3 / (25e9 if size == fastest else 20e9)

    monkeypatch.setattr(peak, "linear", linear)
    monkeypatch.setattr(peak, "time", SimpleNamespace(perf_counter=lambda: now))
    rate = peak.matmul_flops_per_second(torch.float16, torch.device("cpu"))
    assert rate == pytest.approx(25e9)
    assert now < 0.8


def test_a_rate_is_measured() -> None:
    rate = peak.matmul_flops_per_second(torch.float32, torch.device("cpu"), seconds=0.0)
    assert 1e8 < rate < 1e15
