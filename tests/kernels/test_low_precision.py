"""Rounding to 8 and 4 bits: equal to torchao's casts bit for bit, and its products to torch's kernels."""

from __future__ import annotations

import math
import warnings
from itertools import product
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from torchao.float8.config import ScalingGranularity
from torchao.float8.float8_utils import tensor_to_scale, to_fp8_saturated
from torchao.prototype.mx_formats.kernels import f4_unpacked_to_f32, unpack_uint4
from torchao.prototype.mx_formats.mx_tensor import ScaleCalculationMode, to_mx
from torchao.prototype.mx_formats.nvfp4_tensor import nvfp4_quantize

from low_precision_products import layer_products, scaled_mm
from meshwright.kernels import low_precision
from meshwright.kernels.low_precision import (
    E4M3,
    E5M2,
    Form,
    rotate,
    round_e2m1,
    round_nvfp4,
    round_tensor,
    round_tiles,
    scale_of,
)
from meshwright.model.low_precision_linear import LowPrecision, Operand, Scaling
from meshwright.model.scaled_products import KernelProducts, products_of
from meshwright.spec.errors import UserError
from meshwright.spec.precision import PrecisionSpec

GRID = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])


def drawn(*shape: int, spread: int = 20) -> Tensor:
    """Normal numbers in bf16, whose rows differ by powers of two; row 3 is zero."""
    generator = torch.Generator().manual_seed(0)
    powers = torch.randint(-spread, spread, (*shape[:-1], 1), generator=generator)
    x = torch.randn(*shape, generator=generator) * torch.exp2(powers)
    x[3] = 0
    return x.bfloat16()


@pytest.mark.parametrize("form", [E4M3, E5M2])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_scale_for_a_row_is_torchaos(form: Form, dtype: torch.dtype) -> None:
    x = drawn(64, 256).to(dtype)
    assert form.dtype is not None
    scale = tensor_to_scale(
        x, form.dtype, scaling_granularity=ScalingGranularity.AXISWISE, axiswise_dim=-1,
        round_scales_to_power_of_2=True,
    )  # fmt: skip
    wanted = to_fp8_saturated(x.float() * scale, form.dtype).float() / scale
    assert torch.equal(round_tiles(x, form, 1, 0).float(), wanted)
    assert torch.equal(round_tiles(x.T, form, 0, 1).T.float(), wanted)


@pytest.mark.parametrize("form", [E4M3, E5M2])
def test_blocks_of_a_weight_are_tensors_of_torchao(form: Form) -> None:
    x, found = drawn(256, 384), round_tiles(drawn(256, 384), form, 128, 128)
    for rows in range(0, 256, 128):
        for columns in range(0, 384, 128):
            block = x[rows : rows + 128, columns : columns + 128].contiguous()
            assert form.dtype is not None
            scale = tensor_to_scale(block, form.dtype, round_scales_to_power_of_2=True)
            wanted = to_fp8_saturated(block.float() * scale, form.dtype).float() / scale
            assert torch.equal(found[rows : rows + 128, columns : columns + 128].float(), wanted)
            given = round_tensor(block, form, 1 / scale)
            assert torch.equal(given.float(), wanted)


def test_mxfp8_is_torchaos() -> None:
    x = drawn(64, 256)
    scale, numbers = to_mx(x, torch.float8_e4m3fn, 32, ScaleCalculationMode.RCEIL)
    wanted = numbers.float().view(64, 8, 32) * scale.float().unsqueeze(-1)
    assert torch.equal(round_tiles(x, E4M3, 1, 32).float(), wanted.view(64, 256))


def test_nvfp4_is_torchaos() -> None:
    x = drawn(64, 256, spread=4)
    scale = scale_of(x.abs().amax().float(), 6 * 448.0)
    blocks, packed = nvfp4_quantize(x, 16, scale)
    numbers = f4_unpacked_to_f32(unpack_uint4(packed)).view(64, 16, 16)
    wanted = numbers * (blocks.float() * scale).unsqueeze(-1)
    assert torch.equal(round_nvfp4(x, scale, 1, 16).float(), wanted.view(64, 256))


def test_scales_are_the_least_power_of_two_at_which_numbers_fit() -> None:
    powers = torch.arange(-126, 120)
    assert scale_of(448 * torch.exp2(powers), 448.0).tolist() == [2.0**power for power in powers.tolist()]
    above = torch.nextafter(448 * torch.exp2(powers), torch.tensor(math.inf))
    assert scale_of(above, 448.0).tolist() == [2.0 ** (power + 1) for power in powers.tolist()]
    assert scale_of(torch.tensor(1e-45), 448.0) == 2.0**-126
    assert scale_of(torch.tensor([math.inf, math.nan]), 448.0).isnan().all()


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_numbers_that_are_not_finite_stay_so(bad: float) -> None:
    x = drawn(4, 256)
    x[1, 7] = bad
    one = torch.tensor(1.0)
    for found in (
        round_tiles(x, E4M3, 1, 128), round_tensor(x, E5M2, one), round_nvfp4(x, one, 1, 16),
        round_nvfp4(x, one, 1, 16, stochastic=True),
    ):  # fmt: skip
        assert not found[1, 7].isfinite() and found[0].isfinite().all()


