"""The three matrix products of a linear layer, in the format of its operands or in low precision.

A recipe of low precision (`kernels/low_precision.py`) rounds the operands along the dim that is summed, and
products are summed in fp32. fp8 and fp8-rowwise have kernels on GPUs; all else is the product of the rounded
operands, with the same result but for the order of sums. nvfp4 rounds gradients stochastically, and rotates
both operands of the gradient of a weight.

Shapes: N tokens, O outputs, I inputs of a linear layer, R rows of experts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import zip_longest
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meshwright.kernels.gradient_accumulation_fusion import RunningSum
from meshwright.kernels.low_precision import (
    E4M3,
    E5M2,
    PART,
    rotate,
    round_nvfp4,
    round_tensor,
    round_tiles,
    scale_of,
    to_numbers,
)
from meshwright.model.quantisation import fake_quantise, fake_quantise_tokens
from meshwright.spec.errors import UserError
from meshwright.spec.precision import BLOCKS, DELAYED, PrecisionSpec

Role = Literal["input", "weight", "gradient"]
ROLES: tuple[Role, ...] = ("input", "weight", "gradient")
Parameters = Sequence[nn.Parameter]


class Products:
    """Products of operands that are not rounded. `parameter` is that of the weight."""

    low = False

    def operand(self, x: Tensor, role: Role, dim: int, *parameters: nn.Parameter | None) -> Tensor:
        """An operand (..., R, C) of products with these weights that sum over its `dim`, -1 or -2."""
        return x

    def rows(self, x_RC: Tensor, role: Role, parameter: nn.Parameter | None) -> Tensor:
        """An operand of a product that sums over rows whose order depends on the layout, as experts' do."""
        return x_RC

    def forward(
        self, x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor], parameters: Parameters
    ) -> list[Tensor]:
        """x (..., I) by each of the weights (O, I), plus its bias: (..., O) each."""
        own = parameters[: len(weights)]
        x = self.operand(x, "input", -1, *own)
        rounded = [self.operand(weight, "weight", -1, each) for weight, each in zip_longest(weights, own)]
        return [F.linear(x, weight, bias) for weight, bias in zip_longest(rounded, biases)]

    def of_input(self, grads: Sequence[Tensor], weights: Sequence[Tensor], parameters: Parameters) -> Tensor:
        """The gradient (N, I) of the input: the sum of grads (N, O) by their weights (O, I)."""
        own = parameters[: len(weights)]
        weights = [self.operand(weight, "weight", -2, each) for weight, each in zip_longest(weights, own)]
        grads = [self.operand(grad, "gradient", -1, each) for grad, each in zip_longest(grads, own)]
        total = grads[0] @ weights[0]
        for grad, weight in zip(grads[1:], weights[1:], strict=True):
            torch.addmm(total, grad, weight, out=total)  # counters of operations know no `addmm_`
        return total

    def of_weight(
        self, grad_NO: Tensor, x_NI: Tensor, parameter: nn.Parameter | None, into: RunningSum | None = None
    ) -> Tensor | None:
        """The gradient (O, I) of a weight, or None if added `into` a sum."""
        left_ON = self.operand(grad_NO, "gradient", -2, parameter).T
        right_NI = self.operand(x_NI, "input", -2, parameter)
        if into is None:
            return left_ON @ right_NI
        into.add_product(left_ON, right_NI)
        return None


class Scaling(NamedTuple):
    """Scales of the operands in a layer's products, and the largest numbers that they had in this step.

    Both are vectors in the order of `ROLES`.
    """

    scales: Tensor
    seen: Tensor


