"""The routed experts of a layer: many small SwiGLU layers, each applied to its own rows by grouped matmuls.

Shapes: R rows, D hidden, E experts on this rank, F channels of one. Rows are sorted by expert, in groups
whose sizes are multiples of ALIGN: libraries are fastest on few distinct shapes (oneDNN prepares a kernel for
each), and CUDA's grouped matmul requires aligned groups.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate, pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from meshwright.kernels import elementwise_cpu
from meshwright.kernels.gradient_accumulation_fusion import RunningSum
from meshwright.model.hooks import ExpertsHooks
from meshwright.model.token_dispatcher import RowGroups


class Experts(nn.Module):
    """x (R, D), each row's routing weight (R,), groups -> weighted outputs (R, D).

    The routing weight multiplies the input of `down`: the result is the same, and the weight's gradient does
    not need an expert's output.
    """

    def __init__(self, experts: int, hidden: int, channels: int, hooks: ExpertsHooks) -> None:
        super().__init__()
        self.hooks = hooks
        self.gate = nn.Parameter(torch.empty(experts, channels, hidden))
        self.up = nn.Parameter(torch.empty(experts, channels, hidden))
        self.down = nn.Parameter(torch.empty(experts, hidden, channels))

    def forward(self, x_RD: Tensor, weight_R: Tensor, groups: RowGroups) -> Tensor:
        weights = (self.gate, self.up, self.down)
        return _Experts.apply(x_RD, weight_R, *weights, groups, self.hooks)


class _Experts(torch.autograd.Function):
    """Saves x, gate x and up x for the backward, but neither their product nor the output."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        gate: nn.Parameter,
        up: nn.Parameter,
        down: nn.Parameter,
        groups: RowGroups,
        hooks: ExpertsHooks,
    ) -> Tensor:
        operand = hooks.products.operand

        def gate_and_up() -> tuple[Tensor, Tensor]:
            rows = operand(x, "input", -1, gate)
            gates, ups = (operand(each, "weight", -1, each) for each in (gate, up))
            return grouped_mm(rows, gates, groups), grouped_mm(rows, ups, groups)

        def outputs() -> tuple[Tensor]:
            inner = operand(_inner(gate_x, up_x, weight), "input", -1, down)
            return (grouped_mm(inner, operand(down, "weight", -1, down), groups),)

        gate_x, up_x = hooks.cached(gate_and_up, True)
        (y,) = hooks.cached(outputs, False)
        ctx.save_for_backward(x, weight, gate_x, up_x, gate, up, down)
        ctx.groups, ctx.hooks, ctx.parameters = groups, hooks, (gate, up, down)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        # Detached, and apart from ctx: a deferred weight gradient must not keep the graph behind its inputs
        # alive.
        x, weight, gate_x, up_x, gate, up, down = (saved.detach() for saved in ctx.saved_tensors)
        groups, products = ctx.groups, ctx.hooks.products

        def of_input(
            grad: Tensor, weight: Tensor, parameter: nn.Parameter, onto: Tensor | None = None
        ) -> Tensor:
            turned = products.operand(weight, "weight", -2, parameter).mT
            return grouped_mm(products.operand(grad, "gradient", -1, parameter), turned, groups, onto)

        of_gate, of_up, of_down = parameters = ctx.parameters
        grad_inner = of_input(grad, down, of_down)
        grad_gate, grad_up, grad_weight, inner = _inner_backward_(grad_inner, gate_x, up_x, weight)
        grad_x = of_input(grad_up, up, of_up, onto=of_input(grad_gate, gate, of_gate))

        def weight_grad(gradient: Tensor, inputs: Tensor, parameter: nn.Parameter) -> Tensor | None:
            if not parameter.requires_grad:
                return None
            return grouped_outer(
                products.rows(gradient, "gradient", parameter),
                products.rows(inputs, "input", parameter),
                groups,
                ctx.hooks.gradient_sum(parameter),
            )

        def weight_grads() -> list[Tensor | None]:
            return list(map(weight_grad, (grad_gate, grad_up, grad), (x, x, inner), parameters))

        if ctx.hooks.defer(parameters, weight_grads):
            return grad_x, grad_weight, *[None] * 5
        return grad_x, grad_weight, *weight_grads(), None, None


