"""Casts by Triton kernels beside those by torch's operators, for tests whose process interprets kernels."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from meshwright.kernels import low_precision_casts as plain

SCALES = (2.0**-126, 2.0**-6, 2.0**120)
CASES: dict[str, tuple[str, tuple[Any, ...]]] = {
    **{
        f"tensor {form} {scale:g}": ("tensor", (scale, form))
        for form in ("e4m3", "e5m2")
        for scale in SCALES
    },
    **{
        f"{side} {form}": ("rows", (form, side == "columns"))
        for side in ("rows", "columns")
        for form in ("e4m3", "e5m2")
    },
    "1 x 128": ("tiles", ("e4m3", 128, False, False)),
    "1 x 128 e5m2": ("tiles", ("e5m2", 128, False, False)),
    "128 x 128": ("tiles", ("e4m3", 128, True, False)),
    "1 x 128 in blocks of 32": ("tiles", ("e4m3", 128, False, True)),
    "128 x 128 in blocks of 32": ("tiles", ("e4m3", 128, True, True)),
    "1 x 32": ("tiles", ("e4m3", 32, False, True)),
    **{f"nvfp4 {scale:g}": ("nvfp4", (scale, False, False, False)) for scale in SCALES},
    "nvfp4 16 x 16": ("nvfp4", (2.0**-6, True, False, False)),
    "nvfp4 stochastic": ("nvfp4", (2.0**-6, False, True, False)),
    "nvfp4 rotated": ("nvfp4", (2.0**-6, False, True, True)),
}  # fmt: skip
"""Name -> the operator, and what it is called with."""


def drawn(rows: int, columns: int, finite: bool = False) -> Tensor:
    """Normal numbers in bf16 whose rows differ by powers of two, with zeros, both signs of them, the smallest
    and largest numbers, and ones that are not finite."""
    generator = torch.Generator().manual_seed(0)
    powers = torch.randint(-20, 20, (rows, 1), generator=generator)
    x = torch.randn(rows, columns, generator=generator) * torch.exp2(powers)
    x[:, 5], x[3], x[16:32] = -0.0, 0, 0
    x[10] *= 1e-30
    x[11] = x[11].clamp(-1, 1) * 2.0**-130
    x[12], x[13], x[14] = 3e38, 448 * 2.0**-126, 2.0**-133
    if not finite:
        x[7, 9], x[8, 40], x[9, 50] = math.inf, math.nan, -math.inf
    return x.bfloat16()


def cast(kernels: Any, case: str, x: Tensor, prefix: str = "") -> tuple[list[Tensor], list[Tensor]]:
    """The results of a module's operator for x in a case, and the numbers that it noted."""
    kind, given = CASES[case]
    seen = [torch.zeros((), device=x.device), torch.full((), 1e-3, device=x.device)]
    function: Callable[..., list[Tensor]] = getattr(kernels, f"{prefix}{kind}")
    if kind == "rows":
        form, columns = given
        return function(x, form == "e5m2", columns), []
    if kind == "tiles":
        form, *layout = given
        return function(x, form == "e5m2", *layout, True, True), []
    scale, *how = given
    if kind == "tensor":
        return function(x, torch.tensor(scale, device=x.device), seen, how[0] == "e5m2", True, True), seen
    return function(x, torch.tensor(scale, device=x.device), seen, *how, True, True), seen


def differences(found: list[Tensor], wanted: list[Tensor]) -> int:
    """Numbers that differ in a bit; all NaN are taken for one."""
    assert [(each.shape, each.dtype, each.is_contiguous()) for each in found] == [
        (each.shape, each.dtype, True) for each in wanted
    ]
    return sum(int((_bits(a) != _bits(b)).sum()) for a, b in zip(found, wanted, strict=True))


def _bits(x: Tensor) -> Tensor:
    """The bits of numbers, of NaN always the same."""
    x = x.cpu()
    if x.dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
        bits = x.view(torch.uint8)
        return torch.where((bits & 0x7F) > (0x7E if x.dtype is torch.float8_e4m3fn else 0x7C), 0x7F, bits)
    if x.itemsize == 1:
        return x.view(torch.uint8)
    return torch.where(x.isnan(), torch.nan, x).view(torch.int32)


def by_interpreter(case: str, rows: int, columns: int) -> tuple[int, int]:
    """Numbers of a case that differ in a bit between the kernel and torch's operators, and how many there
    are."""
    from meshwright.kernels.triton import low_precision_casts, nvfp4_casts

    kernels = nvfp4_casts if "nvfp4" in case else low_precision_casts

    warnings.simplefilter("ignore")  # NumPy tells of the hash's overflow, which is meant
    x = drawn(rows, columns, finite="rotated" in case)
    found, noted = cast(kernels, case, x, "cast_")
    wanted, seen = cast(plain, case, x, "plain_")
    return differences(found + noted, wanted + seen), sum(each.numel() for each in found)
