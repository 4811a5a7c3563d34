"""Seconds of one microbatch on one device, by pass and by cause, and the shape of a matrix product."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple


class Seconds(NamedTuple):
    """Seconds by cause."""

    matmul: float = 0.0
    attention: float = 0.0
    moved: float = 0.0
    """Memory-bound operators: norms, activations, residuals, copies."""
    host: float = 0.0
    """The device waits for the host to launch operators."""
    tensor: float = 0.0
    context: float = 0.0
    expert: float = 0.0
    offload: float = 0.0
    """The device waits for activations on their way to its host or back."""

    @property
    def total(self) -> float:
        """Seconds of everything."""
        return sum(self)

    def plus(self, other: Seconds, times: float = 1.0) -> Seconds:
        """The sum with `times` x `other`."""
        return Seconds(*(a + times * b for a, b in zip(self, other, strict=True)))


class PassSeconds(NamedTuple):
    """Seconds by pass: forward, backward for the input, backward for the weights, and recomputation."""

    forward: Seconds = Seconds()
    input: Seconds = Seconds()
    weight: Seconds = Seconds()
    again: Seconds = Seconds()

    @property
    def total(self) -> float:
        """Seconds of all passes."""
        return sum(self.forward) + sum(self.input) + sum(self.weight) + sum(self.again)


def weighted_sum(counted: Iterable[tuple[float, PassSeconds]]) -> PassSeconds:
    """The sum of (number, seconds of one)."""
    sums = PassSeconds()
    for count, seconds in counted:
        sums = PassSeconds(*(a.plus(b, count) for a, b in zip(sums, seconds, strict=True)))
    return sums


class Product(NamedTuple):
    """`batch` matrix products of shape (m, k) x (k, n); m counts tokens, or tokens of one expert."""

    m: int
    n: int
    k: int
    batch: int = 1
    experts: bool = False
    """True for products of routed experts."""
