"""A mixture of experts on a CUDA device gives what it gives in float64 on the CPU."""

from __future__ import annotations

import copy

import pytest
import torch

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


def test_experts_without_rows() -> None:
    layer = mixture(bias=True).to("cuda", torch.bfloat16)
    assert layer.router.bias is not None
    layer.router.bias[:4] = 9.0
    x = torch.randn(1, 33, 128, device="cuda", dtype=torch.bfloat16)
    layer(x).sum().backward()
    assert layer.experts.gate.grad is not None and (layer.experts.gate.grad[4:] == 0).all()
    assert bool(layer.experts.gate.grad.isfinite().all())
