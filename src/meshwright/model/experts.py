"""The routed experts of a layer: many small gated layers, each applied to its own rows by grouped matmuls.

Shapes: R rows, D hidden, E experts on this rank, F channels of one. Rows are sorted by expert, in groups
whose sizes are multiples of ALIGN: libraries are fastest on few distinct shapes (oneDNN prepares a kernel for
each), and CUDA's grouped matmul requires aligned groups.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from meshwright.kernels.gradient_accumulation_fusion import RunningSum
from meshwright.model.expert_activations import ACTIVATIONS, ExpertActivation
from meshwright.model.hooks import ExpertsHooks
from meshwright.model.token_dispatcher import RowGroups
from meshwright.spec import MoeSpec


class Experts(nn.Module):
    """x (R, D), each row's routing weight (R,), groups -> weighted outputs (R, D).

    The routing weight multiplies the input of `down`, and its bias: the result is the same, and the weight's
    gradient does not need an expert's output. Where an expert is cut into slices, each adds its part of that
    bias to its part of the output's channels.
    """

    def __init__(self, moe: MoeSpec, hidden: int, hooks: ExpertsHooks) -> None:
        super().__init__()
        self.hooks, self.activation = hooks, ACTIVATIONS[moe.activation]
        experts, channels = moe.experts, moe.ffn
        self.gate = nn.Parameter(torch.empty(experts, channels, hidden))
        self.up = nn.Parameter(torch.empty(experts, channels, hidden))
        self.down = nn.Parameter(torch.empty(experts, hidden, channels))
        for name, size in (("gate", channels), ("up", channels), ("down", hidden)):
            bias = nn.Parameter(torch.empty(experts, size)) if moe.expert_bias else None
            self.register_parameter(f"{name}_bias", bias)

    def forward(self, x_RD: Tensor, weight_R: Tensor, groups: RowGroups) -> Tensor:
        weights = (self.gate, self.up, self.down)
        biases = (self.gate_bias, self.up_bias, self.down_bias)
        return _Experts.apply(x_RD, weight_R, *weights, *biases, groups, self.activation, self.hooks)


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
        gate_bias: nn.Parameter | None,
        up_bias: nn.Parameter | None,
        down_bias: nn.Parameter | None,
        groups: RowGroups,
        activation: ExpertActivation,
        hooks: ExpertsHooks,
    ) -> Tensor:
        operand = hooks.products.operand

        def gate_and_up() -> tuple[Tensor, Tensor]:
            rows = operand(x, "input", -1, gate)
            gates, ups = (operand(each, "weight", -1, each) for each in (gate, up))
            gate_x, up_x = grouped_mm(rows, gates, groups), grouped_mm(rows, ups, groups)
            for product, bias in ((gate_x, gate_bias), (up_x, up_bias)):
                if bias is not None:
                    add_rows_(product, bias, groups)
            return gate_x, up_x

        def outputs() -> tuple[Tensor]:
            inner = operand(activation.weighted(gate_x, up_x, weight), "input", -1, down)
            y = grouped_mm(inner, operand(down, "weight", -1, down), groups)
            if down_bias is not None:
                add_rows_(_columns(y, down_bias, hooks.slice), down_bias, groups, weight)
            return (y,)

        gate_x, up_x = hooks.cached(gate_and_up, True)
        (y,) = hooks.cached(outputs, False)
        ctx.save_for_backward(x, weight, gate_x, up_x, gate, up, down, down_bias)
        ctx.groups, ctx.hooks, ctx.activation = groups, hooks, activation
        ctx.parameters, ctx.biases = (gate, up, down), (gate_bias, up_bias, down_bias)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        # Detached, and apart from ctx: a deferred weight gradient must not keep the graph behind its inputs
        # alive.
        *saved, bias = ctx.saved_tensors
        x, weight, gate_x, up_x, gate, up, down = (each.detach() for each in saved)
        groups, products = ctx.groups, ctx.hooks.products

        def of_input(
            grad: Tensor, weight: Tensor, parameter: nn.Parameter, onto: Tensor | None = None
        ) -> Tensor:
            turned = products.operand(weight, "weight", -2, parameter).mT
            return grouped_mm(products.operand(grad, "gradient", -1, parameter), turned, groups, onto)

        of_gate, of_up, of_down = parameters = ctx.parameters
        grad_inner = of_input(grad, down, of_down)
        found = ctx.activation.backward_(grad_inner, gate_x, up_x, weight)
        grad_gate, grad_up, grad_weight, inner = found
        biased = None if bias is None else _columns(grad, bias, ctx.hooks.slice)
        if bias is not None and biased is not None:
            grad_weight += rows_times(biased, bias.detach(), groups, weight.dtype)
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
            found = list(map(weight_grad, (grad_gate, grad_up, grad), (x, x, inner), parameters))
            if biased is None:
                return found
            for each, rows in zip(ctx.biases, (grad_gate, grad_up, biased), strict=True):
                scale = weight if rows is biased else None
                found.append(sum_rows(rows, groups, scale) if each.requires_grad else None)
            return found

        given = [*parameters, *(each for each in ctx.biases if each is not None)]
        if ctx.hooks.defer(given, weight_grads):
            return grad_x, grad_weight, *[None] * 9
        gradients = weight_grads()
        return grad_x, grad_weight, *gradients, *[None] * (9 - len(gradients))


def _columns(x_RD: Tensor, bias: Tensor, number: int) -> Tensor:
    """The columns of x that the slice `number` of an expert adds its part of a bias (E, .) to."""
    size = bias.shape[1]
    return x_RD[:, number * size : (number + 1) * size]


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


# Biases ----------------------------------------------------------------------------------------------------


def add_rows_(x_RO: Tensor, bias_EO: Tensor, groups: RowGroups, weight_R: Tensor | None = None) -> None:
    """Add each expert's bias, times the rows' weights if there are any, to its rows."""
    scale = None if weight_R is None else weight_R.to(x_RO.dtype).unsqueeze(1)
    if groups.sizes is None:
        added = bias_EO[_expert_of_rows(x_RO, groups)]
        x_RO.add_(added if scale is None else added * scale)
        return
    for expert, rows in _slices(groups):
        x_RO[rows].add_(bias_EO[expert] if scale is None else bias_EO[expert] * scale[rows])


def rows_times(x_RO: Tensor, bias_EO: Tensor, groups: RowGroups, dtype: torch.dtype) -> Tensor:
    """The product of each row and its expert's bias (R,), summed in `dtype`."""
    if groups.sizes is None:
        return (x_RO * bias_EO[_expert_of_rows(x_RO, groups)]).sum(1, dtype=dtype)
    found = x_RO.new_empty(len(x_RO), dtype=dtype)
    for expert, rows in _slices(groups):
        torch.sum(x_RO[rows] * bias_EO[expert], 1, dtype=dtype, out=found[rows])
    return found


