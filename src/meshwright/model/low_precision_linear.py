"""The three matrix products of a linear layer, in the format of its operands or in low precision.

A recipe of low precision (`kernels/low_precision.py`) rounds the operands along the dim that is summed, and
products are summed in fp32. Here they are products of the rounded operands; GPUs have kernels for the same
products (`model/scaled_products.py`), whose results differ by the order of sums. nvfp4 rounds gradients
stochastically, and rotates both operands of the gradient of a weight.

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
from meshwright.kernels.low_precision import E4M3, E5M2, rotate, round_nvfp4, round_tensor, round_tiles
from meshwright.kernels.low_precision_casts import Cast, note
from meshwright.model.grouped_mm import grouped_mm
from meshwright.model.quantisation import fake_quantise, fake_quantise_tokens
from meshwright.model.token_dispatcher import RowGroups
from meshwright.spec.precision import BLOCKS, DELAYED, PrecisionSpec

Role = Literal["input", "weight", "gradient"]
ROLES: tuple[Role, ...] = ("input", "weight", "gradient")
Parameters = Sequence[nn.Parameter]


class Operand(NamedTuple):
    """An operand of the products of linear layers: as it is, or rounded for products along either dim."""

    plain: Tensor | None
    """(..., R, C), for products that round it themselves or not at all."""
    along: Cast | None = None
    """(R, C), for products that sum over its columns."""
    across: Cast | None = None
    """Its transpose (C, R), for products that sum over its rows: the gradient of a weight."""

    @property
    def whole(self) -> Tensor:
        """The operand as it is, where it has been kept."""
        assert self.plain is not None
        return self.plain

    @property
    def kept(self) -> list[Tensor]:
        """Tensors that the gradient of a weight takes; `operand_of` makes an operand of them."""
        return [self.whole] if self.across is None else [each for each in self.across if each is not None]


def operand_of(kept: Sequence[Tensor]) -> Operand:
    """The operand that the gradient of a weight takes, of the tensors that were kept."""
    return Operand(kept[0]) if len(kept) == 1 else Operand(None, across=Cast(*kept))


class Products:
    """Products of operands that are not rounded. `parameter` is that of the weight."""

    low = False

    def input(
        self,
        x: Tensor,
        weights: Sequence[Tensor],
        parameters: Parameters,
        product: bool = True,
        gradient: bool = True,
    ) -> Operand:
        """The input x (..., I) of linear layers with these weights (O, I): for their product, their
        gradients, or both."""
        return Operand(x)

    def gradients(
        self, grads: Sequence[Tensor], weights: Sequence[Tensor], parameters: Parameters
    ) -> list[Operand]:
        """The gradients (N, O) of the results of linear layers with these weights."""
        return [Operand(grad) for grad in grads]

    def operand(self, x: Tensor, role: Role, dim: int, *parameters: nn.Parameter | None) -> Tensor:
        """An operand (..., R, C) of products with these weights that sum over its `dim`, -1 or -2."""
        return x

    def rows(self, x_RC: Tensor, role: Role, parameter: nn.Parameter | None) -> Tensor:
        """An operand of a product that sums over rows whose order depends on the layout, as experts' do."""
        return x_RC

    def forward(
        self, operand: Operand, weights: Sequence[Tensor], biases: Sequence[Tensor], parameters: Parameters
    ) -> list[Tensor]:
        """An input (..., I) by each of the weights (O, I), plus its bias: (..., O) or (N, O) each."""
        own = parameters[: len(weights)]
        x = self.operand(operand.whole, "input", -1, *own)
        rounded = [self.operand(weight, "weight", -1, each) for weight, each in zip_longest(weights, own)]
        return [F.linear(x, weight, bias) for weight, bias in zip_longest(rounded, biases)]

    def of_input(
        self, operands: Sequence[Operand], weights: Sequence[Tensor], parameters: Parameters
    ) -> Tensor:
        """The gradient (N, I) of the input: the sum of gradients (N, O) by their weights (O, I)."""
        own = parameters[: len(weights)]
        weights = [self.operand(weight, "weight", -2, each) for weight, each in zip_longest(weights, own)]
        pairs = zip_longest(operands, own)
        grads = [self.operand(each.whole, "gradient", -1, parameter) for each, parameter in pairs]
        total = grads[0] @ weights[0]
        for grad, weight in zip(grads[1:], weights[1:], strict=True):
            torch.addmm(total, grad, weight, out=total)  # counters of operations know no `addmm_`
        return total

    def of_weight(
        self, grad: Operand, x: Operand, parameter: nn.Parameter | None, into: RunningSum | None = None
    ) -> Tensor | None:
        """The gradient (O, I) of a weight, or None if added `into` a sum."""
        left_ON = self.operand(grad.whole, "gradient", -2, parameter).T
        right_NI = self.operand(x.whole.flatten(0, -2), "input", -2, parameter)
        if into is None:
            return left_ON @ right_NI
        into.add_product(left_ON, right_NI)
        return None

    # Experts: R rows that are sorted by expert, weights (E, O, I) ------------------------------------

    def expert_input(self, x_RI: Tensor, weight_EOI: Tensor, parameter: nn.Parameter) -> Operand:
        """An input of experts, as their products take it."""
        return Operand(self.operand(x_RI, "input", -1, parameter))

    def grouped(self, x: Operand, weight_EOI: Tensor, parameter: nn.Parameter, groups: RowGroups) -> Tensor:
        """Each expert's rows by its weight: (R, O)."""
        return grouped_mm(x.whole, self.operand(weight_EOI, "weight", -1, parameter), groups)

    def grouped_of_input(
        self,
        grad_RO: Tensor,
        weight_EOI: Tensor,
        parameter: nn.Parameter,
        groups: RowGroups,
        onto: Tensor | None = None,
    ) -> Tensor:
        """The gradient (R, I) of the experts' input, added to `onto` in its memory."""
        turned = self.operand(weight_EOI, "weight", -2, parameter).mT
        return grouped_mm(self.operand(grad_RO, "gradient", -1, parameter), turned, groups, onto)


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
        note(x, self._seen(role, *parameters))
        return self._given(role, *parameters)

    def _given(self, role: Role, *parameters: nn.Parameter | None) -> Tensor:
        """The scale of a whole tensor, which is the first weight's."""
        first = next(parameter for parameter in parameters if parameter is not None)
        return self.scalings[first].scales[ROLES.index(role)]

    def _seen(self, role: Role, *parameters: nn.Parameter | None) -> list[Tensor]:
        """Where the largest number of an operand is noted for each of the weights, if it is."""
        if not self.noting:
            return []
        own = [self.scalings[parameter] for parameter in parameters if parameter is not None]
        return [each.seen[ROLES.index(role)] for each in own]


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
