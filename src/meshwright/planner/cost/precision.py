"""Precision recipes: formats in which a run computes matrix products, and bytes of casts and messages.

Of a recipe below 16 bits every operand is cast before its product, in both orientations by the time of the
backward, and scaled: by tensor (Micikevicius et al. 2022), by row (PyTorch's torchao), by block of 128
(DeepSeek-AI 2024), of 32 (MX; OCP 2023) or of 16 numbers (NVFP4; NVIDIA 2025).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from meshwright.hardware.cluster import Device
from meshwright.spec.errors import UserError


class OperandCasts(NamedTuple):
    """Bytes moved to cast an element of each operand of a linear layer, for all products that it is in."""

    input: float
    """In the forward, for its product and for the gradient of the weight."""
    gradient: float
    weight: float
    """In the forward and again in the backward, since ZeRO frees it between."""


@dataclass(frozen=True)
class Precision:
    """A recipe; a format that is not one is computed, kept and sent as it is."""

    products: str
    """Number format of matrix products."""
    cast: float = 0.0
    """Bytes moved to cast one element of an operand for one product."""
    sent: float = 2.0
    """Bytes of an element that tensor ranks gather for a product."""
    gathered: float = 2.0
    """Bytes of a parameter that data ranks gather, in programs that gather what is computed with."""
    kept: float = 2.0
    """Bytes of an element of a product's input until the backward, in such programs."""
    experts: Precision | None = None
    """The recipe of products of experts; None for this one."""
    operands: OperandCasts | None = None
    """The casts of this program's linear layers, one by one, in the place of `cast`."""


# counted: a tensor's largest number is found in one pass (2 bytes), and the cast reads 2 and writes 1, shared
# by the two products that an operand is in; scales by row or of 128 numbers differ between both; smaller
# blocks take one pass.
PRECISIONS = {
    "fp8": Precision("fp8", 3.0, 1.0, 1.0, 1.0),
    "fp8-rowwise": Precision("fp8", 10.0),
    "fp8-blockwise": Precision("fp8", 6.0, 2.0, 1.0, 1.0),
    "mxfp8": Precision("fp8", 3.0, 1.0, 1.0, 1.0),
    "mxfp4": Precision("fp4", 2.5, 1.0, 1.0, 0.5),
    "nvfp4": Precision("fp4", 4.0, 1.0, 1.0, 0.5),
}


# counted by a test: of an input or a gradient one pass reads 2 bytes and writes both casts, of a weight two
# passes write one each; a scale of a row takes a pass of its own, and gradients of weights are of 16 bits.
# Experts are multiplied in 16 bits where there is no kernel, rounded by operators through fp32
# (`model/scaled_products.py`); `cast` is what their operands take for a product.
OURS = {
    "fp8": Precision("fp8", 2.33, operands=OperandCasts(4.0, 4.0, 6.0)),
    "fp8-rowwise": Precision("fp8", 5.0, operands=OperandCasts(5.0, 5.0, 10.0)),
    "fp8-blockwise": Precision(
        "fp8", 2.35, experts=Precision("bf16", 50.0), operands=OperandCasts(4.06, 4.06, 6.0)
    ),
    "mxfp8": Precision("fp8", 2.36, experts=Precision("bf16", 53.0), operands=OperandCasts(4.06, 4.06, 6.06)),
    "nvfp4": Precision(
        "fp4", 1.9, experts=Precision("bf16", 270.0), operands=OperandCasts(3.125, 3.125, 5.125)
    ),
}
"""Recipes of this program."""

NEEDED = {"fp8": "fp8", "fp8-rowwise": "fp8", "fp8-blockwise": "fp8", "mxfp8": "fp4", "nvfp4": "fp4"}
"""Recipe -> the format that a GPU on which this program runs it has a peak for."""


def precision(name: str) -> Precision:
    """The recipe of a name, or of a plain number format."""
    return PRECISIONS.get(name) or Precision(name)


def check_computes(name: str, device: Device) -> None:
    """Raise `UserError` for a recipe, or the bf16 around it, on a device that does not compute in it."""
    if device.kind == "cpu" or name not in ("bf16", *OURS):
        return
    if "bf16" in device.peak:
        _check_kernels(name, device)
        return
    raise UserError(
        f"precision.compute: {name!r} needs bf16, and {device.name} computes in {', '.join(device.peak)}; "
        f"give {device.default_format}"
    )


def our_precision(name: str, device: Device) -> Precision:
    """The recipe of a name in this program. Raises `UserError` for a GPU that it does not run on."""
    if device.kind != "cpu":
        _check_kernels(name, device)
    return OURS.get(name) or Precision(name)


def _check_kernels(name: str, device: Device) -> None:
    if (needed := NEEDED.get(name)) and needed not in device.peak:
        raise UserError(
            f"precision.compute: {name!r} has no kernels on {device.name}, which computes in "
            f"{', '.join(device.peak)}; try bf16"
        )
