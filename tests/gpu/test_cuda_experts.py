"""A mixture of experts on a CUDA device gives what it gives in float64 on the CPU."""

from __future__ import annotations

import copy

import pytest
import torch

from meshwright.kernels import expert_rows
from meshwright.model.decoder import Decoder
from meshwright.model.init import init_whole_
from meshwright.model.moe import Moe
from meshwright.spec import ModelSpec

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine"),
]


def mixture(**moe: object) -> Moe:
    given = {"experts": 16, "top_k": 2, "ffn": 64, "shared_ffn": 64, **moe}
    spec = ModelSpec.model_validate({"preset": "moe-tiny", "layers": 2, "hidden": 128, "moe": given})
    ((_, found),) = init_whole_(Decoder(spec).double(), 0).each_mixture()
    for parameter in found.parameters():
        parameter.data.mul_(5)
    return found


@pytest.mark.parametrize(
    ("dtype", "error"), [(torch.float64, 1e-12), (torch.float32, 1e-5), (torch.bfloat16, 0.05)]
)
@pytest.mark.parametrize(
    "moe",
    [
        {},
        {"router": "sigmoid", "groups": 4, "top_groups": 2, "bias": True},
        {"top_k": 1, "renormalise": False},
        {"capacity_factor": 0.75},
        {"expert_bias": True, "router_bias": True, "activation": "clamped_swiglu"},
    ],
    ids=str,
)
def test_grouped_products_are_those_of_the_cpu(
    moe: dict[str, object], dtype: torch.dtype, error: float
) -> None:
    exact = mixture(**moe)
    rounded = copy.deepcopy(exact).to("cuda", dtype)
    make = torch.Generator().manual_seed(0)
    x = torch.randn(2, 200, 128, dtype=torch.float64, generator=make).to(dtype)
    results = []
    for layer, given in ((exact, x.double()), (rounded, x.cuda())):
        leaf = given.requires_grad_()
        out = layer(leaf)
        grads = torch.autograd.grad(out.double().square().mean(), [leaf, *layer.parameters()])
        results.append([tensor.double().cpu() for tensor in (out.detach(), *grads)])
    for number, (wanted, found) in enumerate(zip(*results, strict=True)):
        off = (found - wanted).norm(dim=-1) / wanted.norm(dim=-1).clamp(
            min=1e-3 * float(wanted.norm(dim=-1).max())
        )
        # In fewer bits a token whose best experts are nearly tied may take another, and its rows differ.
        assert off.median() <= error, number


@pytest.mark.parametrize("moe", [{}, {"capacity_factor": 0.75}], ids=str)
def test_a_layer_in_bf16_does_not_wait_for_the_device(moe: dict[str, object]) -> None:
    layer = mixture(**moe).to("cuda", torch.bfloat16)
    x = torch.randn(2, 200, 128, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    for mode in ("default", "error"):  # the first time loads kernels
        torch.cuda.set_sync_debug_mode(mode)
        try:
            layer(x).sum().backward()
        finally:
            torch.cuda.set_sync_debug_mode("default")


def test_rows_that_are_not_computed_reach_no_gradient() -> None:
    """Memory that the allocator hands out again holds NaN."""
    layer, found = mixture().to("cuda", torch.bfloat16), []
    make = torch.Generator().manual_seed(0)
    x = torch.randn(2, 200, 128, generator=make).to("cuda", torch.bfloat16).requires_grad_()
    for _ in range(2):
        y = layer(x)
        found.append([y, *torch.autograd.grad(y.float().square().mean(), [x, *layer.parameters()])])
        torch.full((2**28,), float("nan"), device="cuda")
    for first, again in zip(*found, strict=True):
        assert bool(again.isfinite().all())
        torch.testing.assert_close(first, again, rtol=0.02, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(("channels", "others"), [(4096, 2), (2100, 1)])
def test_rows_are_moved_and_summed_as_on_the_cpu(dtype: torch.dtype, channels: int, others: int) -> None:
    make = torch.Generator().manual_seed(channels)
    first, second = (torch.randn(300, width, generator=make).to(dtype) for width in (channels, others))
    own, its, back = (torch.randint(-1, most, (900,), generator=make) for most in (300, 300, 900))
    found = []
    for device in ("cpu", "cuda"):
        columns = [(first.to(device), own.to(device)), (second.to(device), its.to(device))]
        joined = expert_rows.join(columns, holes=True)
        parts = expert_rows.separate(joined, [channels, others], back.to(device), holes=True)
        found.append([joined.cpu(), *(part.cpu() for part in parts)])
    assert all(torch.equal(*pair) for pair in zip(*found, strict=True))
    index = own.view(-1, 2)
    rows = first[index.clamp(min=0)].double().masked_fill((index < 0).unsqueeze(2), 0)
    summed = expert_rows.sum_rows(first.cuda(), index.cuda()).cpu()
    torch.testing.assert_close(summed, rows.sum(1).to(dtype), rtol=torch.finfo(dtype).eps, atol=1e-6)


def test_experts_without_rows() -> None:
    layer = mixture(bias=True).to("cuda", torch.bfloat16)
    assert layer.router.bias is not None
    layer.router.bias[:4] = 9.0
    x = torch.randn(1, 33, 128, device="cuda", dtype=torch.bfloat16)
    layer(x).sum().backward()
    assert layer.experts.gate.grad is not None and (layer.experts.gate.grad[4:] == 0).all()
    assert bool(layer.experts.gate.grad.isfinite().all())
