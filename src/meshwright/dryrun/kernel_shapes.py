"""The products and the attention of a trace: shapes, formats and floating-point operations."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils.flop_counter import flop_registry

from meshwright.planner.cost.breakdown import Product

_aten = torch.ops.aten
_NO_FORMULA = (_aten._grouped_mm, _aten._scaled_grouped_mm, _aten._scaled_mm_v2)
"""Products of which torch has no formula."""
FORMATS = {
    torch.float64: "fp64", torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16",
    torch.float8_e4m3fn: "fp8", torch.float8_e5m2: "fp8", torch.float4_e2m1fn_x2: "fp4",
}  # fmt: skip
"""Formats of operands, by the names that devices have peaks for."""
EVEN_ROWS = "even_rows"
"""Attribute of the ends of groups of rows: how many rows even routing fills."""


@dataclass(frozen=True, slots=True)
class KernelWork:
    """The work of a matrix product or of attention; FLOPs are two for a multiplication that is added."""

    format: str
    flops: float
    """Those that are executed: of causal attention the half that its mask leaves."""
    product: Product | None = None
    """The shape of a matrix product; None for attention."""
    kernel: str = ""
    """The kernel of attention: "cudnn", "flash" of any release, or "flash1" for one as memory-efficient."""
    length: float = 0.0
    """Tokens of a sequence, or of a document where several are told apart."""
    backward: bool = False
    channels: float = 128.0
    """The mean of the channels of a head's keys and values, of attention."""


def counted_flops(func: Any, args: Any, kwargs: Any, result: Any) -> int:
    """Floating-point operations by torch's formulas, attention's without regard to its mask."""
    if func.overloadpacket in _NO_FORMULA:
        left, right = _computed(args[:2], args, kwargs)
        return 2 * left.numel() * right[-1]
    formula = flop_registry.get(func.overloadpacket) or flop_registry.get(func)
    args = [each for each in args if not isinstance(each, torch.dtype)]  # of products in another format
    return int(formula(*args, **kwargs, out_val=result)) if formula is not None else 0


def work_of(func: Any, args: Any, kwargs: Any, flops: int) -> KernelWork | None:
    """The work of an operator with so many FLOPs; None for one without products."""
    if not flops:
        return None
    name = func.name()
    if "attention" in name:
        return _attention(func, args, kwargs, flops)
    tensors = [leaf for leaf in pytree.tree_leaves(args) if isinstance(leaf, Tensor)]
    shape = _SHAPES.get(name.partition("::")[2].partition(".")[0], _last_two)
    operands = shape(tensors)
    return KernelWork(
        FORMATS.get(operands[0].dtype, "bf16"), flops, _product(*_computed(operands, args, kwargs))
    )


def _first_two(tensors: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    return tensors[0], tensors[1]


def _last_two(tensors: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """The operands of a product that may be added to a tensor before them."""
    return tensors[-2], tensors[-1]


_SHAPES: dict[str, Callable[[Sequence[Tensor]], tuple[Tensor, Tensor]]] = {
    "_grouped_mm": _first_two,
    "_scaled_grouped_mm": _first_two,
    "_scaled_mm": _first_two,
    "_scaled_mm_v2": _first_two,
}
"""Operators of products with further tensors behind their operands."""


def _computed(operands: Sequence[Tensor], args: Any, kwargs: Any) -> tuple[torch.Size, torch.Size]:
    """The shapes of two operands, without rows behind those of the last group where their number is known."""
    left, right = (each.shape for each in operands)
    if operands[0].dtype is torch.float4_e2m1fn_x2:  # two numbers in a byte
        left = torch.Size((*left[:-1], 2 * left[-1]))
    known = (getattr(each, EVEN_ROWS, None) for each in (*args, *kwargs.values()))
    rows = next((each for each in known if each is not None), None)
    if rows is None:
        return left, right
    if len(right) == 2:  # the sum over rows
        return torch.Size((left[0], rows)), torch.Size((rows, right[1]))
    return torch.Size((rows, left[1])), right


def _product(left: torch.Size, right: torch.Size) -> Product:
    """The shape of a product, of a batch of them, or of one for each expert, with equally many rows each."""
    k, n = int(left[-1]), int(right[-1])
    rows = int(left.numel()) // max(1, k)
    if len(left) == len(right):
        batch = int(left[:-2].numel())
        return Product(rows // max(1, batch), n, k, batch)
    experts = int(right[0])
    return Product(max(1, rows // experts), n, k, experts)


_KERNELS = {"cudnn": "cudnn", "efficient": "flash1"}
"""Part of the name of an operator of attention -> its kernel."""


def _attention(func: Any, args: Any, kwargs: Any, flops: int) -> KernelWork:
    """The work of attention; documents that are laid end to end are equally long."""
    names = [each.name for each in func._schema.arguments]
    given = dict(zip(names, args, strict=False)) | kwargs
    query, key, value = (given.get(name, given.get(name[0])) for name in ("query", "key", "value"))
    name, executed = func.name(), float(flops)
    length = float(key.shape[1 if name.startswith("meshwright") else -2])
    window = given.get("window")
    kernel = next((of for part, of in _KERNELS.items() if part in name), "flash")
    if (
        ends := given.get("key_ends")
    ) is not None:  # torch counts each document as long as the longest may be
        length = key.shape[0] / max(1, ends.shape[0] - 1)
        executed *= length / given["most_keys"]
    if window is not None and window < length:
        executed *= window / length
    elif given.get("is_causal", given.get("causal", False)):
        executed /= 2
    return KernelWork(
        FORMATS.get(query.dtype, "bf16"), executed, kernel=kernel,
        length=length, backward="backward" in name, channels=(key.shape[-1] + value.shape[-1]) / 2,
    )  # fmt: skip
