"""Seconds of one microbatch on one device, by pass and by what they go to; and the shape of a product."""

from __future__ import annotations

from typing import NamedTuple


class Seconds(NamedTuple):
    """Where time goes."""

    matmul: float = 0.0
    attention: float = 0.0
    moved: float = 0.0
    """Operators that move bytes and compute little."""
    host: float = 0.0
    """Waiting for the host to launch operators."""
    tensor: float = 0.0
    context: float = 0.0
    expert: float = 0.0

    @property
    def total(self) -> float:
        return sum(self)

    @property
    def compute(self) -> float:
        """Without messages."""
        return self.matmul + self.attention + self.moved + self.host

    def plus(self, other: Seconds, times: float = 1.0) -> Seconds:
        """The sum with `times` x `other`."""
        return Seconds(*(a + times * b for a, b in zip(self, other, strict=True)))


class PassSeconds(NamedTuple):
    """A microbatch's seconds: forward, backward for the input and for weights, and what is done again."""

    forward: Seconds = Seconds()
    input: Seconds = Seconds()
    weight: Seconds = Seconds()
    again: Seconds = Seconds()

    @property
    def total(self) -> float:
        return sum(self.forward) + sum(self.input) + sum(self.weight) + sum(self.again)


class Product(NamedTuple):
    """(m, k) x (k, n), `batch` of them: of tokens, or of tokens of one expert."""

    m: int
    n: int
    k: int
    batch: int = 1
