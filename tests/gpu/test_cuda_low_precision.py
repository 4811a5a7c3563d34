"""Products in 8 and 4 bits on a CUDA device: casts of the CPU, kernels beside emulation, and training."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from cuda_runs import mesh_of, spec_of
from torch import Tensor, nn

from meshwright.kernels.low_precision import E4M3, E5M2, round_nvfp4, round_tensor, round_tiles
from meshwright.model.low_precision_linear import CAPABILITY, KernelProducts, LowPrecision, Scaling, rotate
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


@pytest.mark.parametrize("recipe", ["fp8", "fp8-rowwise"])
@pytest.mark.parametrize("gradients", ["e4m3", "e5m2"])
def test_kernels_compute_the_products_of_rounded_operands(recipe: str, gradients: str) -> None:
    if torch.cuda.get_device_capability() < CAPABILITY[recipe]:
        pytest.skip("this GPU has no products in fp8")
    precision = PrecisionSpec.model_validate({"compute": recipe, "fp8_gradients": gradients})
    generator = torch.Generator().manual_seed(1)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).bfloat16().cuda()

    weights = [nn.Parameter(drawn(384, 256)) for _ in range(2)]
    scales = torch.tensor([2.0**-6, 2.0**-6, 2.0**-9], device="cuda")
    x, grads, biases = drawn(2, 160, 256), [drawn(320, 384) for _ in weights], [drawn(384) for _ in weights]
    found = []
    for kind in (KernelProducts, LowPrecision):
        products = kind(precision)
        products.scalings = {weight: Scaling(scales, torch.zeros(3, device="cuda")) for weight in weights}
        products.scaled = products.noting = True
        plain = [weight.detach() for weight in weights]
        listed = [
            *products.forward(x, plain, biases, weights),
            products.of_input(grads, plain, weights),
            products.of_weight(grads[0], x.flatten(0, 1), weights[0]),
        ]
        found.append([*listed, *(scaling.seen for scaling in products.scalings.values())])
    for kernel, emulated in zip(*found, strict=True):
        assert kernel.dtype == emulated.dtype
        error = (kernel.float() - emulated.float()).abs().max() / emulated.float().abs().max().clamp(min=1)
        assert error < 2**-6  # both are rounded to bf16, one of them after each term


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
