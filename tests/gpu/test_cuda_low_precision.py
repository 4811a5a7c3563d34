"""Products in 8 and 4 bits on a CUDA device: casts of the CPU, kernels beside emulation, and training."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import product
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from cuda_runs import mesh_of, spec_of
from torch import Tensor, nn

from interpreted_casts import CASES as OPERANDS
from interpreted_casts import cast, differences, drawn
from low_precision_products import layer_products
from meshwright.kernels import low_precision_casts as casts
from meshwright.kernels.low_precision import E4M3, E5M2, rotate, round_nvfp4, round_tensor, round_tiles
from meshwright.model.low_precision_linear import LowPrecision, Scaling
from meshwright.model.scaled_products import CAPABILITY, KernelProducts
from meshwright.model.token_dispatcher import RowGroups
from meshwright.optim.stochastic_rounding import round_
from meshwright.spec.errors import UserError
from meshwright.spec.precision import PrecisionSpec
from meshwright.train.callbacks import Observers
from meshwright.train.open_run import open_run
from meshwright.verify.precision import verify_in_own_precision

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine"),
]

SCALE = torch.tensor(2.0**-6)
CASTS: dict[str, Callable[[Tensor], Tensor]] = {
    "tensor e4m3": lambda x: round_tensor(x, E4M3, SCALE.to(x.device)),
    "tensor e5m2": lambda x: round_tensor(x, E5M2, SCALE.to(x.device)),
    "rows e4m3": lambda x: round_tiles(x, E4M3, 1, 0),
    "rows e5m2": lambda x: round_tiles(x, E5M2, 0, 1),
    "blocks": lambda x: round_tiles(x, E4M3, 128, 128),
    "mx": lambda x: round_tiles(x, E4M3, 1, 32),
    "nvfp4": lambda x: round_nvfp4(x, SCALE.to(x.device), 16, 16),
    "nvfp4, stochastic": lambda x: round_nvfp4(x, SCALE.to(x.device), 1, 16, stochastic=True),
    "bf16, stochastic": lambda x: round_(
        x.float(), torch.arange(x.numel(), device=x.device).view(x.shape) % 2**16
    ),
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("cast", CASTS)
def test_casts_are_those_of_the_cpu_bit_for_bit(cast: str, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(304, 416, generator=generator, dtype=torch.float64).to(dtype)
    x *= torch.exp2(torch.randint(-12, 6, (304, 1), generator=generator)).to(dtype)
    x[3], x[7, 5], x[9, 6] = 0, math.inf, math.nan
    wanted, found = CASTS[cast](x), CASTS[cast](x.cuda()).cpu()
    assert wanted.dtype == found.dtype
    assert torch.equal(wanted.nan_to_num(-7.0), found.nan_to_num(-7.0))


@pytest.mark.parametrize("case", OPERANDS)
@pytest.mark.parametrize("shape", [(304, 416), (4096, 1024)])
def test_operands_have_every_bit_of_the_emulation(case: str, shape: tuple[int, int]) -> None:
    """By the kernel on this GPU, and by torch's operators on a CPU; both note the same largest number."""
    x = drawn(*shape, finite="rotated" in case)
    found, noted = cast(casts, case, x.cuda(), "cast_")
    wanted, seen = cast(casts, case, x, "plain_")
    assert differences(found + noted, wanted + seen) == 0


@pytest.mark.parametrize(
    ("recipe", "gradients"),
    [
        *product(("fp8", "fp8-rowwise"), ("e4m3", "e5m2")),
        ("fp8-blockwise", None),
        ("mxfp8", None),
        ("nvfp4", None),
    ],
)
def test_kernels_compute_the_products_of_rounded_operands(recipe: str, gradients: str | None) -> None:
    """Beside those of the emulation, whose operands are multiplied in float64."""
    capability = torch.cuda.get_device_capability()
    if capability < CAPABILITY[recipe]:
        pytest.skip("this GPU has no products in the format")
    precision = PrecisionSpec.model_validate({"compute": recipe, "fp8_gradients": gradients})
    generator = torch.Generator().manual_seed(1)

    def numbers(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).bfloat16().cuda()

    weights = [nn.Parameter(numbers(384, 256)) for _ in range(2)]
    scales = torch.tensor([2.0**-6, 2.0**-6, 2.0**-9], device="cuda")
    x, grads = numbers(2, 128, 256), [numbers(256, 384) for _ in weights]
    biases = [numbers(384) for _ in weights]
    found, noted = [], []
    for products in (KernelProducts(precision, capability), LowPrecision(precision)):
        scalings = {weight: Scaling(scales, torch.zeros(3, device="cuda")) for weight in weights}
        kernels = isinstance(products, KernelProducts)
        found.append(layer_products(products, scalings, x, weights, biases, grads, kernels))
        noted.append([scaling.seen for scaling in scalings.values()])
    for kernel, emulated in zip(*found, strict=True):
        assert kernel.dtype == emulated.dtype
        error = (kernel.float() - emulated.float()).abs().max() / emulated.float().abs().max().clamp(min=1)
        assert error < 2**-6  # both are rounded to bf16, one of them after each term
    assert all(torch.equal(*each) for each in zip(*noted, strict=True))
    exact = _rounded(LowPrecision(precision), x.cpu(), weights[0].detach().cpu(), scales.cpu())
    wanted = exact + biases[0].cpu().double()
    assert (found[0][0].cpu().double() - wanted).abs().max() / wanted.abs().max() < 2**-8


