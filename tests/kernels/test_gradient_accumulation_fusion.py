"""Sums of products: in the format of the sum, and not rounded before they are added."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from meshwright.kernels import gradient_accumulation_fusion as fusion
from meshwright.kernels.gradient_accumulation_fusion import RunningSum

MICROBATCHES, TOKENS, OUTPUTS, INPUTS = 8, 64, 24, 40


def operands(dtype: torch.dtype) -> list[tuple[Tensor, Tensor]]:
    """Gradients (tokens, outputs) and inputs (tokens, inputs) of each microbatch."""
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randn(MICROBATCHES, TOKENS, OUTPUTS + INPUTS, generator=generator, dtype=torch.float64)
    return [(each[:, :OUTPUTS].to(dtype), each[:, OUTPUTS:].to(dtype)) for each in drawn]


def summed(pairs: list[tuple[Tensor, Tensor]], total: Tensor) -> Tensor:
    for number, (grad, x) in enumerate(pairs):
        RunningSum(total, number > 0).add_product(grad.T, x)
    return total


def error(total: Tensor, pairs: list[tuple[Tensor, Tensor]]) -> float:
    """The relative error of a sum, by norm."""
    exact = torch.stack([grad.double().T @ x.double() for grad, x in pairs]).sum(0)
    return float((total.double() - exact).norm() / exact.norm())


@pytest.mark.parametrize("strided", [False, True], ids=["contiguous", "rows apart"])
@pytest.mark.parametrize(
    ("dtype", "of_total", "most"),
    [
        (torch.float64, torch.float64, 1e-15),
        (torch.float32, torch.float32, 1e-6),
        (torch.bfloat16, torch.float32, 2e-3),  # a CPU rounds each product to bf16, by 2^-9 at most
        (torch.bfloat16, torch.bfloat16, 1e-2),
    ],
    ids=str,
)
def test_a_sum_is_that_of_the_products(
    dtype: torch.dtype, of_total: torch.dtype, most: float, strided: bool
) -> None:
    room = torch.full((OUTPUTS, INPUTS + 8 * strided), float("nan"), dtype=of_total)
    pairs = operands(dtype)
    assert error(summed(pairs, room[:, :INPUTS]), pairs) < most
    assert room[:, INPUTS:].isnan().all()  # what lies beside it is left alone


def in_fp32(honest: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A product with `out_dtype` as a GPU has it, which takes operands of bf16: they are exact in fp32."""

    def run(*tensors: Tensor, out: Tensor, out_dtype: torch.dtype, **how: Any) -> Tensor:
        assert out_dtype is out.dtype is torch.float32
        return honest(*(each.float() for each in tensors), out=out, **how)

    return run


def test_products_that_are_not_rounded_have_an_error_of_fp32(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounding each microbatch's gradient to bf16 costs three digits, which the exact sum does not lose."""
    pairs, room = operands(torch.bfloat16), torch.full((OUTPUTS, INPUTS), float("nan"))
    rounded = error(summed(pairs, room), pairs)
    monkeypatch.setattr(fusion, "_writes_wider", lambda left, total: left.dtype != total.dtype)
    for name in ("mm", "addmm"):
        monkeypatch.setattr(torch, name, in_fp32(getattr(torch, name)))
    exact = error(summed(pairs, room), pairs)
    assert rounded > 5e-4 and exact < 1e-6
