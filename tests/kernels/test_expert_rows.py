"""Rows gathered for experts and summed on the way back, by Triton kernels and by torch's operators."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from interpreted_expert_rows import drawn, index, moves_are_exact, sums_are_those_of_float64, taken

from meshwright.kernels import expert_rows

FORMATS = [torch.bfloat16, torch.float16, torch.float32]


@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize(("channels", "others"), [(64, 2), (2100, 1), (1, 6)])
def test_kernels_move_rows_unchanged(
    interpreted: Callable[..., Any], dtype: torch.dtype, channels: int, others: int
) -> None:
    interpreted(moves_are_exact, dtype, channels, others)


@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize(("channels", "copies"), [(64, 1), (2100, 2), (7, 8), (1, 4)])
def test_kernels_sum_rows_in_fp32(
    interpreted: Callable[..., Any], dtype: torch.dtype, channels: int, copies: int
) -> None:
    assert interpreted(sums_are_those_of_float64, dtype, channels, copies) < 1


@pytest.mark.parametrize("dtype", [*FORMATS, torch.float64])
def test_operators_join_and_separate_what_was_joined(dtype: torch.dtype) -> None:
    first, second, third = (drawn(dtype, 20, width) for width in (5, 1, 4))
    columns = [(each, index(20, 31)) for each in (first, second, third)]
    joined = expert_rows.join(columns, holes=True)
    assert torch.equal(joined, torch.cat([taken(*column) for column in columns], 1))
    parts = expert_rows.separate(joined, [5, 1, 4], index(31, 9), holes=True)
    assert torch.equal(torch.cat([*parts], 1), taken(joined, index(31, 9)))
