"""Number formats: the recipes, fp16's loss scale, and fp32 products that stay fp32."""

from __future__ import annotations

import pytest
import torch

from meshwright.parallel import precision
from meshwright.parallel.precision import LossScale, formats, use_fast_fp32_matmul
from meshwright.spec.precision import PrecisionSpec


@pytest.mark.parametrize(
    ("compute", "reduce", "expected"),
    [
        ("fp64", "fp32", (torch.float64, torch.float64, torch.float64)),
        ("fp32", "fp32", (torch.float32, torch.float32, torch.float32)),
        ("bf16", "fp32", (torch.float32, torch.bfloat16, torch.float32)),
        ("bf16", "bf16", (torch.float32, torch.bfloat16, torch.bfloat16)),
        ("fp16", "fp32", (torch.float32, torch.float16, torch.float32)),
    ],
)
def test_formats(compute: str, reduce: str, expected: tuple[torch.dtype, ...]) -> None:
    found = formats(PrecisionSpec(compute=compute, reduce=reduce))  # type: ignore[arg-type]
    assert (found.master, found.compute, found.reduce) == expected


def test_the_loss_scale_halves_at_an_overflow_and_doubles_after_good_steps() -> None:
    scale = LossScale(PrecisionSpec(compute="fp16", loss_scale=8.0, loss_scale_window=2))
    scale.update(finite=False)
    assert scale.value == 4
    scale.update(finite=True)
    assert scale.value == 4
    scale.update(finite=True)
    assert scale.value == 8
    for _ in range(10):
        scale.update(finite=False)
    assert scale.value == 1
    other = LossScale(PrecisionSpec(compute="fp16"))
    other.restore(scale.state())
    assert other.state() == scale.state()


def test_only_fp16_scales_the_loss() -> None:
    scale = LossScale(PrecisionSpec(compute="bf16"))
    scale.update(finite=False)
    assert scale.value == 1


def test_fast_fp32_products_are_exact_to_fp32() -> None:
    before = torch.get_float32_matmul_precision()
    try:
        use_fast_fp32_matmul(torch.device("cpu"))
        a, b = torch.randn(2, 300, 300)
        exact = a.double() @ b.double()
        assert float(((a @ b) - exact).abs().max() / exact.abs().max()) < 5e-6
    finally:
        torch.set_float32_matmul_precision(before)


@pytest.mark.parametrize(
    ("vendor", "mkl", "asked"),
    [
        ("GenuineIntel", True, False),
        ("GenuineIntel", False, True),
        ("AuthenticAMD", True, True),
        ("", True, True),
    ],
)
def test_mkl_multiplies_fp32_on_intel(
    monkeypatch: pytest.MonkeyPatch, vendor: str, mkl: bool, asked: bool
) -> None:
    tried: list[str] = []
    monkeypatch.setattr(precision, "cpu_info", {"vendor_id": vendor}.__getitem__)
    monkeypatch.setattr(torch.backends.mkl, "is_available", lambda: mkl)
    monkeypatch.setattr(torch, "set_float32_matmul_precision", tried.append)
    use_fast_fp32_matmul(torch.device("cpu"))
    assert ("medium" in tried) == asked


def test_the_loss_scale_stays_a_number_of_fp32() -> None:
    scale = LossScale(PrecisionSpec(compute="fp16", loss_scale=2.0**126, loss_scale_window=1))
    for _ in range(3):
        scale.update(True)
    assert torch.tensor(scale.value).isfinite() and scale.value == 2.0**127
    small = LossScale(PrecisionSpec(compute="fp16", loss_scale=0.5))
    small.update(False)
    assert small.value == 0.5