def test_what_is_beyond_a_given_scale_becomes_the_largest_number() -> None:
    x = torch.tensor([[900.0, -900.0, 448.0, 1.0]])
    assert round_tensor(x, E4M3, torch.tensor(1.0)).tolist() == [[448.0, -448.0, 448.0, 1.0]]


def test_e2m1_is_the_nearest_number_and_ties_are_even() -> None:
    x = torch.linspace(-6, 6, 4801)
    nearest = (x.abs().unsqueeze(1) - GRID).abs().amin(1)
    found = round_e2m1(x)
    assert torch.isin(found.abs(), GRID).all()
    assert torch.equal((x - found).abs(), nearest)
    ties = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
    assert round_e2m1(ties).tolist() == [0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0]


def test_stochastic_rounding_has_no_bias_and_repeats() -> None:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(4096, 64, generator=generator).clamp(-3, 3)
    x[:, 0], x[:, 5] = 3.0, 0.3  # blocks of one scale, so that 0.3 lies between 0.25 and 0.5 in every row
    scale = torch.tensor(2.0**-8)
    found = round_nvfp4(x, scale, 1, 16, stochastic=True)
    again = round_nvfp4(x, scale, 1, 16, stochastic=True)
    assert torch.equal(found, again)
    assert torch.equal(found[:8], round_nvfp4(x[:8], scale, 1, 16, stochastic=True))
    assert set(found[:, 5].tolist()) == {0.25, 0.5}
    assert abs(float(found[:, 5].mean()) - 0.3) < 4 * float(found[:, 5].std()) / 4096**0.5
    assert set(round_nvfp4(x, scale, 1, 16)[:, 5].tolist()) == {0.25}
    error = found - x
    assert abs(float(error.mean())) < 4 * float(error.std()) / error.numel() ** 0.5


def test_parts_and_partial_tiles_are_rounded_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    x, one = drawn(160, 200, spread=4), torch.tensor(2.0**-6)
    rounds = [
        lambda: round_tiles(x, E4M3, 1, 0), lambda: round_tiles(x, E4M3, 0, 1),
        lambda: round_tiles(x, E4M3, 128, 128), lambda: round_tiles(x, E4M3, 32, 1),
        lambda: round_tensor(x, E5M2, one), lambda: round_nvfp4(x, one, 16, 16),
    ]  # fmt: skip
    whole = [rounded() for rounded in rounds]
    assert torch.equal(whole[2][:128, :128], round_tiles(x[:128, :128], E4M3, 128, 128))
    monkeypatch.setattr(low_precision, "PART", 4096)
    for before, rounded in zip(whole, rounds, strict=True):
        assert torch.equal(before, rounded())


def test_a_rotation_leaves_products_as_they_are_and_spreads_outliers() -> None:
    x, y = (torch.randn(64, 24, generator=torch.Generator().manual_seed(seed)).double() for seed in (1, 2))
    assert torch.allclose(rotate(x).T @ rotate(y), x.T @ y, atol=1e-12)
    alone = torch.zeros(16, 1)
    alone[3] = 8.0
    assert rotate(alone).abs().flatten().tolist() == [2.0] * 16


# Products ------------------------------------------------------------------------------------------------


KERNELS = [
    *product(("fp8", "fp8-rowwise"), ("e4m3", "e5m2"), ((9, 0),)),
    *product(("fp8-blockwise",), (None,), ((9, 0), (10, 0))),
    *product(("mxfp8", "nvfp4"), (None,), ((10, 0),)),
]


