"""The products of linear layers in low precision by the kernels of `torch._scaled_mm`.

An operand is cast once for each dim that products sum over, both in one pass where both are known to be
needed: an input for the product and, kept for the backward, for the gradient of the weight; the gradient of a
result for the gradients of input and weight. A weight is cast in the forward and again in the backward, since
ZeRO frees it between.

    recipe          kernels from capability   operands, by the product that they are in
    fp8             8.9                       a scale each
    fp8-rowwise     8.9                       a scale for a row; gradients of weights in bf16
    fp8-blockwise   9.0                       1 x 128 by 128 x 128; gradients of weights 1 x 128 by 1 x 128
                    10.0                      the same in blocks of 32, four of which have one scale
    mxfp8           10.0                      1 x 32
    nvfp4           10.0                      1 x 16, and a scale for the tensor

Sides that a kernel does not take are left to `LowPrecision`. Experts have kernels by row, on 9.0 alone.

Shapes: N tokens, O outputs, I inputs of a linear layer, R rows of experts.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from functools import partial
from itertools import zip_longest

import torch
from torch import Tensor, nn
from torch.nn.functional import ScalingType, SwizzleType

from meshwright.kernels.gradient_accumulation_fusion import RunningSum
from meshwright.kernels.low_precision import E4M3
from meshwright.kernels.low_precision_casts import Cast, Casts, by_nvfp4, by_row, by_tensor, by_tile
from meshwright.model.grouped_mm import one_kernel
from meshwright.model.low_precision_linear import (
    FakeQuantised,
    LowPrecision,
    Operand,
    Parameters,
    Products,
    Role,
)
from meshwright.model.token_dispatcher import RowGroups
from meshwright.spec.errors import UserError
from meshwright.spec.precision import PrecisionSpec

CAPABILITY = {
    "fp8": (8, 9),
    "fp8-rowwise": (8, 9),
    "fp8-blockwise": (9, 0),
    "mxfp8": (10, 0),
    "nvfp4": (10, 0),
}
"""The first compute capability of NVIDIA's that has a recipe's format. Source: cuBLAS 13 documentation."""


class KernelProducts(LowPrecision):
    """Products by the kernels of `torch._scaled_mm`, for operands in bf16."""

    def __init__(
        self, precision: PrecisionSpec, capability: tuple[int, int] = (9, 0), tells: bool = True
    ) -> None:
        """On a GPU of this compute capability; with `tells` products without a kernel are told."""
        super().__init__(precision)
        self._capability = capability
        self._mx = self.recipe == "mxfp8" or (self.recipe == "fp8-blockwise" and capability >= (10, 0))
        self._blocks = self._mx or self.recipe in ("fp8-blockwise", "nvfp4")
        self._side = 32 if self._mx or self.recipe == "nvfp4" else self.block
        """Sides of operands are multiples of this one."""
        self._tells = tells
        self._told: set[str] = set()

    # Operands ---------------------------------------------------------------------------------------

    def input(
        self,
        x: Tensor,
        weights: Sequence[Tensor],
        parameters: Parameters,
        product: bool = True,
        gradient: bool = True,
    ) -> Operand:
        own = parameters[: len(weights)]
        across = gradient and self._rounds_gradients(own)
        if not self._takes(x.shape[:-1].numel(), weights) or not (product or across):
            return Operand(x)
        found = self._cast(x.flatten(0, -2), "input", own, product, across)
        return Operand(None if across else x, *found)

    def gradients(
        self, grads: Sequence[Tensor], weights: Sequence[Tensor], parameters: Parameters
    ) -> list[Operand]:
        if not self._takes(len(grads[0]), weights):
            return super().gradients(grads, weights, parameters)
        own, found = parameters[: len(grads)], []
        for grad, parameter in zip_longest(grads, own):
            across = self._rounds_gradients([parameter] if parameter is not None else [])
            casts = self._cast(grad, "gradient", [parameter] if parameter is not None else [], True, across)
            found.append(Operand(None if across else grad, *casts))
        return found

    def _takes(self, rows: int, weights: Sequence[Tensor]) -> bool:
        """True if kernels take the products of so many rows with these weights."""
        if not self.scaled or rows == 0:
            return False
        sides = [side for weight in weights for side in weight.shape]
        sums = [] if self.recipe == "fp8-rowwise" else [rows]
        taken = all(side % self._side == 0 for side in [*sides, *sums])
        if not taken:
            shapes = ", ".join(" x ".join(map(str, weight.shape)) for weight in weights)
            self._tell(
                f"{rows} tokens by matrices of {shapes}, whose sides are not multiples of {self._side}"
            )
        return taken

    def _tell(self, products: str) -> None:
        """Warn, once, of products that are computed without a kernel for the recipe."""
        if self._tells and products not in self._told:
            self._told.add(products)
            warnings.warn(f"{_without(self.recipe)} for {products}: {_INSTEAD}", stacklevel=2)

    def _rounds_gradients(self, parameters: Parameters) -> bool:
        """True if the gradient of any of these weights is computed, of rounded operands."""
        trained = not parameters or any(each.requires_grad for each in parameters)
        return trained and self.recipe != "fp8-rowwise"

    def _cast(
        self, x: Tensor, role: Role, parameters: Parameters, along: bool, across: bool, noted: bool = True
    ) -> Casts:
        """An operand (R, C) for products along its columns, and across, along its rows."""
        x, form, square = x.contiguous(), self.forms[role], role == "weight"
        if self.recipe == "fp8-rowwise":
            return Casts(
                by_row(x, form) if along else None, by_row(x, form, columns=True) if across else None
            )
        if self._mx or self.recipe == "fp8-blockwise":
            square = square and self.recipe == "fp8-blockwise"
            return by_tile(x, form, self.block, square, self._mx, along, across)
        scale, seen = self._given(role, *parameters), self._seen(role, *parameters) if noted else []
        if self.recipe == "fp8":
            return by_tensor(x, form, scale, seen, along, across)
        random, rotated = role == "gradient", role != "weight"
        return by_nvfp4(x, scale, seen, square, random, rotated, along, across)

    def _weight(self, weight: Tensor, parameter: nn.Parameter | None, across: bool) -> Cast:
        """A weight (O, I) for the forward, or with `across` for the gradient of an input."""
        own = [] if parameter is None else [parameter]
        found = self._cast(weight, "weight", own, not across, across, noted=not across)[int(across)]
        assert found is not None
        return found

    # Products ---------------------------------------------------------------------------------------

    def forward(
        self, operand: Operand, weights: Sequence[Tensor], biases: Sequence[Tensor], parameters: Parameters
    ) -> list[Tensor]:
        if operand.along is None:
            return super().forward(operand, weights, biases, parameters)
        products = []
        for weight, bias, parameter in zip_longest(weights, biases, parameters[: len(weights)]):
            product = self._multiply(operand.along, self._weight(weight, parameter, False), square=True)
            products.append(product if bias is None else product.add_(bias))
        return products

    def of_input(
        self, operands: Sequence[Operand], weights: Sequence[Tensor], parameters: Parameters
    ) -> Tensor:
        total: Tensor | None = None
        for operand, weight, parameter in zip_longest(operands, weights, parameters[: len(weights)]):
            if operand.along is None:
                return super().of_input(operands, weights, parameters)
            product = self._multiply(operand.along, self._weight(weight, parameter, True), square=True)
            total = product if total is None else total.add_(product)
        assert total is not None
        return total

    def of_weight(
        self, grad: Operand, x: Operand, parameter: nn.Parameter | None, into: RunningSum | None = None
    ) -> Tensor | None:
        if grad.across is None or x.across is None:
            return super().of_weight(grad, x, parameter, into)
        multiply = partial(self._multiply, grad.across, x.across, square=False)
        if into is None:
            return multiply()
        into.write(lambda out: multiply(out=out))
        return None

    def _multiply(self, left: Cast, right: Cast, square: bool, out: Tensor | None = None) -> Tensor:
        """left (M, K) times the transpose of right (N, K), in bf16, or in the format of `out` and there.

        `square` says that right is a weight.
        """
        form = torch.bfloat16 if out is None else out.dtype
        if not self._blocks:
            rows = left.scales.unsqueeze(1) if left.scales.ndim else left.scales
            columns = right.scales.unsqueeze(0) if right.scales.ndim else right.scales
            return torch._scaled_mm(left.numbers, right.numbers.T, rows, columns, out_dtype=form, out=out)
        kinds = [ScalingType.BlockWise1x32]
        swizzles = [SwizzleType.SWIZZLE_32_4_4]
        left_kinds, left_scales, right_scales = kinds, [left.scales], [right.scales]
        if left.whole is not None and right.whole is not None:
            left_kinds = kinds = [ScalingType.BlockWise1x16, ScalingType.TensorWise]
            swizzles = [*swizzles, SwizzleType.NO_SWIZZLE]
            left_scales, right_scales = [*left_scales, left.whole], [*right_scales, right.whole]
        elif not self._mx:
            left_kinds, swizzles = [ScalingType.BlockWise1x128], []
            kinds = [ScalingType.BlockWise128x128] if square else left_kinds
            left_scales, right_scales = [left.scales.T], [right.scales.T]
        # `torch.nn.functional.scaled_mm`, but for `out`.
        return torch._scaled_mm_v2(
            left.numbers, right.numbers.T,
            left_scales, _values(left_kinds), _values(swizzles),
            right_scales, _values(kinds), _values(swizzles), None, form, out=out,
        )  # fmt: skip

    # Experts ----------------------------------------------------------------------------------------

    def operand(self, x: Tensor, role: Role, dim: int, *parameters: nn.Parameter | None) -> Tensor:
        """An operand of products without a kernel: with one scale it is cast, and the numbers are scaled."""
        if self.recipe != "fp8" or not self.scaled or not x.numel():
            return super().operand(x, role, dim, *parameters)
        own = [parameter for parameter in parameters if parameter is not None]
        (found, _) = self._cast(x, role, own, True, False)
        assert found is not None
        return found.numbers.to(x.dtype).mul_(found.scales)

    def _groups(self, rows: Tensor, weight: Tensor, role: Role) -> bool:
        """True if a kernel takes the products of rows with experts: in e4m3, with scales of rows."""
        by_rows = self.recipe in ("fp8", "fp8-rowwise") and self._capability[0] == 9
        if not self.scaled or not one_kernel(rows) or len(rows) == 0:
            return False
        sides = all(side % self._side == 0 for side in weight.shape[-2:])
        taken = by_rows and sides and self.forms[role] is E4M3
        if not taken:
            form = f" by operands in {self.forms[role].dtype}" if by_rows and sides else ""
            self._tell(f"experts{form} on compute capability {'.'.join(map(str, self._capability))}")
        return taken

    def expert_input(self, x_RI: Tensor, weight_EOI: Tensor, parameter: nn.Parameter) -> Operand:
        if not self._groups(x_RI, weight_EOI, "input"):
            return super().expert_input(x_RI, weight_EOI, parameter)
        return Operand(x_RI, self._cast(x_RI, "input", [parameter], True, False).along)

    def grouped(self, x: Operand, weight_EOI: Tensor, parameter: nn.Parameter, groups: RowGroups) -> Tensor:
        if x.along is None:
            return super().grouped(x, weight_EOI, parameter, groups)
        return _grouped(x.along, self._weight(weight_EOI, parameter, False), groups)

    def grouped_of_input(
        self,
        grad_RO: Tensor,
        weight_EOI: Tensor,
        parameter: nn.Parameter,
        groups: RowGroups,
        onto: Tensor | None = None,
    ) -> Tensor:
        if not self._groups(grad_RO, weight_EOI, "gradient"):
            return super().grouped_of_input(grad_RO, weight_EOI, parameter, groups, onto)
        rows = self._cast(grad_RO, "gradient", [parameter], True, False).along
        assert rows is not None
        product = _grouped(rows, self._weight(weight_EOI, parameter, True), groups)
        return product if onto is None else onto.add_(product)


def _values(kinds: Sequence[ScalingType | SwizzleType]) -> list[int]:
    """Kinds of scales, or of their layouts, as the operator takes them."""
    return [each.value for each in kinds]


def _grouped(rows: Cast, weights: Cast, groups: RowGroups) -> Tensor:
    """Rows (R, K) of experts times the transposes of their weights (E, N, K)."""
    left, right = (each.scales.expand(each.numbers.shape[:-1]).contiguous() for each in (rows, weights))
    return torch._scaled_grouped_mm(
        rows.numbers, weights.numbers.mT, left, right, offs=groups.ends, out_dtype=torch.bfloat16
    )


def _check_bf16(precision: PrecisionSpec, device: torch.device) -> None:
    """Raise `UserError` for bf16 on a GPU of NVIDIA's that has no products of it."""
    if precision.compute != "bf16" or device.type != "cuda" or torch.version.hip:
        return
    if (own := torch.cuda.get_device_capability(device)) < (8, 0):
        raise UserError(
            "precision.compute: 'bf16' needs a GPU of compute capability 8.0, and "
            f"{torch.cuda.get_device_name(device)} has {own[0]}.{own[1]}; try fp16"
        )