class LowPrecision(Products):
    """Products whose operands are rounded by a recipe.

    `scalings` has the scales of whole tensors by the weight's parameter, for recipes that have any; until
    `scaled` is set these are not known, and products are in the format of their operands. With `noting` the
    largest numbers of operands are noted.
    """

    low = True

    def __init__(self, precision: PrecisionSpec) -> None:
        self.recipe, self.block = precision.compute, BLOCKS[precision.compute]
        usual = "e5m2" if self.recipe == "fp8" else "e4m3"
        gradients = E5M2 if (precision.fp8_gradients or usual) == "e5m2" else E4M3
        self.forms = {"input": E4M3, "weight": E4M3, "gradient": gradients}
        self.scalings: Mapping[nn.Parameter, Scaling] = {}
        self.scaled = self.recipe not in DELAYED
        self.noting = False

    def operand(self, x: Tensor, role: Role, dim: int, *parameters: nn.Parameter | None) -> Tensor:
        of_weight = dim == -2 and role != "weight"  # of the product that is the gradient of a weight
        if self.recipe == "fp8-rowwise" and of_weight:
            return x
        if self.recipe in DELAYED:
            if self.recipe == "nvfp4" and of_weight:
                x = rotate(x)
            scale = self._scale(x, role, *parameters)
            if not self.scaled:
                return x
            if self.recipe == "fp8":
                return round_tensor(x, self.forms[role], scale)
            return round_nvfp4(x, scale, *self._tile(role, dim), stochastic=role == "gradient")
        return round_tiles(x, self.forms[role], *self._tile(role, dim))

    def rows(self, x_RC: Tensor, role: Role, parameter: nn.Parameter | None) -> Tensor:
        return self.operand(x_RC, role, -2, parameter) if self.recipe == "fp8" else x_RC

    def _tile(self, role: Role, dim: int) -> tuple[int, int]:
        """Rows and columns that share a scale; 0 stands for all of them."""
        along = 0 if self.recipe == "fp8-rowwise" else self.block
        across = self.block if role == "weight" and self.recipe in ("fp8-blockwise", "nvfp4") else 1
        return (across, along) if dim == -1 else (along, across)

    def _scale(self, x: Tensor, role: Role, *parameters: nn.Parameter | None) -> Tensor:
        """The scale of a whole tensor, whose largest number may be noted for each of the weights."""
        place = ROLES.index(role)
        scalings = [self.scalings[parameter] for parameter in parameters if parameter is not None]
        if self.noting and x.numel():
            least, most = x.detach().aminmax()
            largest = torch.maximum(most, -least)
            for scaling in scalings:
                scaling.seen[place].copy_(torch.maximum(scaling.seen[place], largest))
        return scalings[0].scales[place]


class FakeQuantised(Products):
    """Products of weights, and inputs in some recipes, that are rounded as `quantise` would round them.

    Gradients pass through the rounding (Bengio et al. 2013): those of inputs are by the rounded weights,
    and those of weights by the rounded inputs. Scales are those of rows and groups of their columns,
    whatever dim a product sums over.
    """

    low = True

    def __init__(self, precision: PrecisionSpec) -> None:
        assert precision.qat is not None
        self.recipe, self.group = precision.qat, precision.qat_group

    def operand(self, x: Tensor, role: Role, dim: int, *parameters: nn.Parameter | None) -> Tensor:
        if role == "weight":
            return fake_quantise(x, self.recipe, self.group)
        return fake_quantise_tokens(x, self.recipe) if role == "input" else x

    def rows(self, x_RC: Tensor, role: Role, parameter: nn.Parameter | None) -> Tensor:
        return self.operand(x_RC, role, -2, parameter)


