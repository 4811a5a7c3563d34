"""Linear layers in fp8, mxfp8 and nvfp4 on one device, written from the papers: a part of the reference of
`meshwright verify`.

    fp8             e4m3, gradients in e5m2, and one scale for a tensor: that of the largest number in some
                    steps before (Micikevicius et al. 2022); the first step is not rounded
    fp8-rowwise     e4m3 with a scale for each row that is summed; gradients of weights are not rounded
    fp8-blockwise   e4m3 with a scale for 128 numbers, or 128 x 128 of a weight (DeepSeek-AI 2024)
    mxfp8           e4m3 with a scale for 32 numbers (OCP 2023)
    nvfp4           e2m1 with a scale in e4m3 for 16 numbers, or 16 x 16 of a weight, times one for the tensor
                    (NVIDIA 2025); gradients are rounded stochastically; tokens of the gradient of a weight
                    are rotated

With `precision.qat` weights are rounded, whatever the format, and gradients pass through the rounding:

    int8            codes from -128 to 127, and a scale in bf16 for a row
    int4            codes from -8 to 7, and a scale in bf16 for a group of a row
    int8-dynamic    int8, and tokens likewise with scales in fp32
    fp8             e4m3 with a scale for a row, and tokens likewise

The largest number of those is the middle of the two ends of the codes times the scale.

In the other recipes a scale is the least power of two at which the largest number fits. Tensor ranks that
split the summed dim of a product have each its own scale in a row of fp8-rowwise.

Shapes: N tokens, O outputs, I inputs.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from meshwright.spec import RunSpec
from meshwright.spec.parameters import parameters

MOST = {"e4m3": 448.0, "e5m2": 57344.0, "e2m1": 6.0}
DTYPES = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
GRID = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], dtype=torch.float64)
SIGNS = (1, 1, -1, 1, -1, -1, 1, 1, -1, 1, 1, 1, -1, -1, 1, -1)


def power_of_two(largest: Tensor, most: float) -> Tensor:
    """The least power of two, from 2^-126 on, that `largest` is divided by to be at most `most`."""
    tiny = torch.finfo(torch.float64).tiny
    power = torch.log2((largest.double() / most).clamp(min=tiny)).ceil().clamp(min=-126)
    return (2.0**power).float()


class ReferenceLinears:
    """Products of the blocks' matrices in the format of a run."""

    def __init__(self, spec: RunSpec) -> None:
        precision, layout = spec.precision, spec.layout
        self.recipe = precision.compute
        self.qat, self.group = precision.qat, precision.qat_group
        self.gradients = precision.fp8_gradients or ("e5m2" if self.recipe == "fp8" else "e4m3")
        self.window = precision.amax_history
        self.seen: dict[tuple[str, str], float] = {}
        """(matrix, operand) -> its largest number in this step."""
        self.history: list[dict[tuple[str, str], float]] = []
        self.pieces: dict[str, tuple[int, int]] = {}
        """Matrix -> the parts that tensor ranks make of its rows and columns."""
        self.factor = 1.0
        for unit in parameters(spec.model).values():
            for each in unit:
                ranks = layout.etp if each.expert else layout.tp
                at = len(each.shape) - each.dim if each.expert or each.split is not None else 0
                self.pieces[each.name] = (ranks if at == 2 else 1, ranks if at == 1 else 1)

    def begin_step(self, targets: int) -> None:
        """Round gradients as those of the sum of losses times the power of two from 1/targets on, not of
        the mean: the other factor, from 1/2 to 1, is left for the end of a step."""
        self.factor = targets * 2.0 ** (math.floor(-math.log2(targets)) + 1) if targets else 1.0

    def end_step(self) -> None:
        """Take the largest numbers of a step into the history."""
        self.history = [*self.history, self.seen][-self.window :]
        self.seen = {}

    def __call__(self, name: str, x: Tensor, weight: Tensor) -> Tensor:
        """x (..., I) by the matrix (O, I) of this name: (..., O)."""
        if self.qat is not None:
            if self.qat in ("int8-dynamic", "fp8"):
                x = straight_through(x, self.qat, x.shape[-1], torch.float32)
            columns = self.group if self.qat == "int4" else weight.shape[-1]
            return x @ straight_through(weight, self.qat, columns, torch.bfloat16).T
        if self.recipe in ("fp64", "fp32", "bf16", "fp16"):
            return x @ weight.T
        y: Tensor = _Linear.apply(x.flatten(0, -2), weight, name, self)
        return y.view(*x.shape[:-1], y.shape[-1])

    def scale_of_tensor(self, x: Tensor, kind: str, name: str) -> Tensor | None:
        """The scale of a whole operand, whose largest number is noted; None in the first step."""
        key = (name, kind)
        self.seen[key] = max(self.seen.get(key, 0.0), float(x.abs().max().float()) if x.numel() else 0.0)
        if not self.history:
            return None
        largest = torch.tensor(max(step.get(key, 0.0) for step in self.history), device=x.device)
        if largest == 0:
            return torch.ones_like(largest)
        if self.recipe == "nvfp4":
            return power_of_two(largest * 8, 6 * 448)
        return power_of_two(largest, MOST[self.gradients if kind == "gradient" else "e4m3"])

    def rounded(self, x: Tensor, kind: str, name: str, dim: int, parts: int) -> Tensor:
        """An operand (R, C) of a product that sums over `dim`, which tensor ranks cut into `parts`."""
        form = self.gradients if kind == "gradient" else "e4m3"
        if self.recipe == "fp8":
            scale = self.scale_of_tensor(x, kind, name)
            if scale is None:
                return x
            return ((x.float() / scale).clamp(-MOST[form], MOST[form]).to(DTYPES[form]).float() * scale).to(x)
        along, across = {
            "fp8-rowwise": (x.shape[dim] // parts, 1),
            "fp8-blockwise": (128, 128 if kind == "weight" else 1),
            "mxfp8": (32, 1),
            "nvfp4": (16, 16 if kind == "weight" else 1),
        }[self.recipe]
        rows, columns = (along, across) if dim == 0 else (across, along)
        scale = self.scale_of_tensor(x, kind, name) if self.recipe == "nvfp4" else None
        if self.recipe == "nvfp4" and scale is None:
            return x
        whole = torch.zeros(
            -(-x.shape[0] // rows) * rows, -(-x.shape[1] // columns) * columns, device=x.device
        )
        whole[: x.shape[0], : x.shape[1]] = x
        tiles = whole.view(whole.shape[0] // rows, rows, whole.shape[1] // columns, columns)
        largest = tiles.abs().amax((1, 3), keepdim=True)
        if scale is None:
            scales = power_of_two(largest, MOST[form])
            found = (tiles / scales).to(DTYPES[form]).float() * scales
            return found.view(whole.shape)[: x.shape[0], : x.shape[1]].to(x)
        blocks = (largest / 6 / scale).clamp(2**-6, 448).to(torch.float8_e4m3fn).float() * scale
        scaled = (tiles * (1 / blocks)).clamp(-6, 6)  # kernels multiply by the inverse
        rounded = stochastically(scaled) if kind == "gradient" else to_nearest(scaled)
        return (rounded * blocks).view(whole.shape)[: x.shape[0], : x.shape[1]].to(x)

    def of_tokens(self, x: Tensor, kind: str, name: str) -> Tensor:
        """An operand (N, C) of the gradient of a weight, which sums over tokens."""
        if self.recipe == "fp8-rowwise" or (".experts." in name and self.recipe != "fp8"):
            return x
        return self.rounded(rotated(x) if self.recipe == "nvfp4" else x, kind, name, 0, 1)


def straight_through(x: Tensor, recipe: str, columns: int, scales: torch.dtype) -> Tensor:
    """Rows rounded with a scale for so many columns, whose gradient is that of the rows as they are."""
    parts = x.detach().float().reshape(-1, columns)
    low, high = {"int8": (-128, 127), "int8-dynamic": (-128, 127), "int4": (-8, 7), "fp8": (-448, 448)}[
        recipe
    ]
    scale = (parts.abs().amax(1, keepdim=True) / ((high - low) / 2)).to(scales).float()
    scale = scale.clamp(min=2.0**-126)
    if recipe == "fp8":
        codes = (parts / scale).clamp(low, high).to(torch.float8_e4m3fn).float()
    else:
        inverse = scales is torch.bfloat16  # weights'; tokens are divided by their scales
        codes = (parts * (1 / scale) if inverse else parts / scale).round().clamp(low, high)
    return x + ((codes * scale).view(x.shape).to(x) - x).detach()


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, name: str, linears: ReferenceLinears) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.name, ctx.linears = name, linears
        parts = linears.pieces[name][1]
        operands = (
            linears.rounded(each, kind, name, 1, parts) for each, kind in ((x, "input"), (weight, "weight"))
        )
        rows, columns = operands
        return rows @ columns.T

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        name, linears = ctx.name, ctx.linears
        grad = grad * linears.factor
        parts = linears.pieces[name][0]
        of_x = linears.rounded(grad, "gradient", name, 1, parts) @ linears.rounded(
            weight, "weight", name, 0, parts
        )
        of_weight = linears.of_tokens(grad, "gradient", name).T @ linears.of_tokens(x, "input", name)
        return of_x / linears.factor, of_weight / linears.factor, None, None


# Four bits -----------------------------------------------------------------------------------------------


def to_nearest(x: Tensor) -> Tensor:
    """The nearest of `GRID`; of two that are as near the one with an even place there."""
    below = torch.bucketize(x.abs(), GRID.to(x), right=True) - 1
    above = (below + 1).clamp(max=len(GRID) - 1)
    low, high = GRID.to(x)[below], GRID.to(x)[above]
    middle = (low + high) / 2
    up = (x.abs() > middle) | ((x.abs() == middle) & (below % 2 == 1))
    return torch.where(up, high, low) * x.sign()


def stochastically(tiles: Tensor) -> Tensor:
    """Tiles (., r, ., c) rounded up with the probability of what is above the number of `GRID` below."""
    below = torch.bucketize(tiles.abs(), GRID.to(tiles), right=True) - 1
    above = (below + 1).clamp(max=len(GRID) - 1)
    low, high = GRID.to(tiles)[below], GRID.to(tiles)[above]
    share = (tiles.abs() - low) / (high - low).clamp(min=0.5)
    return torch.where(share > draws(tiles), high, low) * tiles.sign()


def draws(tiles: Tensor) -> Tensor:
    """A number in [0, 1) for each of (., r, ., c): splitmix64 of its place in the tile, r c numbers in rows,
    and of the sum of the tile's numbers as bits of bf16, each times an odd number of its place."""
    bits = (tiles + 0.0).bfloat16().view(torch.int16).long().cpu().numpy().view(np.uint64)
    _, rows, _, columns = tiles.shape
    place = np.arange(rows * columns, dtype=np.uint64).reshape(1, rows, 1, columns)
    golden = np.uint64(0x9E3779B97F4A7C15)
    odd = mixed(place * golden + np.uint64(1)) | np.uint64(1)
    key = (bits * odd).sum((1, 3), keepdims=True, dtype=np.uint64)
    drawn = mixed(key + (place + np.uint64(1)) * golden) >> np.uint64(40)
    return torch.from_numpy(drawn.astype(np.float64) / 2**24).to(tiles)


def mixed(bits: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The finaliser of splitmix64 (Steele et al. 2014)."""
    bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return bits ^ (bits >> np.uint64(31))


def rotated(x: Tensor) -> Tensor:
    """Each 16 rows of (R, C) by a Hadamard matrix (Sylvester 1867) / 4, whose columns have signs."""
    places = torch.arange(16)
    common = places.unsqueeze(1) & places
    ones = sum((common >> bit) & 1 for bit in range(4))
    turn = (1 - 2 * (ones % 2)) * torch.tensor(SIGNS) / 4
    return (turn.to(x) @ x.view(-1, 16, x.shape[1])).view(x.shape)
