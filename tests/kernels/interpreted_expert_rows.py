"""Kernels of the rows of experts beside float64, for tests whose process interprets kernels."""

from __future__ import annotations

import torch
from torch import Tensor


def drawn(dtype: torch.dtype, *shape: int) -> Tensor:
    """Normal numbers."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def index(most: int, *shape: int) -> Tensor:
    """Rows below `most`, of which some are -1."""
    return torch.randint(-1, most, shape, generator=torch.Generator().manual_seed(most))


def taken(values: Tensor, index: Tensor) -> Tensor:
    """The rows, zeros for -1, by torch's operators."""
    return values[index.clamp(min=0)].masked_fill((index < 0).unsqueeze(1), 0)


def moves_are_exact(dtype: torch.dtype, channels: int, others: int) -> None:
    """Rows are moved without a change, also out of and into tensors whose rows lie apart."""
    from meshwright.kernels.triton import expert_rows as subject

    values, second = drawn(dtype, 23, channels + 3)[:, :channels], drawn(dtype, 40, others)
    own, its = index(23, 57), index(40, 57)
    assert torch.equal(subject.take_rows(values, own), taken(values, own))
    joined = subject.pack_rows(values, own, second, its)
    assert torch.equal(joined, torch.cat([taken(values, own), taken(second, its)], 1))
    back = index(57, 90)
    parts = subject.unpack_rows(joined, back, channels)
    assert torch.equal(torch.cat(parts, 1), taken(joined, back))
    assert all(part.is_contiguous() for part in parts)


def sums_are_those_of_float64(dtype: torch.dtype, channels: int, copies: int) -> float:
    """The largest difference of sums from float64's, in units of the last place of the largest."""
    from meshwright.kernels.triton import expert_rows as subject

    rows, each = drawn(dtype, 61, channels + 5)[:, :channels], index(61, 33, copies)
    found = subject.sum_rows(rows, each)
    exact = sum(taken(rows.double(), each[:, copy]) for copy in range(copies))
    assert isinstance(exact, Tensor) and found.dtype == dtype
    return float((found.double() - exact).abs().max() / exact.abs().max() / torch.finfo(dtype).eps)
