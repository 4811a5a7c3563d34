"""The scale of gradients in half formats: rounding may add noise, but no factor."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from meshwright.comm.mesh import Mesh
from meshwright.data.loader import Batch
from meshwright.model.chunked_cross_entropy import linear_cross_entropy
from meshwright.model.embedding import embedding
from meshwright.model.norm import LayerNorm, RmsNorm
from meshwright.parallel.loss_normalization import power_and_rest, weight_of_a_target
from meshwright.spec import RunSpec
from meshwright.train.step import Trainer
from ranks import Ranks
from small import first_batches, spec_of

COUNTS = (24_576, 40_961, 748_576)
EVEN = 8_192
"""A power of two: dividing by it is exact in every format."""
TOLERANCE = 1e-4
NO_UNDERFLOW = 2.0**24
"""A loss scale at which fp16 holds nearly all gradients of the small models here as normal numbers. At the
default, 2^16, the subnormal ones shift a norm's slope by up to 4e-4 at 748,576 targets."""


def slope(found: torch.Tensor, exact: torch.Tensor) -> float:
    """The factor by which `found` is closest to `exact`, by least squares."""
    return float((found.double() * exact).sum() / (exact * exact).sum())


def slopes(dtype: torch.dtype, count: int, loss_scale: float) -> list[float]:
    """The slopes of the gradients of x and of the weight, against float64 of the same rounded inputs."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(256, 64, generator=generator).to(dtype)
    weight = (torch.randn(512, 64, generator=generator) * 0.1).to(dtype)
    targets = torch.randint(0, 512, (256,), generator=generator)
    power, rest = power_and_rest(weight_of_a_target(count))
    grads = []
    for form in (dtype, torch.float64):
        inputs = [each.clone().to(form).requires_grad_() for each in (x, weight)]
        loss = linear_cross_entropy(*inputs, targets, scale=power * loss_scale)
        grads.append([grad.double() * rest for grad in torch.autograd.grad(loss, inputs)])
    return [slope(found, exact) for found, exact in zip(*grads, strict=True)]


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize(("dtype", "loss_scale"), [(torch.bfloat16, 1.0), (torch.float16, NO_UNDERFLOW)])
def test_the_head_scales_gradients_as_at_a_power_of_two(
    dtype: torch.dtype, loss_scale: float, count: int
) -> None:
    even, found = slopes(dtype, EVEN, loss_scale), slopes(dtype, count, loss_scale)
    assert found == pytest.approx(even, abs=TOLERANCE)
    assert max(found) - min(found) < 2 * TOLERANCE  # the head's weight like all that is below it


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("count", [1_024, 65_536])
def test_a_token_that_occurs_often_loses_no_gradient(dtype: torch.dtype, count: int) -> None:
    """torch's own backward gave slopes of 0.977 and 0.157 after 1,024 and 16,384 occurrences in bf16."""
    weight = torch.zeros(16, 8, dtype=dtype, requires_grad=True)
    tokens = torch.cat([torch.full((count,), 3), torch.arange(16)])
    grad = torch.rand(len(tokens), 8, generator=torch.Generator().manual_seed(0)).to(dtype) / 128
    embedding(tokens, weight).backward(grad)
    assert weight.grad is not None
    exact = torch.zeros(16, 8, dtype=torch.float64).index_add_(0, tokens, grad.double())
    torch.testing.assert_close(weight.grad, exact.to(dtype), atol=0, rtol=torch.finfo(dtype).eps)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", [RmsNorm, LayerNorm])
