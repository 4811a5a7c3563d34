"""Triton kernels with known faults, for the tests of what tests kernels."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from meshwright.kernels.triton.specialisation import Specialisation


@triton.jit
def _scale_rows(x, out, columns, BLOCK: tl.constexpr, ROWS: tl.constexpr):
    """Each row divided by its sum, `ROWS` rows of up to `BLOCK` columns at once."""
    rows, at = tl.arange(0, ROWS)[:, None], tl.arange(0, BLOCK)[None, :]
    inside = at < columns
    row = tl.load(x + rows * columns + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + rows * columns + at, row / tl.sum(row, 1)[:, None], mask=inside)


def case(rows: int, block: int) -> Specialisation:
    """The kernel of one warp, which spills where rows times columns exceed its registers."""
    types = {"x": "*bf16", "out": "*fp32", "columns": "i32"}
    constants = {"BLOCK": block, "ROWS": rows}
    return Specialisation(_scale_rows, types, constants, num_warps=1, aligned=("x", "out"))


def scaled_by_interpreter(rows: int, columns: int) -> Tensor:
    """The largest difference between the interpreted kernel and float64."""
    x = torch.rand(rows, columns, generator=torch.Generator().manual_seed(1)).bfloat16()
    out = torch.empty(rows, columns)
    _scale_rows[(1,)](x, out, columns, BLOCK=triton.next_power_of_2(columns), ROWS=rows)
    exact = x.double() / x.double().sum(1, keepdim=True)
    return (out - exact).abs().max()
