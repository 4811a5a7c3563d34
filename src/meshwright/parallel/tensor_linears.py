"""The maps of the tensor axis, with the messages before, beside and behind them (`tensor.py`).

Each is there twice: as a function that autograd knows, and as an operator of a compiled block.
Shapes: B batch, T tokens of which a rank has T/n where sequences are sharded, D channels, F those of a map.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from meshwright.parallel.collectives import (
    DONE,
    gather_matmul,
    matmul_scatter,
    start_all_gather,
    start_all_reduce,
    start_reduce_scatter,
)
from meshwright.parallel.deferred_wgrad import WeightGradStore
from meshwright.parallel.fused_comm_ops import FusedCommOp, Tensors, empty
from meshwright.parallel.mesh import Axis, Pending
from meshwright.parallel.recompute import RecomputeCache

# Whole tokens and shards of them ------------------------------------------------------------------------


def _start_gather(x: Tensor, axis: Axis) -> tuple[Tensor, Pending]:
    """(B, T/n, D) -> (B, T, D), on its way."""
    whole = x.new_empty(x.shape[0], x.shape[1] * axis.size, x.shape[2])
    return whole, start_all_gather(whole.view(-1), x.contiguous().view(-1), axis)


def _start_scatter(x: Tensor, axis: Axis) -> tuple[Tensor, Pending]:
    """The sum over the ranks of (B, T, D), cut to (B, T/n, D), on its way; `x` must live until then."""
    part = x.new_empty(x.shape[0], x.shape[1] // axis.size, x.shape[2])
    return part, start_reduce_scatter(part.view(-1), x.view(-1), axis)


def _start_sum(x: Tensor, axis: Axis, sequence: bool) -> tuple[Tensor, Pending]:
    """Contiguous (B, T, D) added over the ranks; cut to tokens with `sequence`, else in place."""
    return _start_scatter(x, axis) if sequence else (x, start_all_reduce(x, axis))


def _add_up(x: Tensor, axis: Axis, sequence: bool) -> Tensor:
    x = x.contiguous()
    found, pending = _start_sum(x, axis, sequence)
    pending.wait()
    return found


def _whole(x: Tensor, axis: Axis, sequence: bool) -> Tensor:
    if not sequence:
        return x
    whole, pending = _start_gather(x, axis)
    pending.wait()
    return whole


class EnterParallelRegion(torch.autograd.Function):
    """Into a region where each rank has all tokens and computes a part; its gradients are added."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, axis: Axis, sequence: bool, kept: RecomputeCache | None = None
    ) -> Tensor:
        ctx.axis, ctx.sequence = axis, sequence
        if not sequence:
            return x.view_as(x)
        if kept is None:
            return _whole(x, axis, True)
        (found,) = kept.run("matmul", lambda: (_whole(x, axis, True),))
        return found

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return _enter_backward(grad, ctx.axis, ctx.sequence), None, None, None


def _enter_backward(grad: Tensor, axis: Axis, sequence: bool) -> Tensor:
    # The incoming gradient may be shared, so a sum in place works on a copy.
    return _add_up(grad if sequence else grad.clone(), axis, sequence)


class LeaveParallelRegion(torch.autograd.Function):
    """Out of such a region: the parts are added, and cut to tokens when those are sharded outside."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis, sequence: bool) -> Tensor:
        ctx.axis, ctx.sequence = axis, sequence
        return _add_up(x if sequence else x.clone(), axis, sequence)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return _whole(grad, ctx.axis, ctx.sequence), None, None


class ColumnParallel(torch.autograd.Function):
    """Several linear maps of one input, each with its outputs split; keeps the rank's tokens of the input."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        axis: Axis,
        sequence: bool,
        kept: RecomputeCache,
        later: WeightGradStore,
        *maps: nn.Parameter | None,
    ) -> tuple[Tensor, ...]:
        weights, biases = maps[::2], maps[1::2]
        ctx.axis, ctx.sequence, ctx.biased = axis, sequence, [bias is not None for bias in biases]
        ctx.later, ctx.maps = later, maps
        ctx.save_for_backward(x, *weights)
        return kept.run("matmul", lambda: _columns(x, weights, biases, axis, sequence))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, *weights = ctx.saved_tensors
        axis, sequence, biased = ctx.axis, ctx.sequence, ctx.biased
        if ctx.later.open:
            flat = [grad.flatten(0, -2) for grad in grads]
            found = _add_up(_input_gradient(flat, weights, grads[0]), axis, sequence)
            x = x.detach()  # with the graph behind it, or in `ctx`, the stage's input would wait, too
            ctx.later.put(ctx.maps, lambda: _in_turn(_of_maps(flat, _whole(x, axis, sequence), biased)))
            return found, *[None] * (4 + len(ctx.maps))
        grad_x, of_maps = _columns_backward(x, weights, biased, grads, axis, sequence)
        return grad_x, *[None] * 4, *_in_turn(of_maps)


