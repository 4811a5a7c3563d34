# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
"""Rows of tokens gathered for their experts, and summed on the way back (`kernels/expert_rows.py`).

A program has one row, and goes through its channels in blocks: rows are read and written once.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from meshwright.kernels.triton.specialisation import Specialisation

BLOCK = 2048
"""Channels that a program takes at once at most."""


@triton.jit
def _move_rows(
    first,
    index,
    out,
    columns,
    stride,
    out_stride,
    second,
    second_index,
    second_out,
    second_columns,
    second_stride,
    second_out_stride,
    BLOCK: tl.constexpr,
    SECOND: tl.constexpr,
):
    """A row of `first`, and of `second` where SECOND is not 0, to where they go; zeros for an index of -1."""
    row = tl.program_id(0).to(tl.int64)
    source = tl.load(index + row)
    at = tl.arange(0, BLOCK)
    for start in range(0, columns, BLOCK):
        inside = start + at < columns
        numbers = tl.load(first + source * stride + start + at, mask=inside & (source >= 0), other=0.0)
        tl.store(out + row * out_stride + start + at, numbers, mask=inside)
    if SECOND > 0:
        source = tl.load(second_index + row)
        at = tl.arange(0, SECOND)
        inside = at < second_columns
        numbers = tl.load(second + source * second_stride + at, mask=inside & (source >= 0), other=0.0)
        tl.store(second_out + row * second_out_stride + at, numbers, mask=inside)


@triton.jit
def _sum_rows(rows, index, out, columns, stride, COPIES: tl.constexpr, BLOCK: tl.constexpr):
    """The sum of the COPIES rows of a token in fp32; none for an index of -1."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    for start in range(0, columns, BLOCK):
        inside = start + at < columns
        total = tl.zeros((BLOCK,), tl.float32)
        for copy in tl.static_range(COPIES):
            source = tl.load(index + row * COPIES + copy)
            held = inside & (source >= 0)
            total += tl.load(rows + source * stride + start + at, mask=held, other=0.0).to(tl.float32)
        tl.store(out + row * columns + start + at, total.to(out.dtype.element_ty), mask=inside)


def take_rows(values: Tensor, index: Tensor) -> Tensor:
    """The rows of `values` at `index`."""
    values, index = _plain(values), index.contiguous()
    out = values.new_empty(len(index), values.shape[1])
    _move(values, index, out, None)
    return out


def pack_rows(first: Tensor, index: Tensor, second: Tensor, second_index: Tensor) -> Tensor:
    """The rows of two tensors at an index each, side by side."""
    first, second = _plain(first), _plain(second)
    joined = first.new_empty(len(index), first.shape[1] + second.shape[1])
    own, others = joined.split([first.shape[1], second.shape[1]], 1)
    _move(first, index.contiguous(), own, (second, second_index.contiguous(), others))
    return joined


def unpack_rows(packed: Tensor, index: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """The rows at `index`, the first `width` channels apart from the others."""
    packed, index = _plain(packed), index.contiguous()
    first, second = packed.split([width, packed.shape[1] - width], 1)
    outs = tuple(packed.new_empty(len(index), part.shape[1]) for part in (first, second))
    _move(first, index, outs[0], (second, index, outs[1]))
    return outs[0], outs[1]


def sum_rows(rows: Tensor, index: Tensor) -> Tensor:
    """The sum of the rows at each row of `index`."""
    rows, index = _plain(rows), index.contiguous()
    tokens, copies = index.shape
    out = rows.new_empty(tokens, rows.shape[1])
    if out.numel():
        block = min(BLOCK, triton.next_power_of_2(rows.shape[1]))
        _sum_rows[(tokens,)](rows, index, out, rows.shape[1], rows.stride(0), COPIES=copies, BLOCK=block)
    return out


def _move(values: Tensor, index: Tensor, out: Tensor, second: tuple[Tensor, Tensor, Tensor] | None) -> None:
    """Move the rows of one tensor, or of a `second` one too, of which there are (values, index, out)."""
    if not len(index):
        return
    others, other_index, other_out = (values, index, out) if second is None else second
    columns = values.shape[1]
    _move_rows[(len(index),)](
        values, index, out, columns, values.stride(0), out.stride(0),
        others, other_index, other_out, others.shape[1], others.stride(0), other_out.stride(0),
        BLOCK=min(BLOCK, triton.next_power_of_2(columns)),
        SECOND=0 if second is None else triton.next_power_of_2(others.shape[1]),
    )  # fmt: skip


def _plain(values: Tensor) -> Tensor:
    """`values` with the channels of a row next to each other."""
    return values if values.stride(1) == 1 else values.contiguous()


def _types(format: str) -> dict[str, str]:
    pointers = dict.fromkeys(("first", "out", "second", "second_out"), format)
    sizes = ("columns", "stride", "out_stride", "second_columns", "second_stride", "second_out_stride")
    return pointers | {"index": "*i64", "second_index": "*i64"} | dict.fromkeys(sizes, "i32")


_ALIGNED = "first", "index", "out", "columns", "stride", "second_index"
SPECIALISATIONS = [
    *(
        Specialisation(_move_rows, _types(format), {"BLOCK": BLOCK, "SECOND": second}, aligned=_ALIGNED)
        for format, second in (("*bf16", 0), ("*bf16", 2), ("*fp16", 2), ("*fp32", 1))
    ),
    *(
        Specialisation(
            _sum_rows,
            {"rows": format, "index": "*i64", "out": format, "columns": "i32", "stride": "i32"},
            {"COPIES": copies, "BLOCK": BLOCK},
            aligned=("rows", "index", "out", "columns"),
        )
        for format, copies in (("*bf16", 2), ("*bf16", 8), ("*fp16", 2), ("*fp32", 8))
    ),
]