def _inner(gate_x: Tensor, up_x: Tensor, weight: Tensor) -> Tensor:
    """silu(gate x) * up x * weight (R, F): the input of `down`."""
    if weight.dtype == torch.float32 and elementwise_cpu.takes(gate_x, up_x):
        return elementwise_cpu.weighted_swiglu(gate_x, up_x, weight.contiguous())
    return F.silu(gate_x).mul_(up_x).mul_(weight.to(up_x.dtype).unsqueeze(1))


def _inner_backward_(
    grad: Tensor, gate_x: Tensor, up_x: Tensor, weight: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The gradients of gate x, up x and weight from that of `_inner`, which is overwritten; and `_inner`
    itself."""
    if weight.dtype == torch.float32 and elementwise_cpu.takes(grad, gate_x, up_x):
        found = elementwise_cpu.weighted_swiglu_backward_(grad, gate_x, up_x, weight.contiguous())
        return *found, grad
    scale, silu = weight.to(grad.dtype).unsqueeze(1), F.silu(gate_x)
    product = silu * up_x
    grad_weight = (grad * product).sum(1, dtype=weight.dtype)
    grad_up = silu.mul_(grad.mul_(scale))
    grad_gate = torch.ops.aten.silu_backward(grad.mul_(up_x), gate_x)
    return grad_gate, grad_up, grad_weight, product.mul_(scale)


# Grouped matmuls -----------------------------------------------------------------------------------------


def one_kernel(x: Tensor) -> bool:
    """True if one kernel, which takes the groups' ends from the device, computes all experts of such rows."""
    return x.device.type == "cuda" and x.dtype == torch.bfloat16


def grouped_mm(x_RI: Tensor, weight_EOI: Tensor, groups: RowGroups, onto: Tensor | None = None) -> Tensor:
    """Each expert's rows x (., I) times the transpose of its weight (O, I): (R, O), added to `onto` in its
    memory."""
    if one_kernel(x_RI) and len(x_RI):
        product = torch._grouped_mm(x_RI, weight_EOI.mT, offs=groups.ends)
        return product if onto is None else onto.add_(product)
    out = x_RI.new_empty(x_RI.shape[0], weight_EOI.shape[1]) if onto is None else onto
    for expert, rows in _slices(groups):
        RunningSum(out[rows], onto is not None).add_product(x_RI[rows], weight_EOI[expert].T)
    return out


def grouped_outer(
    grad_RO: Tensor, x_RI: Tensor, groups: RowGroups, into: RunningSum | None = None
) -> Tensor | None:
    """Weight gradients: the product of each expert's gradients and inputs: (E, O, I), or None if added
    `into` a sum."""
    if one_kernel(grad_RO) and len(grad_RO):
        product = torch._grouped_mm(grad_RO.T, x_RI, offs=groups.ends)
        if into is None:
            return product
        into.add(product)
        return None
    out = into or RunningSum(grad_RO.new_empty(len(groups.ends), grad_RO.shape[1], x_RI.shape[1]), False)
    for expert, rows in _slices(groups):
        if rows.start < rows.stop:
            RunningSum(out.total[expert], out.begun).add_product(grad_RO[rows].T, x_RI[rows])
        elif not out.begun:
            out.total[expert].zero_()
    return out.total if into is None else None


def _slices(groups: RowGroups) -> Iterator[tuple[int, slice]]:
    """(expert, slice of its rows) of each expert."""
    assert groups.sizes is not None
    bounds = pairwise(accumulate(groups.sizes, initial=0))
    yield from ((expert, slice(*bound)) for expert, bound in enumerate(bounds))