OfMaps = tuple[list[Tensor], list[Tensor | None]]
"""The gradient of each map's weight, and of its bias if it has one."""


def _in_turn(of_maps: OfMaps) -> list[Tensor | None]:
    """Each map's weight and bias, one after the other."""
    return [grad for pair in zip(*of_maps, strict=True) for grad in pair]


def _columns(
    x: Tensor, weights: Sequence[Tensor | None], biases: Sequence[Tensor | None], axis: Axis, sequence: bool
) -> tuple[Tensor, ...]:
    whole = _whole(x, axis, sequence)
    return tuple(
        F.linear(whole, weight, bias)  # type: ignore[arg-type]
        for weight, bias in zip(weights, biases, strict=True)
    )


def _columns_backward(
    x: Tensor,
    weights: Sequence[Tensor],
    biased: Sequence[bool],
    grads: Sequence[Tensor],
    axis: Axis,
    sequence: bool,
) -> tuple[Tensor, OfMaps]:
    """The gradients of the input, and of the maps."""
    whole, arriving = _start_gather(x, axis) if sequence else (x, DONE)
    flat = [grad.flatten(0, -2) for grad in grads]
    grad_x = _input_gradient(flat, weights, grads[0])
    arriving.wait()
    found, leaving = _start_sum(grad_x, axis, sequence)
    of_maps = _of_maps(flat, whole, biased)
    leaving.wait()
    return found, of_maps


def _input_gradient(flat: Sequence[Tensor], weights: Sequence[Tensor], like_BTF: Tensor) -> Tensor:
    """(B, T, D): the sum of the maps' gradients (N, F) times their weights (F, D)."""
    found = flat[0] @ weights[0]
    for grad, weight in zip(flat[1:], weights[1:], strict=True):
        found.addmm_(grad, weight)
    return found.view(*like_BTF.shape[:-1], -1)


def _of_maps(flat: Sequence[Tensor], whole: Tensor, biased: Sequence[bool]) -> OfMaps:
    inputs = whole.flatten(0, -2)
    of_biases = [grad.sum(0) if has_bias else None for grad, has_bias in zip(flat, biased, strict=True)]
    return [grad.T @ inputs for grad in flat], of_biases


class RowParallel(torch.autograd.Function):
    """A linear map whose inputs are split: its products are added over the ranks."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: nn.Parameter,
        axis: Axis,
        sequence: bool,
        kept: RecomputeCache,
        read_again: bool,
        later: WeightGradStore,
    ) -> Tensor:
        ctx.axis, ctx.sequence, ctx.later, ctx.weight = axis, sequence, later, weight
        ctx.save_for_backward(x, weight)
        (found,) = kept.run("matmul", lambda: (_rows(x, weight, axis, sequence),), read_again)
        return found

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        if ctx.later.open:
            whole, x = _whole(grad, ctx.axis, ctx.sequence).flatten(0, -2), x.detach()
            ctx.later.put((ctx.weight,), lambda: [whole.T @ x.flatten(0, -2)])
            return (whole @ weight).view(x.shape), *[None] * 6
        return *_rows_backward(x, weight, grad, ctx.axis, ctx.sequence), *[None] * 5


def _rows(x: Tensor, weight: Tensor, axis: Axis, sequence: bool) -> Tensor:
    return _add_up(F.linear(x, weight), axis, sequence)


def _rows_backward(
    x: Tensor, weight: Tensor, grad: Tensor, axis: Axis, sequence: bool
) -> tuple[Tensor, Tensor]:
    whole = _whole(grad, axis, sequence).flatten(0, -2)
    return (whole @ weight).view(x.shape), whole.T @ x.flatten(0, -2)


# The same maps as operators of a compiled block ---------------------------------------------------------


class _FusedLinear(FusedCommOp):
    kind = "matmul"

    def __init__(self, axis: Axis, sequence: bool, fused: bool) -> None:
        """`fused`: products overlap with their own messages where they can; else with each other's."""
        super().__init__()
        self._axis, self._sequence, self._fused = axis, sequence, fused


