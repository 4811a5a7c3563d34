"""The routed experts of a layer: many small SwiGLU layers, each on its own rows, as grouped products.

Shapes: R rows, D hidden, E experts that are here, F channels of one. Rows come expert by expert; `sizes` says
how many each has, on the host, and all are multiples of ALIGN: libraries are fastest on few different shapes
(on CPUs oneDNN prepares a kernel for each), and CUDA's grouped product asks for aligned groups.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

Sizes = tuple[int, ...]
Results = tuple[Tensor, ...]

Keep = Callable[[Callable[[], Results], bool], Results]
"""Runs a computation for a policy of recomputation; with False its result is not read a second time."""

PutOff = Callable[[Sequence[nn.Parameter], Callable[[], Sequence[Tensor]]], bool]
"""Takes what computes the gradients of weights, to be called later; False where they are due now."""


def run(compute: Callable[[], Results], _read_again: bool) -> Results:
    """A `Keep` that keeps nothing."""
    return compute()


def put_nothing_off(_parameters: Sequence[nn.Parameter], _compute: Callable[[], Sequence[Tensor]]) -> bool:
    """A `PutOff` that takes nothing."""
    return False


class Experts(nn.Module):
    """x (R, D), the weight of each row in the sum (R,), sizes -> (R, D), weighted.

    The weight multiplies what goes into `down`: the sum is the same, and no expert's output is needed for
    the weight's gradient. `keep` and `put_off` are for a parallel layout to set.
    """

    def __init__(self, experts: int, hidden: int, channels: int) -> None:
        super().__init__()
        self.keep: Keep = run
        self.put_off: PutOff = put_nothing_off
        self.gate = nn.Parameter(torch.empty(experts, channels, hidden))
        self.up = nn.Parameter(torch.empty(experts, channels, hidden))
        self.down = nn.Parameter(torch.empty(experts, hidden, channels))

    def forward(self, x_RD: Tensor, weight_R: Tensor, sizes: Sizes) -> Tensor:
        weights = (self.gate, self.up, self.down)
        found: Tensor = _Experts.apply(x_RD, weight_R, *weights, sizes, self.keep, self.put_off)
        return found


class _Experts(torch.autograd.Function):
    """Keeps x, gate x and up x, and neither their product nor what `down` gives."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        gate: nn.Parameter,
        up: nn.Parameter,
        down: nn.Parameter,
        sizes: Sizes,
        keep: Keep,
        put_off: PutOff,
    ) -> Tensor:
        opened, raised = keep(lambda: (times(x, gate, sizes), times(x, up, sizes)), True)
        (found,) = keep(lambda: (times(_inner(opened, raised, weight), down, sizes),), False)
        ctx.save_for_backward(x, weight, opened, raised, gate, up, down)
        ctx.sizes, ctx.put_off, ctx.maps = sizes, put_off, (gate, up, down)
        return found

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        # Without the graph behind them, which would wait where gradients are put off.
        x, weight, opened, raised, gate, up, down = (kept.detach() for kept in ctx.saved_tensors)
        sizes, scale = ctx.sizes, weight.to(x.dtype).unsqueeze(1)
        of_inner = times_transposed(grad, down, sizes)
        silu = F.silu(opened)
        of_weight = _row_dots(of_inner, silu * raised, weight.dtype)
        of_inner = of_inner * scale
        of_raised = of_inner * silu
        of_opened = torch.ops.aten.silu_backward(of_inner.mul_(raised), opened)
        of_x = times_transposed(of_opened, gate, sizes).add_(times_transposed(of_raised, up, sizes))

        def of_maps() -> list[Tensor]:
            inner = _inner(opened, raised, weight)
            return [outer(of_opened, x, sizes), outer(of_raised, x, sizes), outer(grad, inner, sizes)]

        if ctx.put_off(ctx.maps, of_maps):
            return of_x, of_weight, *[None] * 6
        return of_x, of_weight, *of_maps(), None, None, None


def _inner(opened: Tensor, raised: Tensor, weight: Tensor) -> Tensor:
    """silu(gate x) * up x * weight: what goes into `down`."""
    return F.silu(opened).mul_(raised).mul_(weight.to(raised.dtype).unsqueeze(1))


def _row_dots(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    return (a * b).sum(1, dtype=dtype)


# Grouped products -----------------------------------------------------------------------------------------


def times(x_RI: Tensor, maps_EOI: Tensor, sizes: Sizes) -> Tensor:
    """Each expert's rows times its map: (R, O)."""
    if _grouped(x_RI):
        return torch._grouped_mm(x_RI, maps_EOI.transpose(1, 2), offs=_ends(sizes, x_RI))
    found = x_RI.new_empty(x_RI.shape[0], maps_EOI.shape[1])
    for expert, rows in _slices(sizes):
        torch.mm(x_RI[rows], maps_EOI[expert].T, out=found[rows])
    return found


def times_transposed(grad_RO: Tensor, maps_EOI: Tensor, sizes: Sizes) -> Tensor:
    """Each expert's rows times its transposed map: (R, I)."""
    if _grouped(grad_RO):
        return torch._grouped_mm(grad_RO, maps_EOI, offs=_ends(sizes, grad_RO))
    found = grad_RO.new_empty(grad_RO.shape[0], maps_EOI.shape[2])
    for expert, rows in _slices(sizes):
        torch.mm(grad_RO[rows], maps_EOI[expert], out=found[rows])
    return found


def outer(grad_RO: Tensor, x_RI: Tensor, sizes: Sizes) -> Tensor:
    """The sum over each expert's rows of their outer products: (E, O, I)."""
    if _grouped(grad_RO):
        return torch._grouped_mm(grad_RO.T, x_RI, offs=_ends(sizes, x_RI))
    found = grad_RO.new_empty(len(sizes), grad_RO.shape[1], x_RI.shape[1])
    for expert, rows in _slices(sizes):
        torch.mm(grad_RO[rows].T, x_RI[rows], out=found[expert])
    for expert, size in enumerate(sizes):
        if not size:
            found[expert].zero_()
    return found


def _grouped(x: Tensor) -> bool:
    """Whether one kernel takes all groups: CUDA's does in bf16, of one row or more."""
    return x.device.type == "cuda" and x.dtype == torch.bfloat16 and len(x) > 0


def _ends(sizes: Sizes, like: Tensor) -> Tensor:
    ends = torch.tensor(list(accumulate(sizes)), dtype=torch.int32)
    return ends.to(like.device, non_blocking=True)


def _slices(sizes: Sizes) -> list[tuple[int, slice]]:
    """(expert, its rows) for each that has any."""
    ends = list(accumulate(sizes))
    return [
        (expert, slice(end - size, end))
        for expert, (size, end) in enumerate(zip(sizes, ends, strict=True))
        if size
    ]
