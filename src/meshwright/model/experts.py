"""The routed experts of a layer: many small gated layers, each applied to its own rows by grouped matmuls.

Shapes: R rows, D hidden, E experts on this rank, F channels of one. Rows are sorted by expert, in groups
whose sizes are multiples of ALIGN: libraries are fastest on few distinct shapes (oneDNN prepares a kernel for
each), and CUDA's grouped matmul requires aligned groups.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from meshwright.model.expert_activations import ACTIVATIONS, ExpertActivation
from meshwright.model.expert_lora import NO_ADAPTER, ExpertAdapter, NoAdapter
from meshwright.model.grouped_mm import grouped_outer, slices_of
from meshwright.model.hooks import ExpertsHooks
from meshwright.model.token_dispatcher import RowGroups
from meshwright.spec import MoeSpec


class Experts(nn.Module):
    """x (R, D), each row's routing weight (R,), groups -> weighted outputs (R, D).

    The routing weight multiplies the input of `down`, and its bias: the result is the same, and the weight's
    gradient does not need an expert's output. Where an expert is cut into slices, each adds its part of that
    bias to its part of the output's channels.
    """

    gate_adapter: ExpertAdapter | None
    up_adapter: ExpertAdapter | None
    down_adapter: ExpertAdapter | None

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
            self.register_module(f"{name}_adapter", None)

    def forward(self, x_RD: Tensor, weight_R: Tensor, groups: RowGroups) -> Tensor:
        weights = (self.gate, self.up, self.down)
        biases = (self.gate_bias, self.up_bias, self.down_bias)
        adapters = [each or NO_ADAPTER for each in (self.gate_adapter, self.up_adapter, self.down_adapter)]
        factors = [factor for adapter in adapters for factor in adapter.factors]
        if self.hooks.products.low:  # a scale is of all rows, so each has to be computed
            groups = groups.to_the_end(len(x_RD))
        how = groups, self.activation, self.hooks, adapters
        return _Experts.apply(x_RD, weight_R, *weights, *biases, *how, *factors)


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
        adapters: Sequence[NoAdapter],
        *factors: nn.Parameter,
    ) -> Tensor:
        products = hooks.products

        def gate_and_up() -> tuple[Tensor, Tensor]:
            rows = products.expert_input(x, gate, gate)
            gate_x, up_x = (products.grouped(rows, each, each, groups) for each in (gate, up))
            of_both = zip((gate_x, up_x), (gate_bias, up_bias), adapters[:2], strict=True)
            for product, bias, adapter in of_both:
                adapter.add_(product, x, groups)
                if bias is not None:
                    add_rows_(product, bias, groups)
            return gate_x, up_x

        def outputs() -> tuple[Tensor]:
            inner = products.expert_input(activation.weighted(gate_x, up_x, weight), down, down)
            y = products.grouped(inner, down, down, groups)
            adapters[2].add_(y, inner.whole, groups)
            if down_bias is not None:
                add_rows_(_columns(y, down_bias, hooks.slice), down_bias, groups, weight)
            return (y,)

        gate_x, up_x = hooks.cached(gate_and_up, True)
        (y,) = hooks.cached(outputs, False)
        ctx.save_for_backward(x, weight, gate_x, up_x, gate, up, down, down_bias)
        ctx.groups, ctx.hooks, ctx.activation = groups, hooks, activation
        ctx.parameters, ctx.biases = (gate, up, down), (gate_bias, up_bias, down_bias)
        ctx.adapters, ctx.factors = adapters, factors
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        # Detached, and apart from ctx: a deferred weight gradient must not keep the graph behind its inputs
        # alive.
        *saved, bias = ctx.saved_tensors
        x, weight, gate_x, up_x, gate, up, down = (each.detach() for each in saved)
        groups, products = ctx.groups, ctx.hooks.products

        of_gate, of_up, of_down = parameters = ctx.parameters
        gate_adapter, up_adapter, down_adapter = ctx.adapters
        grad_inner = products.grouped_of_input(grad, down, of_down, groups)
        at_down = down_adapter.input_gradient_(grad_inner, grad, groups)
        found = ctx.activation.backward_(grad_inner, gate_x, up_x, weight)
        grad_gate, grad_up, grad_weight, inner = found
        biased = None if bias is None else _columns(grad, bias, ctx.hooks.slice)
        if bias is not None and biased is not None:
            grad_weight += rows_times(biased, bias.detach(), groups, weight.dtype)
        grad_x = products.grouped_of_input(grad_gate, gate, of_gate, groups)
        grad_x = products.grouped_of_input(grad_up, up, of_up, groups, onto=grad_x)
        at_gate = gate_adapter.input_gradient_(grad_x, grad_gate, groups)
        at_up = up_adapter.input_gradient_(grad_x, grad_up, groups)
        pairs = [
            *((grad_gate, x, of_gate), (grad_up, x, of_up), (grad, inner, of_down)),
            *gate_adapter.pairs(grad_gate, x, at_gate, groups),
            *up_adapter.pairs(grad_up, x, at_up, groups),
            *down_adapter.pairs(grad, inner, at_down, groups),
        ]

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
            found = [weight_grad(*pair) for pair in pairs]
            if biased is None:
                return found
            for each, rows in zip(ctx.biases, (grad_gate, grad_up, biased), strict=True):
                scale = weight if rows is biased else None
                found.append(sum_rows(rows, groups, scale) if each.requires_grad else None)
            return found

        given = [*parameters, *ctx.factors, *(each for each in ctx.biases if each is not None)]
        if ctx.hooks.defer(given, weight_grads):
            return grad_x, grad_weight, *[None] * (10 + len(ctx.factors))
        gradients, last = weight_grads(), 3 + len(ctx.factors)
        of_biases = gradients[last:] or [None] * 3
        return grad_x, grad_weight, *gradients[:3], *of_biases, *[None] * 4, *gradients[3:last]


def _columns(x_RD: Tensor, bias: Tensor, number: int) -> Tensor:
    """The columns of x that the slice `number` of an expert adds its part of a bias (E, .) to."""
    size = bias.shape[1]
    return x_RD[:, number * size : (number + 1) * size]


# Biases ----------------------------------------------------------------------------------------------------


def add_rows_(x_RO: Tensor, bias_EO: Tensor, groups: RowGroups, weight_R: Tensor | None = None) -> None:
    """Add each expert's bias, times the rows' weights if there are any, to its rows."""
    scale = None if weight_R is None else weight_R.to(x_RO.dtype).unsqueeze(1)
    if groups.sizes is None:
        added = bias_EO[groups.expert_of_rows(len(x_RO))]
        x_RO.add_(added if scale is None else added * scale)
        return
    for expert, rows in slices_of(groups):
        x_RO[rows].add_(bias_EO[expert] if scale is None else bias_EO[expert] * scale[rows])


def rows_times(x_RO: Tensor, bias_EO: Tensor, groups: RowGroups, dtype: torch.dtype) -> Tensor:
    """The product of each row and its expert's bias (R,), summed in `dtype`."""
    if groups.sizes is None:
        return (x_RO * bias_EO[groups.expert_of_rows(len(x_RO))]).sum(1, dtype=dtype)
    found = x_RO.new_empty(len(x_RO), dtype=dtype)
    for expert, rows in slices_of(groups):
        torch.sum(x_RO[rows] * bias_EO[expert], 1, dtype=dtype, out=found[rows])
    return found


def sum_rows(x_RO: Tensor, groups: RowGroups, weight_R: Tensor | None = None) -> Tensor:
    """The sum of each expert's rows (E, O), times the rows' weights if there are any."""
    if weight_R is not None:
        x_RO = x_RO * weight_R.to(x_RO.dtype).unsqueeze(1)
    if groups.sizes is None:
        summed = grouped_outer(x_RO, x_RO.new_ones(len(x_RO), 1), groups)
        assert summed is not None
        return summed.squeeze(2)
    found = x_RO.new_empty(len(groups.ends), x_RO.shape[1])
    for expert, rows in slices_of(groups):
        torch.sum(x_RO[rows], 0, out=found[expert])
    return found