class FusedColumnParallel(_FusedLinear):
    """`ColumnParallel` of (x, weight of each map, bias of each map or none)."""

    def forward(self, inputs: Tensors) -> Tensors:
        weights, biases = self._maps(inputs)
        if self._fused:
            x = inputs[0]
            _, products = gather_matmul(x.flatten(0, 1), [weight.T for weight in weights], self._axis)
            wholes = [product.view(x.shape[0], -1, product.shape[1]) for product in products]
            return [whole + bias for whole, bias in zip(wholes, biases, strict=True)] if biases else wholes
        return _columns(inputs[0], weights, biases or [None] * len(weights), self._axis, self._sequence)

    def keep(self, inputs: Tensors, results: Tensors) -> Tensors:
        return inputs[: 1 + len(results)]

    def backward(self, kept: Tensors, grads: Tensors, inputs: int) -> Tensors:
        x, *weights = kept
        biased = [inputs > len(kept)] * len(weights)
        grad_x, (of_weights, of_biases) = _columns_backward(
            x, weights, biased, grads, self._axis, self._sequence
        )
        return [grad_x, *of_weights, *(grad for grad in of_biases if grad is not None)]

    def results_like(self, inputs: Tensors) -> Tensors:
        batch, length, _ = inputs[0].shape
        length = length * self._axis.size if self._sequence else length
        return [empty(inputs[0], batch, length, weight.shape[0]) for weight in self._maps(inputs)[0]]

    def gradients_like(self, kept: Tensors, grads: Tensors, inputs: int) -> Tensors:
        biases = [empty(weight, weight.shape[0]) for weight in kept[1:]] if inputs > len(kept) else []
        return [*map(empty, kept), *biases]

    def _maps(self, inputs: Tensors) -> tuple[list[Tensor], list[Tensor]]:
        """Weights, and biases if there are any."""
        return [x for x in inputs[1:] if x.ndim == 2], [x for x in inputs[1:] if x.ndim == 1]


class FusedRowParallel(_FusedLinear):
    """`RowParallel` of (x, weight)."""

    def forward(self, inputs: Tensors) -> Tensors:
        x, weight = inputs
        if self._fused:
            part = matmul_scatter(x.flatten(0, 1), weight.T, self._axis)
            return [part.view(x.shape[0], -1, part.shape[1])]
        return [_rows(x, weight, self._axis, self._sequence)]

    def keep(self, inputs: Tensors, results: Tensors) -> Tensors:
        return inputs

    def backward(self, kept: Tensors, grads: Tensors, inputs: int) -> Tensors:
        x, weight = kept
        if self._fused:
            whole, (grad_x,) = gather_matmul(grads[0].flatten(0, 1), [weight], self._axis, keep=True)
            assert whole is not None
            return grad_x.view(x.shape), whole.T @ x.flatten(0, 1)
        return _rows_backward(x, weight, grads[0], self._axis, self._sequence)

    def results_like(self, inputs: Tensors) -> Tensors:
        batch, length, _ = inputs[0].shape
        length = length // self._axis.size if self._sequence else length
        return [empty(inputs[0], batch, length, inputs[1].shape[0])]

    def gradients_like(self, kept: Tensors, grads: Tensors, inputs: int) -> Tensors:
        return [*map(empty, kept)]


class FusedEnterParallelRegion(_FusedLinear):
    """`EnterParallelRegion` of (x,)."""

    def forward(self, inputs: Tensors) -> Tensors:
        (x,) = inputs
        return [_whole(x, self._axis, True) if self._sequence else x.clone()]

    def keep(self, inputs: Tensors, results: Tensors) -> Tensors:
        return []

    def backward(self, kept: Tensors, grads: Tensors, inputs: int) -> Tensors:
        return [_enter_backward(grads[0], self._axis, self._sequence)]

    def results_like(self, inputs: Tensors) -> Tensors:
        batch, length, channels = inputs[0].shape
        return [empty(inputs[0], batch, length * self._axis.size if self._sequence else length, channels)]

    def gradients_like(self, kept: Tensors, grads: Tensors, inputs: int) -> Tensors:
        batch, length, channels = grads[0].shape
        return [empty(grads[0], batch, length // self._axis.size if self._sequence else length, channels)]
