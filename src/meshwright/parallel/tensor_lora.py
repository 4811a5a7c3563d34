"""Adapters of linear layers that tensor ranks split (Hu et al. 2021, LoRA; `spec/lora.py`).

Splits        B of a column-parallel layer by its outputs, A of a row-parallel one by its inputs, as the
              weights beside them. The others are whole on each rank, where their gradients are summed like
              those of norms.
Wire          for N tokens and rank r, b bytes to compute in, f = (n-1)/n. A column-parallel layer's A x
              enters its region as the layer's input does, and a row-parallel layer's leaves it as the output:
                sequence sharded   forward an all-gather or a reduce-scatter of N r b f, backward the other
                otherwise          an all-reduce of 2 N r b f, in the forward of row-parallel layers and in
                                   the backward of column-parallel ones
              Adapters of one input enter in one message. A row-parallel layer with magnitudes (Liu et al.
              2024, DoRA) sums the squares of its O rows' lengths in each forward, an all-reduce of 2 O b f in
              at least fp32; with dropout its product with what is left of the input leaves by itself, too.
Saves         as the layers beside them: that half of the adapters which is split.

What crosses a link is the product with A, of r channels, and never the layer's input a second time: A of a
column-parallel layer is applied to the tokens that a rank has outside the region. So where the weight itself
is frozen, its backward gathers nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from meshwright.comm.collectives import start_all_reduce
from meshwright.comm.mesh import Axis
from meshwright.model.hooks import Project
from meshwright.model.linear import Linear
from meshwright.model.lora import LoraLinear
from meshwright.parallel.fused_comm_ops import FusedCommOp, Parameters, Tensors, empty
from meshwright.parallel.recompute_cache import RecomputeCache
from meshwright.parallel.tensor_linears import TensorLinears


def without_adapters(x: Tensor, linears: Sequence[Linear]) -> tuple[Tensor, ...]:
    """Apply each of `linears` to x (..., inputs), but not the adapters that they may have."""
    return tuple(F.linear(x, linear.weight, linear.bias) for linear in linears)


class SumOfSquares(FusedCommOp):
    """Squares (O,) of the parts of rows that a rank has -> those of whole rows, which have no gradient."""

    kind = "matmul"

    def __init__(self, axis: Axis, cache: RecomputeCache | None) -> None:
        super().__init__(cache)
        self._axis = axis

    def forward(self, inputs: Tensors) -> Tensors:
        total = inputs[0].clone()
        start_all_reduce(total, self._axis).wait()
        return [total]

    def keep(self, inputs: Tensors, results: Tensors) -> Tensors:
        return []

    def backward(self, saved: Tensors, grads: Tensors, parameters: Parameters = ()) -> Tensors:
        return []

    def results_like(self, inputs: Tensors) -> Tensors:
        return [empty(inputs[0])]


class TensorAdapters:
    """The linear layers of `split`, with the adapters that some of them have.

    `whole` applies layers that every rank of the axis holds, without adapters.
    """

    def __init__(
        self, split: TensorLinears, whole: Project, axis: Axis, cache: RecomputeCache | None
    ) -> None:
        self._split, self._whole, self._axis = split, whole, axis
        self._sum = SumOfSquares(axis, cache)

    def project(self, x_BTD: Tensor, linears: Sequence[Linear]) -> tuple[Tensor, ...]:
        """Column-parallel layers of one input: (B, T/n or T, D) -> (B, T, F/n) each."""
        enter = self._split.gather if self._axis.size > 1 else None
        return self._adapted(x_BTD, linears, self._split.project, enter)

    def project_whole(self, x_BTD: Tensor, linears: Sequence[Linear]) -> tuple[Tensor, ...]:
        """Layers that every rank holds, of one input: (B, T/n or T, D) -> (B, T/n or T, F) each."""
        return self._adapted(x_BTD, linears, self._whole, None)

    def output(self, x_BTF: Tensor, linear: Linear) -> Tensor:
        """A row-parallel layer: (B, T, F/n) -> (B, T/n or T, D)."""
        return self._plus_row(x_BTF, linear, self._split.output(x_BTF, linear))

    def last_output(self, x_BTF: Tensor, linear: Linear) -> Tensor:
        """`output` for the last layer of a block, whose result no recomputing forward of the block reads,
        unless its rows are rescaled."""
        if isinstance(linear, LoraLinear) and linear.enabled and linear.rescales:
            return self.output(x_BTF, linear)
        return self._plus_row(x_BTF, linear, self._split.last_output(x_BTF, linear))

    def _adapted(
        self,
        x: Tensor,
        linears: Sequence[Linear],
        project: Project,
        enter: Callable[[Tensor], Tensor] | None,
    ) -> tuple[Tensor, ...]:
        """The outputs of `project`, and what the adapters of one input make of them."""
        adapted = [linear for linear in linears if isinstance(linear, LoraLinear) and linear.enabled]
        if any(linear.rescales and linear.dropout.active for linear in adapted):
            outputs, bases = self._with_dropped(x if enter is None else enter(x), linears, adapted)
        else:
            outputs = project(x, linears)
            bases = dict(zip(linears, outputs, strict=True))
        if not adapted:
            return outputs
        low = self._products_with_a(x, adapted)
        low = tuple(linear.scale * each for linear, each in zip(adapted, low, strict=True))
        if enter is not None:
            low = enter(torch.cat(low, -1)).split([each.shape[-1] for each in low], -1)
        added = {
            linear: self._whole(each, [linear.lora_b])[0] for linear, each in zip(adapted, low, strict=True)
        }
        return tuple(
            linear.joined(y, added[linear], bases[linear])
            if isinstance(linear, LoraLinear) and linear in added
            else y
            for y, linear in zip(outputs, linears, strict=True)
        )

    def _with_dropped(
        self, x: Tensor, linears: Sequence[Linear], adapted: Sequence[LoraLinear]
    ) -> tuple[tuple[Tensor, ...], dict[Linear, Tensor]]:
        """The layers' outputs for x, which has entered the region, and for what dropout leaves of it: so no
        second input is sent."""
        dropped = {linear: linear.dropout(x, shard=self._axis.rank) for linear in adapted}
        bases = dict[Linear, Tensor]()
        for linear, given in dropped.items():
            (bases[linear],) = without_adapters(given, [linear])
        return without_adapters(x, linears), bases

    def _products_with_a(self, x: Tensor, adapted: Sequence[LoraLinear]) -> tuple[Tensor, ...]:
        """A x of each adapter, of the same x if nothing is dropped."""
        given = [linear.dropout(x, shard=self._axis.rank) for linear in adapted]
        if all(each is x for each in given):
            return self._whole(x, [linear.lora_a for linear in adapted])
        return tuple(
            self._whole(each, [linear.lora_a])[0] for each, linear in zip(given, adapted, strict=True)
        )

    def _plus_row(self, x_BTF: Tensor, linear: Linear, y_BTD: Tensor) -> Tensor:
        if not isinstance(linear, LoraLinear) or not linear.enabled:
            return y_BTD
        dropped = linear.dropout(x_BTF, first=self._axis.rank * x_BTF.shape[-1])
        low = self._split.output(dropped, linear.lora_a)
        added = self._whole(linear.scale * low, [linear.lora_b])[0]
        drops = linear.rescales and dropped is not x_BTF
        base = self._split.output(dropped, linear) if drops else y_BTD
        return linear.joined(y_BTD, added, base, self._whole_rows)

    def _whole_rows(self, squares: Tensor) -> Tensor:
        """Squares of the lengths of rows whose inputs the ranks share."""
        return self._sum(squares)[0] if self._axis.size > 1 else squares