def sum_rows(x_RO: Tensor, groups: RowGroups, weight_R: Tensor | None = None) -> Tensor:
    """The sum of each expert's rows (E, O), times the rows' weights if there are any."""
    if weight_R is not None:
        x_RO = x_RO * weight_R.to(x_RO.dtype).unsqueeze(1)
    if groups.sizes is None:
        every = torch.arange(len(groups.ends), device=x_RO.device).unsqueeze(1)
        return (every == _expert_of_rows(x_RO, groups)).to(x_RO.dtype) @ x_RO
    found = x_RO.new_empty(len(groups.ends), x_RO.shape[1])
    for expert, rows in _slices(groups):
        torch.sum(x_RO[rows], 0, out=found[expert])
    return found


def _expert_of_rows(x_RO: Tensor, groups: RowGroups) -> Tensor:
    """The expert of each row (R,), from the device alone."""
    rows = torch.arange(len(x_RO), device=x_RO.device, dtype=groups.ends.dtype)
    return torch.bucketize(rows, groups.ends, right=True).clamp_(max=len(groups.ends) - 1)


def _slices(groups: RowGroups) -> Iterator[tuple[int, slice]]:
    """(expert, slice of its rows) of each expert."""
    assert groups.sizes is not None
    bounds = pairwise(accumulate(groups.sizes, initial=0))
    yield from ((expert, slice(*bound)) for expert, bound in enumerate(bounds))
