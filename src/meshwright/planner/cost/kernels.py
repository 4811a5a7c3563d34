"""Seconds of one operator on one device, from its shape: matrix products, attention, memory-bound operators.

A matrix product is cut into tiles, which the device's units compute in waves. A partial last wave costs as
much as a full one, a small K does not amortise the start of a tile, sizes that are not multiples of the
tensor cores' word size are slow, and no product is faster than moving its operands (Williams et al. 2009,
roofline; NVIDIA 2023, Matrix Multiplication Background User's Guide). Large, aligned products attain the
device's own rate. Measured times of a machine, where present, are interpolated instead.
"""

from __future__ import annotations

from functools import cache
from math import ceil, log2

from meshwright.hardware.cluster import Device, ProfiledTimes
from meshwright.hardware.measurements import matmul_seconds
from meshwright.units import FORMAT_BYTES

_TILES = ((256, 128, 1.0), (128, 256, 1.0), (128, 128, 0.93), (128, 64, 0.80), (64, 64, 0.62))
"""Rows, columns, and rate relative to the largest tiles. Source: the sizes are cuBLAS's (NVIDIA 2023,
section "Tile quantization"); fitted on: the published runs, by hand (relative rates)."""
_DEPTH = 180.0
"""Start and end of a tile, in steps of K. Fitted on: the published runs, by hand."""
WORD = 16
"""Bytes that K and N should be a multiple of. Source: NVIDIA 2023, section "Tensor core requirements"."""
_SHORT = 400.0
"""Tokens of a sequence that half-masked causal tiles are worth. Fitted on: the published runs, by hand."""
START = 2.5e-6
"""Seconds from one kernel to the next on a device, in which nothing is computed. Source: assumed."""
_FIRST = 0.55
"""Rate of FlashAttention-1, or a kernel as memory-efficient, beside FlashAttention-2. Source: Dao 2023
(FlashAttention-2), figures 4 to 6."""
_HEADS = {"flash2": (0.89, 0.89), "flash1": (0.89, 0.89), "cudnn": (0.72, 0.94)}
_NEWER_HEADS = 0.77, 1.04
"""Rates of kernels of attention at 64 and at 256 channels a head, over that at 128. Source: Shah et al. 2024
(FlashAttention-3), figure 5, causal forward over 16k tokens on an H100. Assumed: the same in the backward,
and later releases of FlashAttention are as the third."""
_UNALIGNED, _UNALIGNED_BATCHED = 0.5, 0.07
"""Factor on the rate per unaligned size, of one product and of batched ones. Fitted on: the published runs,
by hand (attention without fused kernels)."""


def peak(device: Device, format: str) -> float:
    """Peak FLOP/s in the format, or in the nearest one that the device has: tf32 for fp32, bf16 for fp8."""
    return device.peak[computed(device, format)]


def computed(device: Device, format: str) -> str:
    """The format in which a device computes products of a format: another one where it has no peak for it."""
    wider = ("fp8",) if format == "fp4" else ("tf32",) if format == "fp32" else ()
    order = (*wider, format) if format == "fp32" else (format, *wider)
    return next(
        (name for name in (*order, "bf16", "fp16", "fp32") if name in device.peak),
        max(device.peak, key=lambda n: device.peak[n]),
    )


def attained(device: Device, format: str) -> float:
    """FLOP/s of large, aligned matrix products."""
    name = computed(device, format)
    return device.peak[name] * device.attained(name)


class KernelCosts:
    """Seconds of the operators of one device, without their launches."""

    def __init__(
        self,
        device: Device,
        attention: str = "cudnn",
        measured: ProfiledTimes | None = None,
    ) -> None:
        self.device, self.measured = device, measured
        self._attention = attention
        self.matmul = cache(self._matmul)
        self._bandwidth = device.bandwidth * device.rates.memory
        if measured is not None and measured.memory_bandwidth:
            self._bandwidth = measured.memory_bandwidth

    def _matmul(self, format: str, m: int, n: int, k: int, batch: int = 1) -> float:
        """Seconds of `batch` products (m, k) x (k, n)."""
        if min(m, n, k, batch) < 1:
            return 0.0
        width = FORMAT_BYTES[format]
        moved = batch * (width * (m * k + k * n) + max(width, 2.0) * m * n)
        if self.measured is not None:
            seconds = matmul_seconds(self.measured, format, m, n, k)
            if seconds is not None:  # beyond the measured shapes the memory bandwidth still bounds it
                return max(batch * seconds, moved / self._bandwidth)
        device = self.device
        rate = self.large_rate(format) * _alignment(format, n, k, batch)
        best = min(
            ceil(batch * ceil(m / rows) * ceil(n / columns) / device.units) * rows * columns / share
            for rows, columns, share in _TILES
        )
        compute = 2.0 * best * device.units * (k + _DEPTH) / rate
        return max(compute, moved / self._bandwidth)

    def attention(
        self,
        format: str,
        flops: float,
        length: float,
        backward: bool,
        kernel: str | None = None,
        channels: float = 128.0,
    ) -> float:
        """Seconds of the forward or the backward of fused attention over sequences of `length` tokens.

        `flops` counts executed operations: two products in the forward and five in the backward, over the
        causal half only. `kernel` is a name that software stacks have for it, by default that of this one's;
        `channels` is the mean of those of a head's keys and values.
        """
        rates = self.device.rates
        name = computed(self.device, "bf16" if format in ("fp8", "fp4") else format)
        rate = self.device.peak[name] * self.device.clock(name)
        kernel = kernel or self._attention
        rate *= self._relative(kernel)
        if rates.array:
            rate *= min(1.0, channels / rates.array)
        elif self.device.kind != "cpu":
            rate *= _of_heads(kernel, channels)
        rate *= rates.attention_backward if backward else rates.attention
        return flops * (1 + _SHORT / length) / rate

    def _relative(self, kernel: str) -> float:
        """Rate of a kernel of attention beside one that is written for the device's generation."""
        rates = self.device.rates
        relative = 1.0 if kernel in (rates.native, "cudnn") else rates.attention_ported
        return relative * _FIRST if kernel == "flash1" else relative

    def large_rate(self, format: str) -> float:
        """FLOP/s of large, aligned matrix products."""
        return attained(self.device, format)

    def updated(self, whole: float, parts: float) -> float:
        """Seconds of the optimiser to move `whole` bytes, of which `parts` are not moved by AdamW itself."""
        if self.measured is None or not self.measured.optimiser_bandwidth:
            return self.moved(whole)
        return (whole - parts) / self.measured.optimiser_bandwidth + self.moved(parts)

    def moved(self, size: float, kernels: float = 0.0) -> float:
        """Seconds of memory-bound operators that read and write `size` bytes, in so many kernels that are
        counted."""
        return size / self._bandwidth + kernels * START


def _of_heads(kernel: str, channels: float) -> float:
    """Rate of a kernel of attention for heads of some channels, over that for 128."""
    narrow, wide = _HEADS.get(kernel, _NEWER_HEADS)
    doublings = log2(channels / 128)
    if doublings >= 0:
        return 1 + (wide - 1) * min(1.0, doublings)
    return 1 + (narrow - 1) * -doublings if doublings > -1 else narrow * channels / 64


def _alignment(format: str, n: int, k: int, batch: int) -> float:
    """Factor on the rate for sizes that are not multiples of the tensor cores' word size."""
    words = int(WORD / FORMAT_BYTES[format])
    unaligned = (n % words > 0) + (k % words > 0)
    return (_UNALIGNED if batch == 1 else _UNALIGNED_BATCHED) ** unaligned