@pytest.mark.parametrize(("recipe", "gradients", "capability"), KERNELS)
def test_kernels_compute_the_products_of_rounded_operands(
    recipe: str, gradients: str | None, capability: tuple[int, int]
) -> None:
    """`torch._scaled_mm` runs on a CPU, too, with scales of tensors and rows; of blocks a stand-in does."""
    precision = PrecisionSpec.model_validate({"compute": recipe, "fp8_gradients": gradients})
    generator = torch.Generator().manual_seed(4)
    weights = [nn.Parameter(torch.randn(256, 128, generator=generator).bfloat16()) for _ in range(2)]
    x = torch.randn(2, 128, 128, generator=generator).bfloat16()
    grads = [torch.randn(256, 256, generator=generator).bfloat16() for _ in weights]
    biases = [torch.ones(256).bfloat16() for _ in weights]
    scales = torch.tensor([2.0**-6, 2.0**-5, 2.0**-12])
    found, noted = [], []
    for products in (KernelProducts(precision, capability), LowPrecision(precision)):
        scalings = {weight: Scaling(scales, torch.zeros(3)) for weight in weights}
        with patch.object(torch, "_scaled_mm_v2", scaled_mm):
            kernels = isinstance(products, KernelProducts)
            found.append(layer_products(products, scalings, x, weights, biases, grads, kernels))
        noted.append([scaling.seen for scaling in scalings.values()])
    for kernel, emulated in zip(*found, strict=True):
        assert kernel.dtype == emulated.dtype
        error = (kernel.float() - emulated.float()).abs().max() / emulated.float().abs().max()
        assert error < 2**-6  # both are rounded to bf16, one of them after each term
    if recipe != "fp8-rowwise":  # kernels write sums in fp32, and add to them what was not rounded
        first, total = found[0][-2:]
        assert (first != first.bfloat16()).float().mean() > 0.9
        torch.testing.assert_close(total, 1 + first, rtol=0, atol=1e-6 * float(first.abs().max()))
    if recipe in ("fp8", "nvfp4"):
        assert all(torch.equal(*each) for each in zip(*noted, strict=True))
        assert all(float(seen.min()) > 0 for seen in noted[0])


@pytest.mark.parametrize(
    ("recipe", "outputs", "tokens", "taken"),
    [
        ("fp8", 48, 32, True), ("fp8", 48, 8, False), ("fp8-rowwise", 48, 7, True),
        ("fp8-blockwise", 256, 128, True), ("fp8-blockwise", 576, 128, False),
        ("fp8-blockwise", 256, 64, False),
    ],
)  # fmt: skip
def test_sides_that_kernels_do_not_take_are_left_to_rounded_operands(
    recipe: str, outputs: int, tokens: int, taken: bool
) -> None:
    weight = nn.Parameter(torch.randn(outputs, 128).bfloat16())
    products = KernelProducts(PrecisionSpec.model_validate({"compute": recipe}))
    products.scalings, products.scaled = {weight: Scaling(torch.ones(3), torch.zeros(3))}, True
    x = torch.randn(1, tokens, 128).bfloat16()
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for _ in range(2):
            operand = products.input(x, [weight], [weight])
    assert len(told) == (0 if taken else 1)
    assert taken or f"no kernel of '{recipe}' for {tokens} tokens" in str(told[0].message)
    assert (operand.along is not None) == taken and (operand.plain is x) == (
        not taken or recipe == "fp8-rowwise"
    )
    if not taken:
        (found,) = products.forward(operand, [weight.detach()], [], [weight])
        rounded = LowPrecision(PrecisionSpec.model_validate({"compute": recipe}))
        rounded.scalings, rounded.scaled = products.scalings, True
        (wanted,) = rounded.forward(Operand(x), [weight.detach()], [], [weight])
        assert torch.equal(found, wanted)


@pytest.mark.parametrize(
    ("capability", "recipe", "instead"),
    [
        ((8, 0), "fp8", "bf16"),
        ((9, 0), "mxfp8", "fp8 or fp8-rowwise or fp8-blockwise"),
        ((8, 9), "nvfp4", "fp8"),
        ((7, 0), "fp8", "fp16"),
        ((7, 0), "bf16", "fp16"),
    ],
)
def test_a_gpu_without_the_format_is_told(capability: tuple[int, int], recipe: str, instead: str) -> None:
    precision = PrecisionSpec.model_validate({"compute": recipe})
    device = torch.device("cuda", 0)
    with (
        patch.object(torch.cuda, "get_device_capability", lambda _: capability),
        patch.object(torch.cuda, "get_device_name", lambda _: "a GPU"),
        pytest.raises(UserError, match=rf"^precision.compute: '{recipe}' needs .* try {instead}"),
    ):
        products_of(precision, device)


@pytest.mark.parametrize("exponent", [-149, -140, -130, -126, -60, 0, 100, 127])
def test_finite_numbers_of_any_size_are_rounded_to_finite_ones(exponent: int) -> None:
    """Also by the scale of steps whose numbers were far smaller or larger; else no later step is applied."""
    x = torch.full((16, 32), 2.0**exponent)
    x[0], x[1, :16] = 0.0, -(2.0**exponent)
    for scale in (2.0**-126, 1.0, 2.0**127):
        given = torch.tensor(scale)
        for form in (E4M3, E5M2):
            assert round_tensor(x, form, given).isfinite().all()
        for rows in (1, 16):
            for stochastic in (False, True):
                assert round_nvfp4(x, given, rows, 16, stochastic).isfinite().all()
    assert round_tensor(x.fill_(torch.inf), E4M3, torch.tensor(1.0)).isnan().all()
