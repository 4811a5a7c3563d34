"""Products of rows that are sorted by expert with each expert's matrix, and with each expert's rows.

Shapes: R rows, E experts on this rank, I inputs and O outputs of a matrix. Groups of rows have sizes that are
multiples of ALIGN.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate, pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from meshwright.kernels.gradient_accumulation_fusion import RunningSum
from meshwright.model.token_dispatcher import RowGroups

WORD = 8
"""Numbers of bf16 that rows of CUDA's kernel are multiples of: 16 bytes."""


def one_kernel(x: Tensor) -> bool:
    """True if one kernel, which takes the groups' ends from the device, computes all experts of such rows."""
    return x.device.type == "cuda" and x.dtype == torch.bfloat16


def grouped_mm(x_RI: Tensor, weight_EOI: Tensor, groups: RowGroups, onto: Tensor | None = None) -> Tensor:
    """Each expert's rows x (., I) times the transpose of its weight (O, I): (R, O), added to `onto` in its
    memory."""
    if one_kernel(x_RI) and len(x_RI):
        outputs = weight_EOI.shape[1]
        weight = _aligned(weight_EOI, -1, -2)
        product = torch._grouped_mm(_aligned(x_RI, -1), weight.mT, offs=groups.ends)[:, :outputs]
        return product if onto is None else onto.add_(product)
    out = x_RI.new_empty(x_RI.shape[0], weight_EOI.shape[1]) if onto is None else onto
    for expert, rows in slices_of(groups):
        RunningSum(out[rows], onto is not None).add_product(x_RI[rows], weight_EOI[expert].T)
    return out


def grouped_outer(
    grad_RO: Tensor, x_RI: Tensor, groups: RowGroups, into: RunningSum | None = None
) -> Tensor | None:
    """Weight gradients: the product of each expert's gradients and inputs: (E, O, I), or None if added
    `into` a sum."""
    if one_kernel(grad_RO) and len(grad_RO):
        product = torch._grouped_mm(_aligned(grad_RO, -1).T, _aligned(x_RI, -1), offs=groups.ends)
        product = product[:, : grad_RO.shape[1], : x_RI.shape[1]]
        if into is None:
            return product
        into.add(product)
        return None
    out = into or RunningSum(grad_RO.new_empty(len(groups.ends), grad_RO.shape[1], x_RI.shape[1]), False)
    for expert, rows in slices_of(groups):
        if rows.start < rows.stop:
            RunningSum(out.total[expert], out.begun).add_product(grad_RO[rows].T, x_RI[rows])
        elif not out.begun:
            out.total[expert].zero_()
    return out.total if into is None else None


def _aligned(x: Tensor, *dims: int) -> Tensor:
    """x with zeros behind these dims, up to multiples of WORD; x itself where there is nothing to add."""
    added = [-x.shape[dim] % WORD if dim in dims else 0 for dim in range(-1, -x.dim() - 1, -1)]
    return F.pad(x, [each for size in added for each in (0, size)]) if any(added) else x


def slices_of(groups: RowGroups) -> Iterator[tuple[int, slice]]:
    """(expert, slice of its rows) of each expert."""
    assert groups.sizes is not None
    bounds = pairwise(accumulate(groups.sizes, initial=0))
    yield from ((expert, slice(*bound)) for expert, bound in enumerate(bounds))