class KernelProducts(LowPrecision):
    """Products in fp8 with a scale for a tensor or a row, by the kernels of `torch._scaled_mm`."""

    def forward(
        self, x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor], parameters: Parameters
    ) -> list[Tensor]:
        if not self.scaled:
            return super().forward(x, weights, biases, parameters)
        left = self.rounded(x.flatten(0, -2), "input", -1, *parameters[: len(weights)])
        products = []
        for weight, bias, parameter in zip_longest(weights, biases, parameters[: len(weights)]):
            product = scaled_mm(left, self.rounded(weight, "weight", -1, parameter), x.dtype)
            product = product.view(*x.shape[:-1], -1)
            products.append(product if bias is None else product.add_(bias))
        return products

    def of_input(self, grads: Sequence[Tensor], weights: Sequence[Tensor], parameters: Parameters) -> Tensor:
        if not self.scaled:
            return super().of_input(grads, weights, parameters)
        products = []
        for grad, weight, parameter in zip_longest(grads, weights, parameters[: len(weights)]):
            right = turned(self.rounded(weight, "weight", -2, parameter))
            products.append(scaled_mm(self.rounded(grad, "gradient", -1, parameter), right, grad.dtype))
        total = products[0]
        for product in products[1:]:
            total.add_(product)
        return total

    def of_weight(
        self, grad_NO: Tensor, x_NI: Tensor, parameter: nn.Parameter | None, into: RunningSum | None = None
    ) -> Tensor | None:
        if not self.scaled or self.recipe == "fp8-rowwise":
            return super().of_weight(grad_NO, x_NI, parameter, into)
        left = turned(self.rounded(grad_NO, "gradient", -2, parameter))
        product = scaled_mm(left, turned(self.rounded(x_NI, "input", -2, parameter)), x_NI.dtype)
        if into is None:
            return product
        into.add(product)
        return None

    def rounded(self, x: Tensor, role: Role, dim: int, *parameters: nn.Parameter | None) -> Rounded:
        """An operand (R, C) for the kernel."""
        form = self.forms[role]
        if self.recipe == "fp8":
            scales = self._scale(x, role, *parameters)
        else:
            least, most = x.aminmax(dim=dim, keepdim=True)
            scales = scale_of(torch.maximum(most, -least).float(), form.largest)
        size = max(1, PART // max(1, x.shape[1]))
        each = scales.expand(x.shape[0], scales.shape[-1] if scales.ndim else 1)
        pairs = zip(x.split(size), each.split(size), strict=True)
        return Rounded(torch.cat([to_numbers(part, form, own) for part, own in pairs]), scales)


class Rounded(NamedTuple):
    """An operand (R, C) in 8 bits, and the scales to multiply it by: one, or (R, 1) or (1, C)."""

    numbers: Tensor
    scales: Tensor


def turned(operand: Rounded) -> Rounded:
    """The transpose (C, R) of an operand (R, C), laid out anew: kernels sum along rows."""
    scales = operand.scales.T if operand.scales.ndim else operand.scales
    return Rounded(operand.numbers.T.contiguous(), scales)


def scaled_mm(left: Rounded, right: Rounded, dtype: torch.dtype) -> Tensor:
    """left (M, K) times the transpose of right (N, K), with a scale for each row of both, or one for all."""
    scales = left.scales, right.scales.T if right.scales.ndim else right.scales
    return torch._scaled_mm(left.numbers, right.numbers.T, *scales, out_dtype=dtype)


CAPABILITY = {
    "fp8": (8, 9),
    "fp8-rowwise": (8, 9),
    "fp8-blockwise": (9, 0),
    "mxfp8": (10, 0),
    "nvfp4": (10, 0),
}
"""The first compute capability of NVIDIA's that has a recipe's format. Source: cuBLAS 13 documentation."""


def products_of(precision: PrecisionSpec, device: torch.device) -> Products:
    """The products of a run on a device. Raises `UserError` for a GPU without the recipe's format."""
    if precision.qat is not None:
        return FakeQuantised(precision)
    if not precision.low:
        return Products()
    if device.type != "cuda":
        return LowPrecision(precision)
    if (own := torch.cuda.get_device_capability(device)) < CAPABILITY[precision.compute]:
        fits = [recipe for recipe, least in CAPABILITY.items() if own >= least]
        needed = ".".join(map(str, CAPABILITY[precision.compute]))
        raise UserError(
            f"precision.compute: {precision.compute!r} needs a GPU of compute capability {needed}, and "
            f"{torch.cuda.get_device_name(device)} has {own[0]}.{own[1]}; try {' or '.join(fits or ['bf16'])}"
        )
    # torch's kernel for scales of rows returns bf16 only.
    kernels = precision.compute in ("fp8", "fp8-rowwise") and precision.high == "bf16"
    return (KernelProducts if kernels else LowPrecision)(precision)