def test_norms_lose_no_gradient_over_many_rows(kind: type[RmsNorm | LayerNorm], dtype: torch.dtype) -> None:
    """torch's own backward gave a bias a slope of 0.25 over 16,384 rows in bf16."""
    generator = torch.Generator().manual_seed(0)
    x, grad = (torch.randn(65_536, 16, generator=generator).to(dtype) for _ in range(2))
    grad = (grad + 0.5) / 1024
    found = []
    for form in (dtype, torch.float64):
        norm = kind(16, 1e-5).to(form)
        for name, parameter in norm.named_parameters():
            torch.nn.init.constant_(parameter, float(name == "weight"))
        rows = x.clone().to(form).detach().requires_grad_()
        norm(rows).backward(grad.to(form))
        found.append([rows.grad, *(parameter.grad for parameter in norm.parameters())])
    for mine, exact in zip(*found, strict=True):
        assert mine is not None and exact is not None
        assert float((mine.double() - exact).norm() / exact.norm()) < torch.finfo(dtype).eps


def gradients_of(mesh: Mesh, spec: RunSpec, targets: int) -> dict[str, torch.Tensor]:
    """Every gradient of one step times the number of targets, which is said to be `targets`."""
    trainer = Trainer(spec, mesh)
    trainer.initialise()
    (batch,) = first_batches(spec, mesh, 1)
    trainer._targets = batch, targets
    trainer.gradients(batch)
    factor = trainer.gradient_factor * targets
    return {name: grad.full_tensor().double() * factor for name, grad in trainer.states.gradients()}


@pytest.mark.parametrize("compute", ["bf16", "fp16"])
@pytest.mark.parametrize("layout", [{"dp": 1}, {"dp": 2, "zero": 3}, {"pp": 2}], ids=str)
def test_every_parameter_has_the_slope_of_a_power_of_two(
    ranks: Ranks, layout: dict[str, int], compute: str
) -> None:
    """All of them were off by -0.12% to +0.22%, by the number of targets, but for the head's weight."""
    base = {
        "data.corpus": "synthetic", "data.seq_len": 64, "train.batch_tokens": 512, "layout.micro_batch": 2,
        "model.layers": 2, "model.tied": "false", "precision.compute": compute,
    }  # fmt: skip
    if compute == "fp16":
        base["precision.loss_scale"] = NO_UNDERFLOW
    spec = spec_of(base, **{f"layout__{key}": value for key, value in layout.items()})
    even, *others = (ranks.run(spec.layout, gradients_of, spec, count)[0] for count in (EVEN, *COUNTS))
    for found in others:
        for name, grad in found.items():
            assert slope(grad, even[name]) == pytest.approx(1, abs=TOLERANCE), name


def summed(mesh: Mesh, spec: RunSpec) -> float:
    """The relative error of a step's gradients in bf16 on the wire, against fp32 there."""
    norms = []
    for reduce in ("fp32", "bf16"):
        given = spec.model_copy(update={"precision": spec.precision.model_copy(update={"reduce": reduce})})
        trainer = Trainer(given, mesh)
        trainer.initialise()
        batch: Batch = replace(first_batches(given, mesh, 1)[0])
        trainer.gradients(batch)
        grads = [grad.full_tensor().double().flatten() for _, grad in trainer.states.gradients()]
        norms.append(torch.cat(grads))
    return float((norms[1] - norms[0]).norm() / norms[0].norm())


@pytest.mark.parametrize(
    "layout",
    [
        {"zero": 0},
        pytest.param({"zero": 1}, marks=pytest.mark.full),
        pytest.param({"zero": 2}, marks=pytest.mark.full),
        {"zero": 3},
        {"pp": 2, "zero": 1},
    ],
    ids=str,
)
def test_microbatches_add_up_in_the_masters_format_in_every_layout(
    ranks: Ranks, layout: dict[str, int]
) -> None:
    """64 microbatches: added up in bf16 the error grows with their number, rounded once it is 2^-9 a term."""
    base = {
        "data.corpus": "synthetic", "data.seq_len": 16, "train.batch_tokens": 16 * 2 * 64,
        "layout.micro_batch": 1, "layout.dp": 2, "model.layers": 2, "precision.compute": "fp32",
    }  # fmt: skip
    spec = spec_of(base, **{f"layout__{key}": value for key, value in layout.items()})
    assert max(ranks.run(spec.layout, summed, spec)) < 2**-8
