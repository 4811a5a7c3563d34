"""Number formats: what parameters are stored, computed and summed in, and fp16's loss scale.

Mixed precision without autocast (Micikevicius et al. 2018): master weights stay in fp32 and are cast as they
are gathered, so every operation runs in the compute format by the type of its inputs. With
`precision.master = "bf16"` weights are stored in bf16, the compute format, and each update is rounded
stochastically (`optim/stochastic_rounding.py`).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from meshwright.host import cpu_info
from meshwright.spec.precision import PrecisionSpec

DTYPES = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Formats:
    """master: stored parameters; compute: forward and backward; reduce: gradients on the wire; exact: sums of
    gradients, and moments. `rounded` is true if stored parameters are numbers of bf16, whatever holds them.
    """

    master: torch.dtype
    compute: torch.dtype
    reduce: torch.dtype
    exact: torch.dtype
    rounded: bool = False


def formats(precision: PrecisionSpec) -> Formats:
    """The formats of a run, but for products in low precision; fp64 is fp64 throughout."""
    compute, rounded = DTYPES[precision.base], precision.master == "bf16"
    if compute == torch.float64:
        return Formats(compute, compute, compute, compute, rounded)
    return Formats(DTYPES[precision.master], compute, DTYPES[precision.reduce], torch.float32, rounded)


def use_fast_fp32_matmul(device: torch.device) -> bool:
    """On a CPU, let fp32 products take oneDNN's path where that is faster and exact; returns whether they do.

    On Intel's processors MKL, which they take otherwise, is the faster library, and on others the slower one.
    torch calls the setting "medium" because it permits bf16 inside, and on some CPUs that is what it means;
    on others it merely picks oneDNN. So it is tried, its error measured, and kept only if that is one of fp32
    summation (some 1e-6 of the largest value; bf16's is 1e-3).
    """
    if device.type != "cpu":
        return False
    if torch.backends.mkl.is_available() and cpu_info("vendor_id") == "GenuineIntel":
        return False
    before = torch.get_float32_matmul_precision()
    generator = torch.Generator().manual_seed(0)
    a, b = torch.randn(2, 512, 512, generator=generator)
    exact = a.double() @ b.double()
    torch.set_float32_matmul_precision("medium")
    error = float(((a @ b) - exact).abs().max() / exact.abs().max())
    kept = error < 5e-6
    if not kept:
        torch.set_float32_matmul_precision(before)
    return kept


LARGEST_SCALE = 2.0**127
"""The largest power of two in fp32, in which the loss is multiplied."""


class LossScale:
    """Dynamic loss scale of fp16: halved at an overflow, down to 1, and doubled after `window` good steps.

    Other formats have the exponent range of fp32 and keep a scale of 1.
    """

    def __init__(self, precision: PrecisionSpec) -> None:
        self.dynamic = precision.compute == "fp16"
        self.value = precision.loss_scale if self.dynamic else 1.0
        self.window = precision.loss_scale_window
        self.good_steps = 0

    def update(self, finite: bool) -> None:
        """Take note of a step whose gradients were finite, or not."""
        if not self.dynamic:
            return
        if not finite:
            self.value, self.good_steps = min(self.value, max(1.0, self.value / 2)), 0
            return
        self.good_steps += 1
        if self.good_steps == self.window:
            self.value, self.good_steps = min(self.value * 2, LARGEST_SCALE), 0

    def state(self) -> dict[str, float]:
        """State for a checkpoint."""
        return {"value": self.value, "good_steps": self.good_steps}

    def restore(self, state: dict[str, float]) -> None:
        """Continue from `state()`."""
        if self.dynamic:
            self.value, self.good_steps = float(state["value"]), int(state["good_steps"])
