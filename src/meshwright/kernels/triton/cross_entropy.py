"""Cross-entropy in one pass over the logits for its sums and one for its gradient, a row for each program.

The sums follow their maximum from block to block of a row (Milakov and Gimelshein 2018, online softmax), so
that a row is read once for them and once more for the gradient, which is written over it. Programs are so
wide that the rows of all multiprocessors fit into the cache of an H100 between both reads: 132 rows of
128,256 logits in bf16 are 34 of its 50 MB.

Why logits are not kept on the chip: such a row is 256 KB, as large as all registers of a multiprocessor.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from meshwright.kernels.triton.specialisation import Specialisation

_MOST_BLOCK = 16384
_ELEMENTS_A_THREAD = 16
"""With as many as this no kernel spills registers at 32 warps."""
_MULTIPLIED = 2048
"""Elements that a program multiplies at once."""
_MOST_PROGRAMS = 2048
"""Programs of a multiplication: some for each multiprocessor, which all see at once that nothing is to do."""


@triton.jit
def _tanh(x):
    """tanh to within a few roundoffs of fp32: by its series where 1 - exp(-2 |x|) would cancel."""
    square = x * x
    series = 1 + square * (-1 / 3 + square * (2 / 15 + square * (-17 / 315 + square * (62 / 2835))))
    fall = tl.exp(-2 * tl.abs(x))
    far = (1 - fall) / (1 + fall)
    return tl.where(tl.abs(x) < 0.25, x * series, tl.where(x < 0, -far, far))


@triton.jit
def _capped(x, softcap, CAPPED: tl.constexpr):
    return softcap * _tanh(x / softcap) if CAPPED else x


@triton.jit
def _columns(row, at, columns, softcap, CAPPED: tl.constexpr):
    """Logits in fp32, -inf beyond the last column."""
    x = tl.load(row + at, mask=at < columns, other=0.0).to(tl.float32)
    return tl.where(at < columns, _capped(x, softcap, CAPPED), float("-inf"))


@triton.jit
def _store_gradient(row, at, width, gradient, z, softcap, CAPPED: tl.constexpr):
    """The gradient by capped logits `z`, as that by logits before the cap."""
    if CAPPED:
        ratio = z / softcap
        gradient = gradient * (1 - ratio * ratio)
    tl.store(row + at, gradient.to(row.dtype.element_ty), mask=at < width)


@triton.jit
def _cross_entropy(
    logits, targets, losses, stride, columns, ignored, factor, softcap,
    CAPPED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    row, target = logits + token * stride, tl.load(targets + token)
    if target == ignored:
        tl.store(losses + token, 0.0)
        for start in range(0, columns, BLOCK):
            at = start + tl.arange(0, BLOCK)
            tl.store(row + at, tl.zeros((BLOCK,), row.dtype.element_ty), mask=at < columns)
    else:
        here = (target >= 0) & (target < columns)
        own = _capped(tl.load(row + target, mask=here, other=float("nan")).to(tl.float32), softcap, CAPPED)
        # The exponentials of the others, whose share is 1 - p at the target also where p is close to 1.
        most, others = own, 0.0
        for start in range(0, columns, BLOCK):
            at = start + tl.arange(0, BLOCK)
            z = _columns(row, at, columns, softcap, CAPPED)
            largest = tl.maximum(most, tl.max(z, 0))
            offset = tl.where(largest == float("-inf"), 0.0, largest)
            terms = tl.where(at == target, 0.0, tl.exp(z - offset))
            others = others * tl.exp(most - offset) + tl.sum(terms, 0)
            most = largest
        total = others + tl.exp(own - most)
        tl.store(losses + token, most - own + tl.log(total))
        share = factor / total
        for start in range(0, columns, BLOCK):
            at = start + tl.arange(0, BLOCK)
            z = _columns(row, at, columns, softcap, CAPPED)
            gradient = tl.where(at == target, -others, tl.exp(z - most)) * share
            _store_gradient(row, at, columns, gradient, z, softcap, CAPPED)


@triton.jit
def _softmax_statistics(
    logits, targets, numbers, stride, tokens, ignored, first, columns, softcap,
    CAPPED: tl.constexpr, MEAN: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    row, target = logits + token * stride, tl.load(targets + token)
    log_sum, own, mean = 0.0, 0.0, 0.0
    if target != ignored:
        place = target - first
        here = (place >= 0) & (place < columns)
        own = _capped(tl.load(row + place, mask=here, other=0.0).to(tl.float32), softcap, CAPPED)
        most, total, weighted = float("-inf"), 0.0, 0.0
        for start in range(0, columns, BLOCK):
            z = _columns(row, start + tl.arange(0, BLOCK), columns, softcap, CAPPED)
            largest = tl.maximum(most, tl.max(z, 0))
            offset = tl.where(largest == float("-inf"), 0.0, largest)
            terms, before = tl.exp(z - offset), tl.exp(most - offset)
            total = total * before + tl.sum(terms, 0)
            if MEAN:
                weighted = weighted * before + tl.sum(tl.where(z == float("-inf"), 0.0, terms * z), 0)
            most = largest
        log_sum = most + tl.log(total)
        mean = weighted / tl.where(total == 0, 1.0, total)
    tl.store(numbers + token, log_sum)
    tl.store(numbers + tokens + token, own)
    if MEAN:
        tl.store(numbers + 2 * tokens + token, mean)


@triton.jit
def _softmax_gradient(
    logits, targets, log_sums, factors, at_targets, slopes, stride, first, columns, width, softcap,
    CAPPED: tl.constexpr, SLOPED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    row, place = logits + token * stride, tl.load(targets + token) - first
    log_sum, factor = tl.load(log_sums + token), tl.load(factors + token)
    at_target, slope = tl.load(at_targets + token), 0.0
    if SLOPED:
        slope = tl.load(slopes + token)
    if (factor == 0) & (at_target == 0) & (slope == 0):
        for start in range(0, width, BLOCK):
            at = start + tl.arange(0, BLOCK)
            tl.store(row + at, tl.zeros((BLOCK,), row.dtype.element_ty), mask=at < width)
    else:
        for start in range(0, width, BLOCK):
            at = start + tl.arange(0, BLOCK)
            z = _columns(row, at, columns, softcap, CAPPED)
            logs = z - log_sum
            gradient = tl.exp(logs) * factor
            if SLOPED:
                gradient += tl.where(z == float("-inf"), 0.0, tl.exp(logs) * logs * slope)
            gradient = tl.where(at == place, at_target, gradient)
            gradient = tl.where(at < columns, gradient, 0.0)
            _store_gradient(row, at, width, gradient, tl.where(at < columns, z, 0.0), softcap, CAPPED)


@triton.jit
def _multiply(x, factor, elements, BLOCK: tl.constexpr):
    by = tl.load(factor).to(tl.float32)
    if by != 1.0:
        step = tl.num_programs(0).to(tl.int64) * BLOCK
        for start in range(tl.program_id(0).to(tl.int64) * BLOCK, elements, step):
            at = start + tl.arange(0, BLOCK)
            found = tl.load(x + at, mask=at < elements, other=0.0).to(tl.float32) * by
            tl.store(x + at, found.to(x.dtype.element_ty), mask=at < elements)


def cross_entropy_(
    logits: Tensor, targets: Tensor, ignored: int, factor: float, softcap: float | None
) -> Tensor:
    """See `kernels/cross_entropy.py`."""
    losses = logits.new_empty(len(logits), dtype=torch.float32)
    sizes = logits.stride(0), logits.shape[1], ignored, factor
    _launch(_cross_entropy, logits, targets, losses, *sizes, **_cap(softcap))
    return losses


def softmax_statistics(
    logits: Tensor, targets: Tensor, ignored: int, first: int, rows: int, softcap: float | None, mean: bool
) -> Tensor:
    """See `kernels/cross_entropy.py`."""
    numbers = logits.new_empty(3 if mean else 2, len(logits), dtype=torch.float32)
    sizes = logits.stride(0), len(logits), ignored, first, rows
    _launch(_softmax_statistics, logits, targets, numbers, *sizes, **_cap(softcap), MEAN=mean)
    return numbers


def softmax_gradient_(
    logits: Tensor,
    targets: Tensor,
    log_sum: Tensor,
    factors: Tensor,
    at_targets: Tensor,
    slopes: Tensor | None,
    first: int,
    rows: int,
    softcap: float | None,
) -> None:
    """See `kernels/cross_entropy.py`."""
    by_row = log_sum, factors, at_targets, factors if slopes is None else slopes
    sizes = logits.stride(0), first, rows, logits.shape[1]
    sloped = slopes is not None
    _launch(_softmax_gradient, logits, targets, *by_row, *sizes, **_cap(softcap), SLOPED=sloped)


def multiply_(x: Tensor, factor: Tensor) -> None:
    """See `kernels/cross_entropy.py`."""
    assert x.is_contiguous()
    programs = min(_MOST_PROGRAMS, triton.cdiv(x.numel(), _MULTIPLIED))
    if programs:
        _multiply[(programs,)](x, factor, x.numel(), BLOCK=_MULTIPLIED, num_warps=4)


def _cap(softcap: float | None) -> dict[str, Any]:
    return {"softcap": 1.0 if softcap is None else softcap, "CAPPED": softcap is not None}


def _launch(kernel: Any, logits: Tensor, targets: Tensor, *given: Any, **constants: Any) -> None:
    """Launch a kernel for the rows of logits whose columns are adjacent, if there are any."""
    assert logits.stride(1) == 1
    block = min(_MOST_BLOCK, max(128, triton.next_power_of_2(logits.shape[1])))
    if len(logits):
        kernel[(len(logits),)](
            logits, targets.contiguous(), *(x.contiguous() if isinstance(x, Tensor) else x for x in given),
            **constants, BLOCK=block, num_warps=_warps(block),
        )  # fmt: skip


def _warps(block: int) -> int:
    return max(4, block // (32 * _ELEMENTS_A_THREAD))


_TYPES = {
    **dict.fromkeys(("stride", "tokens", "ignored", "first", "columns", "width"), "i32"),
    **dict.fromkeys(("losses", "numbers", "log_sums", "factors", "at_targets", "slopes"), "*fp32"),
    "targets": "*i64", "factor": "fp32", "softcap": "fp32",
}  # fmt: skip


def _of_rows(kernel: Any, option: str | None) -> list[Specialisation]:
    """A kernel in each format with the largest block, with its `option` and a cap, and without."""
    found = []
    for form, with_all in (("bf16", False), ("fp16", True), ("fp32", False), ("fp32", True)):
        constants = {"CAPPED": with_all, "BLOCK": _MOST_BLOCK} | ({option: with_all} if option else {})
        # Vocabularies are multiples of 16, but for a few.
        sized = ("logits", "stride", "columns", "width") if form != "fp16" else ()
        aligned = tuple(name for name in sized if name in kernel.arg_names)
        types = _TYPES | {"logits": f"*{form}"}
        found.append(Specialisation(kernel, types, constants, _warps(_MOST_BLOCK), aligned=aligned))
    return found


SPECIALISATIONS = [
    *_of_rows(_cross_entropy, None),
    *_of_rows(_softmax_statistics, "MEAN"),
    *_of_rows(_softmax_gradient, "SLOPED"),
    *(
        Specialisation(
            _multiply, {"x": f"*{form}", "factor": "*fp32", "elements": "i64"}, {"BLOCK": _MULTIPLIED},
            aligned=("x", "elements"),
        )
        for form in ("bf16", "fp32")
    ),
]  # fmt: skip
