"""Number formats of a run, and the rules of recipes whose matrix products have fewer than 16 bits."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, PositiveFloat, PositiveInt, model_validator

from meshwright.spec.base import FrozenModel
from meshwright.spec.errors import UserError

Quantised = Literal["int8", "int4", "int8-dynamic", "fp8"]

Compute = Literal["fp64", "fp32", "bf16", "fp16", "fp8", "fp8-rowwise", "fp8-blockwise", "mxfp8", "nvfp4"]

BLOCKS: dict[str, int] = {"fp8": 16, "fp8-rowwise": 16, "fp8-blockwise": 128, "mxfp8": 32, "nvfp4": 16}
"""Recipe of low precision -> the number that divides the sides of its matrices: those of its scales' blocks,
or else what kernels take (cuBLAS: 16)."""

BLOCKS_OF_TOKENS = ("fp8-blockwise", "mxfp8", "nvfp4")
"""Recipes whose gradients of weights have scales for blocks of tokens."""

DELAYED = ("fp8", "nvfp4")
"""Recipes with scales of whole tensors, which follow from the steps before."""


FP8_GATHERS = ("fp8", "fp8-blockwise")
"""Recipes that compute with the same 8 bits of a weight forward and backward, so that ranks may gather
these."""

FP8_TILE = 128
"""Rows and columns of a weight that share a scale in fp8-blockwise."""

WORD = 8
"""A message of weights in 8 bits ends at a multiple of so many bytes."""


class PrecisionSpec(FrozenModel):
    """Number formats of the computation and of the reduction of gradients."""

    compute: Compute = Field(
        "fp32",
        description="bf16 and fp16 keep fp32 master weights, cast as they are gathered; fp8 (one scale for a "
        "tensor, of the steps before), fp8-rowwise, fp8-blockwise, mxfp8 and nvfp4 cast the operands of the "
        "blocks' matrix products",
    )
    high: Literal["bf16", "fp32", "fp64"] = Field(
        "bf16", description="format of all but those products, with compute = fp8 and narrower"
    )
    fp8_gradients: Literal["e4m3", "e5m2"] | None = Field(
        None, description="format of gradients in products of fp8; default e5m2 for fp8, e4m3 for the others"
    )
    fp8_gather: bool = Field(
        False, description="gather weights in 8 bits, with compute = fp8 or fp8-blockwise"
    )
    amax_history: PositiveInt = Field(
        16, le=1024, description="steps whose largest number sets the scale of a tensor, in fp8 and nvfp4"
    )
    master: Literal["fp32", "bf16"] = Field(
        "fp32",
        description="format of the weights that the optimiser updates; bf16 takes 2 bytes instead of 4 and "
        "the copy that computes, and rounds each update stochastically",
    )
    qat: Quantised | None = Field(
        None,
        description="quantisation-aware training: forward products take the blocks' weights as `quantise` "
        "rounds them by this recipe, and gradients pass through the rounding",
    )
    qat_group: Literal[32, 64, 128] = Field(32, description="columns that share a scale, with qat = int4")
    reduce: Literal["fp32", "bf16"] = Field("fp32", description="format that gradients are summed in")
    loss_scale: PositiveFloat = Field(65536.0, description="first loss scale of fp16")
    loss_scale_window: PositiveInt = Field(1000, description="good steps before fp16's loss scale doubles")

    @model_validator(mode="after")
    def _has_effect(self) -> PrecisionSpec:
        if self.fp8_gradients is not None and not self.compute.startswith("fp8"):
            raise UserError(
                f"precision.fp8_gradients: {self.fp8_gradients!r} has no effect with precision.compute = "
                f"{self.compute!r}; give fp8, fp8-rowwise or fp8-blockwise there, or leave it out"
            )
        for key, recipes, why in (
            ("amax_history", DELAYED, "whose scales follow from no step before"),
            ("loss_scale", ("fp16",), "which scales no loss"),
            ("loss_scale_window", ("fp16",), "which scales no loss"),
        ):
            value = getattr(self, key)
            if value != type(self).model_fields[key].default and self.compute not in recipes:
                raise UserError(
                    f"precision.{key}: {value} has no effect with precision.compute = {self.compute!r}, "
                    f"{why}; give {' or '.join(recipes)} there, or leave it out"
                )
        if self.qat is not None and self.low:
            raise UserError(
                f"precision.qat: {self.qat!r} does not go with precision.compute = {self.compute!r}, which "
                f"rounds the same operands; give bf16 or fp32 there, or leave precision.qat out"
            )
        if self.qat != "int4" and self.qat_group != type(self).model_fields["qat_group"].default:
            raise UserError(
                f"precision.qat_group: {self.qat_group} has no effect with precision.qat = "
                f"{self.qat or 'none'!r}, which has no groups; give int4 there, or leave it out"
            )
        if self.high != "bf16" and self.compute not in BLOCKS:
            raise UserError(
                f"precision.high: {self.high!r} has no effect with precision.compute = {self.compute!r}, "
                f"the format of everything; give one of {', '.join(BLOCKS)} there, or leave it out"
            )
        if self.master == "bf16" and self.base not in ("bf16", "fp64"):
            key = "high" if self.low else "compute"
            raise UserError(
                f"precision.master: 'bf16' does not go with precision.{key} = {self.base!r}, in which "
                f"weights would be rounded to bf16 before each use; give bf16 there, or precision.master = "
                f"'fp32'"
            )
        if self.fp8_gather and self.compute not in FP8_GATHERS:
            raise UserError(
                f"precision.fp8_gather: true does not go with precision.compute = {self.compute!r}, as the 8 "
                f"bits that a weight is gathered in should serve both passes; give {' or '.join(FP8_GATHERS)}"
            )
        return self

    @property
    def side_block(self) -> int:
        """The number that divides the sides of the blocks' matrices on a rank."""
        return self.qat_group if self.qat == "int4" else BLOCKS.get(self.compute, 1)

    @property
    def low(self) -> bool:
        """True if products of matrices have fewer than 16 bits."""
        return self.compute in BLOCKS

    @property
    def base(self) -> Literal["fp64", "fp32", "bf16", "fp16"]:
        """The format of activations and of all that is not a product in low precision."""
        if self.compute in ("fp64", "fp32", "bf16", "fp16"):
            return self.compute
        return self.high
