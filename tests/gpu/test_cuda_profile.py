"""A quick profile of one GPU."""

from __future__ import annotations

from math import prod

import pytest
import torch

from meshwright import api

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def test_a_gpu_is_profiled() -> None:
    found = api.profile(nproc=1, seconds=10)
    device, measured = found.device, found.measured
    assert device.kind in ("cuda", "rocm") and found.sharing == 1 and measured is not None
    assert device.memory > 2**32 and 0.2 < device.rates.memory <= 1
    best = max(2 * prod(p[1:4]) / p.seconds for p in measured.matmul if p.format == "bf16")
    assert 0.3 * device.peak["bf16"] < best <= 1.05 * device.peak["bf16"]
    assert measured.attention and min(p.backward / p.forward for p in measured.attention) > 0.5
    assert measured.launch is not None and 1e-7 < measured.launch < 1e-3