def _rounded(products: LowPrecision, x: Tensor, weight: Tensor, scales: Tensor) -> Tensor:
    """The product of rounded operands in float64: (N, O)."""
    own = nn.Parameter(weight)
    products.scalings, products.scaled = {own: Scaling(scales, torch.zeros(3))}, True
    left = products.operand(x.flatten(0, -2), "input", -1, own).double()
    return left @ products.operand(weight, "weight", -1, own).double().T


@pytest.mark.parametrize("recipe", ["fp8", "fp8-rowwise"])
def test_experts_have_the_products_of_rounded_operands(recipe: str) -> None:
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("torch has grouped products in fp8 for capability 9.0 alone")
    precision = PrecisionSpec.model_validate({"compute": recipe})
    generator = torch.Generator().manual_seed(2)
    weight = nn.Parameter(torch.randn(3, 128, 256, generator=generator).bfloat16().cuda())
    x = torch.randn(96, 256, generator=generator).bfloat16().cuda()
    grad = torch.randn(96, 128, generator=generator).bfloat16().cuda()
    ends = torch.tensor([32, 32, 96], dtype=torch.int32, device="cuda")
    found = []
    for products in (KernelProducts(precision), LowPrecision(precision)):
        products.scalings = {weight: Scaling(torch.full((3,), 2.0**-6, device="cuda"), torch.zeros(3).cuda())}
        products.scaled = True
        groups = RowGroups(ends, None)
        operand = products.expert_input(x, weight.detach(), weight)
        result = products.grouped(operand, weight.detach(), weight, groups)
        found.append([result, products.grouped_of_input(grad, weight.detach(), weight, groups)])
    for kernel, emulated in zip(*found, strict=True):
        assert (kernel.float() - emulated.float()).abs().max() < 2**-6 * emulated.float().abs().max()


def test_a_rotation_is_that_of_the_cpu() -> None:
    x = torch.randn(64, 24, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    torch.testing.assert_close(rotate(x.cuda()).cpu(), rotate(x), rtol=1e-14, atol=1e-14)


@pytest.mark.parametrize("compiled", ["false", "true"])
@pytest.mark.parametrize("recipe", CAPABILITY)
def test_each_recipe_of_this_gpu_trains(
    world: dist.ProcessGroup, tmp_path: Path, recipe: str, compiled: str
) -> None:
    """Loss falls, a run repeats, and rounding explains its gradients; recipes that it has not are refused."""
    spec = spec_of(
        precision__compute=recipe, model__hidden=128, model__ffn=256, model__heads=8, model__head_dim=64,
        train__compile=compiled, train__lr=1e-3,
    )  # fmt: skip
    if torch.cuda.get_device_capability() < CAPABILITY[recipe]:
        with pytest.raises(UserError, match=rf"^precision.compute: '{recipe}' needs .*; try "):
            open_run(spec, mesh_of(spec), tmp_path, Observers([]))
        return
    result = open_run(spec, mesh_of(spec), tmp_path, Observers([])).execute(None)
    assert math.isfinite(result["final_loss"]) and result["final_loss"] < math.log(2048)
    again = open_run(spec, mesh_of(spec), tmp_path, Observers([])).execute("auto")
    assert again["parameters_sha256"] == result["parameters_sha256"]
    found = verify_in_own_precision(spec, mesh_of(spec), 2)
    assert found is not None and found["equal"], found["first"]
