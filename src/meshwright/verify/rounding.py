"""A step's gradients on one device, exact or rounded as a run in its own precision rounds them.

The plain decoder computes both. For the second each module's output, and the gradient there, is moved by up
to half the distance between numbers of the run's format, at random, and then rounded to it; several draws
show what rounding does to each gradient. No module of the product computes here, so a mistake that one device
makes, too, such as one of a compiler, makes no tolerance larger.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from copy import copy
from typing import Any, NamedTuple

import torch
from torch import Tensor

from meshwright.data.loader import Batch
from meshwright.parallel.precision import formats
from meshwright.spec import RunSpec
from meshwright.verify.reference.decoder import ReferenceDecoder, ReferenceRouting
from meshwright.verify.reference.groups import is_frozen
from meshwright.verify.reference.low_precision import ReferenceLinears
from meshwright.verify.reference.steps import IGNORE, losses_of

SUMS = 16
"""Roundings that one of a wide format stands for: there the sums of a product round as its results do."""


ROUTED = 32
"""Roundings of a router's logits by which a draw chooses experts where it is not known which the run chose. A
token that has others moves gradients by far more than rounding, and so seldom that with one rounding no draw
may have any where the run has one."""


class Gradients(NamedTuple):
    """The mean loss of a step, and the gradient of each parameter by name, in float64."""

    loss: float
    by_name: dict[str, Tensor]
    routings: dict[int, ReferenceRouting]
    """The routing of each layer with experts, without a graph."""


def exact_gradients(
    spec: RunSpec,
    weights: Mapping[str, Tensor],
    batch: Batch,
    linears: ReferenceLinears,
    chosen: Mapping[int, Tensor],
) -> Gradients:
    """The gradients at these parameters and routers' biases, in float64, with the `chosen` experts.

    `linears` rounds operands of low precision, and notes their largest numbers.
    """
    held = {name: weight.double() for name, weight in weights.items()}
    linears.begin_step(targets_of(batch))
    decoder = ReferenceDecoder(spec.model, held, None, linears, chosen, spec.lora)
    return _gradients(spec, decoder, batch, 1.0)


def rounded_gradients(
    spec: RunSpec,
    weights: Mapping[str, Tensor],
    batch: Batch,
    linears: ReferenceLinears,
    loss_scale: float,
    chosen: Mapping[int, Tensor],
    draw: int,
) -> Gradients:
    """One draw of what the run's precision makes of the gradients, with the `chosen` experts where given.

    Operands of low precision are those of moved numbers, so that a draw has some that round another way;
    their scales are those of `linears`.

    A backward in a half format runs with the power of two in one over the number of targets, and the loss
    scale; there the logits' gradients are rounded to nearest, without chance: those of targets are all alike,
    and rounding them moves all gradients by one factor. Wide formats have random errors of `SUMS` roundings.
    """
    compute, reduce = formats(spec.precision).compute, formats(spec.precision).reduce
    half = compute.itemsize == 2
    wide = torch.float32 if half else torch.float64
    generator = torch.Generator(next(iter(weights.values())).device).manual_seed(draw)
    unit = torch.finfo(compute).eps * (0.5 if half else SUMS)

    # Each rank but one rounds a sum on the wire.
    wire = torch.finfo(reduce).eps * math.sqrt(spec.layout.data_ranks * spec.layout.cp)

    def nearest(x: Tensor) -> Tensor:
        return x.to(compute).to(wide) if half else x

    def moved(x: Tensor, by: float) -> Tensor:
        return x * (1 + by * (torch.rand(x.shape, generator=generator, device=x.device, dtype=wide) - 0.5))

    def rounded(x: Tensor) -> Tensor:
        return nearest(moved(x, unit))

    def summed(x: Tensor) -> Tensor:
        return moved(x, wire).to(reduce)

    def tap(path: str, x: Tensor) -> Tensor:
        if path.endswith(".router") and not chosen:
            x = x + (moved(x, ROUTED * unit) - x).detach()
        y: Tensor = _Rounded.apply(x, nearest if half and path == "head" else rounded)
        return y

    own = copy(linears)
    own.seen, own.factor = {}, 1.0  # gradients are in the run's own scale here
    decoder = ReferenceDecoder(
        spec.model, {name: w.to(wide) for name, w in weights.items()}, tap, own, chosen, spec.lora
    )
    targets = max(1, targets_of(batch))
    scale = targets * 2.0 ** math.frexp(1 / targets)[1] * loss_scale
    while True:
        loss, found, routings = _gradients(spec, decoder, batch, scale)
        for grad in found.values():
            grad.copy_(summed(rounded(grad.to(wide) * scale))).div_(scale)
        if scale <= targets or all(bool(grad.isfinite().all()) for grad in found.values()):
            return Gradients(loss, found, routings)
        scale /= 2  # one that the run had room for


def targets_of(batch: Batch) -> int:
    """The number of targets that are predicted."""
    return int((batch.targets != IGNORE).sum())


class _Rounded(torch.autograd.Function):
    """Rounds a tensor in the forward, and its gradient in the backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, rounded: Any) -> Tensor:
        ctx.rounded = rounded
        return rounded(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return ctx.rounded(grad), None


def _gradients(spec: RunSpec, decoder: ReferenceDecoder, batch: Batch, scale: float) -> Gradients:
    """Gradients of `scale` times the objective by what is trained, divided by `scale`."""
    parameters = {
        name: weight.requires_grad_()
        for name, weight in decoder.weights.items()
        if not name.endswith(".router.bias") and not is_frozen(spec, name)
    }
    losses = losses_of(spec, decoder, batch)
    found = torch.autograd.grad(losses.objective * scale, list(parameters.values()))
    return Gradients(
        float(losses.mean.detach()),
        {name: grad.double() / scale for name, grad in zip(parameters, found, strict=True)},
        {
            layer: ReferenceRouting(*(each.detach() for each in routing))
            for layer, routing in losses.routings.items()
        },
    )
