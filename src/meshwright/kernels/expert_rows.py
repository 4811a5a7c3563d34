"""Copies of tokens between the order of tokens and that of experts: rows that are gathered, and summed.

Shapes: V rows of C channels that are gathered from, R rows that are gathered, N tokens with J copies each. An
index of -1 stands for no row: it is gathered as zeros, and adds nothing to a sum.

On CUDA each is one Triton kernel (`kernels/triton/expert_rows.py`); two tensors whose rows go side by side, a
token's channels and its weight, are one as well. Elsewhere, and in float64, they are operators of torch.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from meshwright.kernels.triton_operator import takes_triton, triton_operator

_FORMATS = (torch.bfloat16, torch.float16, torch.float32)


def takes(values: Tensor) -> bool:
    """True if a kernel gathers and sums rows of such a tensor."""
    return takes_triton(values.device) and values.dtype in _FORMATS


@triton_operator("expert_rows")
def take_rows(values_VC: Tensor, index_R: Tensor) -> Tensor:
    """The rows (R, C) of `values_VC` at `index_R`."""
    return values_VC.new_empty(len(index_R), values_VC.shape[1])


@triton_operator("expert_rows")
def pack_rows(first_VC: Tensor, index_R: Tensor, second_WD: Tensor, second_index_R: Tensor) -> Tensor:
    """The rows of two tensors of one format at an index each, side by side: (R, C + D)."""
    return first_VC.new_empty(len(index_R), first_VC.shape[1] + second_WD.shape[1])


@triton_operator("expert_rows")
def unpack_rows(packed_VW: Tensor, index_R: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """The rows at `index_R` of what `pack_rows` joined, the first `width` channels apart from the others."""
    rows, channels = len(index_R), packed_VW.shape[1]
    return packed_VW.new_empty(rows, width), packed_VW.new_empty(rows, channels - width)


@triton_operator("expert_rows")
def sum_rows(rows_VC: Tensor, index_NJ: Tensor) -> Tensor:
    """The sum (N, C) of each token's rows, added in fp32 and rounded once."""
    return rows_VC.new_empty(len(index_NJ), rows_VC.shape[1])


def gather(values: Tensor, index: Tensor, holes: bool, out: Tensor | None = None) -> Tensor:
    """The rows (R, C) of `values` at `index`, which has -1 only where there are `holes`."""
    if out is None and takes(values):
        return take_rows(values, index)
    if not holes:
        return torch.index_select(values, 0, index, out=out)
    taken = torch.index_select(values, 0, index.clamp(min=0), out=out)
    return taken.masked_fill_((index < 0).unsqueeze(1), 0)


def join(columns: Sequence[tuple[Tensor, Tensor]], holes: bool) -> Tensor:
    """The rows of several tensors of one format, at an index each, side by side."""
    if takes(columns[0][0]) and len(columns) < 3:
        return gather(*columns[0], holes) if len(columns) == 1 else pack_rows(*columns[0], *columns[1])
    widths = [values.shape[1] for values, _ in columns]
    (first, index), *_ = columns
    joined = first.new_empty(len(index), sum(widths))
    for place, (values, own) in zip(joined.split(widths, 1), columns, strict=True):
        gather(values, own, holes, place)
    return joined


def separate(joined: Tensor, widths: Sequence[int], index: Tensor, holes: bool) -> Sequence[Tensor]:
    """The rows at `index` of what `join` joined, each tensor's by themselves."""
    if takes(joined) and len(widths) == 2:
        return unpack_rows(joined, index, widths[0])
    return [gather(part, index, holes) for part in joined.split(list(widths), 1)]
