"""Seconds of one operator on one device, from its shape: matrix products, attention, what only moves bytes.

A matrix product is cut into tiles that the device's units compute in waves; a last wave that is not full
costs as much as a full one, a short sum along K does not pay its tiles' start, sizes that the tensor cores'
words do not divide are slow, and nothing is faster than its operands can be moved (Williams et al. 2009,
the roofline; NVIDIA 2023, Matrix Multiplication Background User's Guide). What a large, even product
attains is the device's own rate. Where a machine was measured, its own times are interpolated instead.
"""

from __future__ import annotations

from math import ceil

from meshwright.hardware.cluster import Device, Measured
from meshwright.hardware.measurements import attention_seconds, matmul_seconds

_TILES = ((256, 128, 1.0), (128, 256, 1.0), (128, 128, 0.93), (128, 64, 0.80), (64, 64, 0.62))
"""Rows, columns, and the rate of a product in such tiles over that in the largest."""
_DEPTH = 180.0
"""Steps of K in which a tile would compute what its start and its end cost."""
_WORD = 16
"""Bytes that K and N should be a multiple of."""
_SHORT = 400.0
"""Tokens of a sequence by which causal tiles that are half masked weigh more."""

FORMAT_BYTES = {"fp64": 8.0, "fp32": 4.0, "tf32": 4.0, "bf16": 2.0, "fp16": 2.0, "fp8": 1.0, "fp4": 0.5}


def peak(device: Device, format: str) -> float:
    """FLOP/s of the format, or of the nearest one that the device has: tf32 for fp32, bf16 for fp8."""
    if format == "fp32" and "tf32" in device.peak:
        return device.peak["tf32"]
    for name in (format, "bf16", "fp16", "fp32"):
        if name in device.peak:
            return device.peak[name]
    return max(device.peak.values())


class KernelCosts:
    """Operators of one device. Seconds do not include what it costs to launch them."""

    def __init__(
        self,
        device: Device,
        matmul: float = 1.0,
        native_attention: bool = True,
        measured: Measured | None = None,
    ) -> None:
        self.device, self.measured = device, measured
        self._matmul = matmul
        self._attention = 1.0 if native_attention else device.rates.attention_ported
        self._known: dict[tuple[str, int, int, int, int], float] = {}
        self._bandwidth = device.bandwidth * device.rates.memory
        if measured is not None and measured.memory_bandwidth:
            self._bandwidth = measured.memory_bandwidth

    def matmul(self, format: str, m: int, n: int, k: int, batch: int = 1) -> float:
        """Seconds of `batch` products of (m, k) and (k, n)."""
        key = (format, m, n, k, batch)
        found = self._known.get(key)
        if found is None:
            found = self._known[key] = self._product(format, m, n, k, batch)
        return found

    def _product(self, format: str, m: int, n: int, k: int, batch: int) -> float:
        if min(m, n, k, batch) < 1:
            return 0.0
        width = FORMAT_BYTES[format]
        moved = batch * (width * (m * k + k * n) + max(width, 2.0) * m * n)
        if self.measured is not None:
            seconds = matmul_seconds(self.measured, format, m, n, k)
            if seconds is not None:  # beyond the measured shapes no faster than operands are moved
                return max(batch * seconds, moved / self._bandwidth)
        device = self.device
        rate = peak(device, format) * device.rates.matmul * self._matmul * _alignment(format, n, k, batch)
        if format == "fp8":
            rate *= device.rates.fp8
        best = min(
            ceil(batch * ceil(m / rows) * ceil(n / columns) / device.units) * rows * columns / share
            for rows, columns, share in _TILES
        )
        compute = 2.0 * best * device.units * (k + _DEPTH) / rate
        return max(compute, moved / self._bandwidth)

    def attention(self, format: str, flops: float, length: float, backward: bool) -> float:
        """Seconds of fused attention of `flops` over sequences of `length` tokens, one way.

        `flops` are those that are done: of two products forward and five backward, the causal half only.
        """
        rates = self.device.rates
        rate = peak(self.device, "bf16" if format == "fp8" else format)
        rate *= self._attention * (rates.attention_backward if backward else rates.attention)
        return flops * (1 + _SHORT / length) / rate

    def attention_of(
        self, format: str, sequences: int, heads: int, kv_heads: int, head_dim: int, length: int
    ) -> tuple[float, float] | None:
        """Seconds of causal attention, (forward, backward), where it was measured; else None."""
        if self.measured is None:
            return None
        return attention_seconds(self.measured, format, sequences, heads, kv_heads, head_dim, length)

    def launched(self, otherwise: float, operators: float) -> float:
        """Seconds of the host for an operator: so many bare ones where one was measured and that is said."""
        if self.measured is None or self.measured.launch is None or not operators:
            return otherwise
        return operators * self.measured.launch

    def updated(self, whole: float, parts: float) -> float:
        """Seconds of the optimiser for a parameter: `whole` bytes, of which `parts` are not AdamW's."""
        if self.measured is None or not self.measured.optimiser_bandwidth:
            return self.moved(whole)
        return (whole - parts) / self.measured.optimiser_bandwidth + self.moved(parts)

    def moved(self, size: float) -> float:
        """Seconds of operators that read and write `size` bytes and compute next to nothing."""
        return size / self._bandwidth


def _alignment(format: str, n: int, k: int, batch: int) -> float:
    """The share of the rate that is left where sizes are no multiple of the tensor cores' words."""
    words = int(_WORD / FORMAT_BYTES[format])
    found = 1.0
    for size in (n, k):
        if size % words:
            found *= 0.5 if batch == 1 else 0.07
    return found
