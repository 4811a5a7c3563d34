"""Adapters of linear layers that tensor ranks split (Hu et al. 2021, LoRA; `spec/lora.py`).

Splits        B of a column-parallel layer by its outputs, A of a row-parallel one by its inputs, as the
              weights beside them. The others are whole on each rank, where their gradients are summed like
              those of norms.
Wire          for N tokens and rank r, b bytes to compute in, f = (n-1)/n. A column-parallel layer's A x
              enters its region as the layer's input does, and a row-parallel layer's leaves it as the output:
                sequence sharded   forward an all-gather or a reduce-scatter of N r b f, backward the other
                otherwise          an all-reduce of 2 N r b f, in the forward of row-parallel layers and in
                                   the backward of column-parallel ones
              Adapters of one input enter in one message.
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

from meshwright.comm.mesh import Axis
from meshwright.model.hooks import Project
from meshwright.model.linear import Linear
from meshwright.model.lora import LoraLinear
from meshwright.parallel.tensor_linears import TensorLinears


def without_adapters(x: Tensor, linears: Sequence[Linear]) -> tuple[Tensor, ...]:
    """Apply each of `linears` to x (..., inputs), but not the adapters that they may have."""
    return tuple(F.linear(x, linear.weight, linear.bias) for linear in linears)


class TensorAdapters:
    """The linear layers of `split`, with the adapters that some of them have.

    `whole` applies layers that every rank of the axis holds, without adapters.
    """

    def __init__(self, split: TensorLinears, whole: Project, axis: Axis) -> None:
        self._split, self._whole, self._axis = split, whole, axis

    def project(self, x_BTD: Tensor, linears: Sequence[Linear]) -> tuple[Tensor, ...]:
        """Column-parallel layers of one input: (B, T/n or T, D) -> (B, T, F/n) each."""
        outputs = self._split.project(x_BTD, linears)
        return self._added(x_BTD, linears, outputs, self._split.gather if self._axis.size > 1 else None)

    def project_whole(self, x_BTD: Tensor, linears: Sequence[Linear]) -> tuple[Tensor, ...]:
        """Layers that every rank holds, of one input: (B, T/n or T, D) -> (B, T/n or T, F) each."""
        return self._added(x_BTD, linears, self._whole(x_BTD, linears), None)

    def output(self, x_BTF: Tensor, linear: Linear) -> Tensor:
        """A row-parallel layer: (B, T, F/n) -> (B, T/n or T, D)."""
        return self._plus_row(x_BTF, linear, self._split.output(x_BTF, linear))

    def last_output(self, x_BTF: Tensor, linear: Linear) -> Tensor:
        """`output` for the last layer of a block, whose result no recomputing forward of the block reads."""
        return self._plus_row(x_BTF, linear, self._split.last_output(x_BTF, linear))

    def _added(
        self,
        x: Tensor,
        linears: Sequence[Linear],
        outputs: tuple[Tensor, ...],
        enter: Callable[[Tensor], Tensor] | None,
    ) -> tuple[Tensor, ...]:
        """The outputs, and what the adapters of one input add to them."""
        adapted = [linear for linear in linears if isinstance(linear, LoraLinear) and linear.enabled]
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
            y + added[linear] if linear in added else y for y, linear in zip(outputs, linears, strict=True)
        )

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
        return y_BTD + self._whole(linear.scale * low, [linear.lora_b])[0]