def products_of(precision: PrecisionSpec, device: torch.device, tells: bool = True) -> Products:
    """The products of a run on a device; with `tells` a warning says which have no kernel.

    Raises `UserError` for a GPU without the recipe's format.
    """
    if precision.qat is not None:
        return FakeQuantised(precision)
    if not precision.low:
        _check_bf16(precision, device)
        return Products()
    if device.type != "cuda":
        return LowPrecision(precision)
    if (own := torch.cuda.get_device_capability(device)) < CAPABILITY[precision.compute]:
        fits = [recipe for recipe, least in CAPABILITY.items() if own >= least]
        plain = "bf16" if own >= (8, 0) else "fp16"
        needed = ".".join(map(str, CAPABILITY[precision.compute]))
        raise UserError(
            f"precision.compute: {precision.compute!r} needs a GPU of compute capability {needed}, and "
            f"{torch.cuda.get_device_name(device)} has {own[0]}.{own[1]}; try {' or '.join(fits or [plain])}"
        )
    if has_kernels(precision, own):
        return KernelProducts(precision, own, tells)
    if tells:
        why = f"precision.high = {precision.high!r}" if precision.high != "bf16" else "gradients in e5m2"
        warnings.warn(f"{_without(precision.compute)} for {why}: {_INSTEAD}", stacklevel=2)
    return LowPrecision(precision)


_INSTEAD = "operands are rounded and multiplied in precision.high, which saves no time"


def _without(recipe: str) -> str:
    return f"precision.compute: torch has no kernel of {recipe!r}"


def has_kernels(precision: PrecisionSpec, capability: tuple[int, int]) -> bool:
    """True if a GPU that has a recipe's format has kernels for the run's products in torch.

    They take and return bf16, and blocks of 32 and fewer have no gradients in e5m2.
    """
    in_32 = capability >= (10, 0) and precision.compute == "fp8-blockwise"
    return precision.high == "bf16" and not (in_32 and precision.fp8_gradients == "e5m2")
