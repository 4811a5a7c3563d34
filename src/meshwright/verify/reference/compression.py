"""Messages of islands in a compressed exchange, written apart from what `meshwright verify` checks.

Numbers are chosen and rounded one idea at a time, in float64 of operands that are rounded to fp32 once: the
largest of a block (Sarfi et al. 2025), the nearest integer, the nearest of E3M0 (Douillard et al. 2025), or
8 significant bits.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from meshwright.spec import RunSpec
from meshwright.spec.eight_bit import blocks_of
from meshwright.verify.reference.groups import multiplies

Numbers = NDArray[np.float64]


class Messages:
    """The messages of the islands of a run, and what each island has not sent yet."""

    def __init__(self, spec: RunSpec) -> None:
        outer = spec.outer
        self.form, self.density = outer.format, outer.top_k
        decay = outer.error_decay
        self.decay = decay if decay is not None else (0.95 if outer.top_k else 0.0)
        self._blocks = blocks_of(spec)
        self.errors: dict[str, Tensor] = {}
        """The movement that `island.<number>/<name>` has not sent, where it is kept."""
        self.last: dict[str, Tensor] = {}
        """The last messages in exact numbers, errors included."""

    def sent(self, island: int, name: str, moved: Tensor) -> Tensor:
        """The approximation that all islands get of how far a parameter `moved` since the last exchange."""
        if name.endswith(".router.bias"):
            return moved
        key = f"island.{island}/{name}"
        if self.decay:
            moved = self.decay * self.errors.get(key, torch.zeros_like(moved)) + moved
        told = moved if not multiplies(name, moved.ndim) else self._approximation(name, moved)
        if self.decay:
            self.last[key], self.errors[key] = moved, moved - told
        return told

    def _approximation(self, name: str, moved: Tensor) -> Tensor:
        blocks: Numbers = moved.detach().cpu().numpy().reshape(-1, self._blocks[name])
        kept = np.ones_like(blocks, dtype=bool)
        if self.density is not None:
            kept = largest(blocks, max(1, round(self.density * blocks.shape[1])))
        found = np.where(kept, rounded(np.where(kept, blocks, 0.0), self.form), 0.0)
        return torch.from_numpy(found).reshape(moved.shape).to(moved)


def largest(blocks: Numbers, count: int) -> NDArray[np.bool_]:
    """Where the `count` largest magnitudes of each block (n, block) are; of equal ones in fp32 the first."""
    kept = np.zeros_like(blocks, dtype=bool)
    left = np.abs(blocks.astype(np.float32))
    rows = np.arange(len(blocks))
    for _ in range(count):
        places = left.argmax(1)  # the first of the largest
        kept[rows, places] = True
        left[rows, places] = -1.0
    return kept


def rounded(blocks: Numbers, form: str) -> Numbers:
    """The nearest numbers to those of blocks (n, block) that a format has."""
    if form == "fp32":
        return blocks
    if form == "bf16":
        mantissas, exponents = np.frexp(blocks.astype(np.float32).astype(np.float64))
        return np.ldexp(np.rint(mantissas * 2**8), exponents - 8)
    scales = np.abs(blocks).max(1, keepdims=True)
    shares = np.divide(blocks, scales, out=np.zeros_like(blocks), where=scales > 0)
    shares = shares.astype(np.float32).astype(np.float64)
    if form == "fp4":
        return scales * np.sign(shares) * _nearest_power(np.abs(shares))
    most = {"int8": 127, "int4": 7}[form]
    return scales * _nearest_even(shares * most) / most


def _nearest_even(numbers: Numbers) -> Numbers:
    """The nearest integers; of two equally near ones the even one."""
    below = np.floor(numbers)
    beyond = numbers - below
    up = (beyond > 0.5) | ((beyond == 0.5) & (below % 2 == 1))
    return below + up


def _nearest_power(numbers: Numbers) -> Numbers:
    """The nearest of 0, 1/64, 1/32, ..., 1 to numbers from 0 to 1; of two equally near ones the larger."""
    found = np.ones_like(numbers)
    for level in (*(2.0**-power for power in range(1, 7)), 0.0):
        found = np.where(np.abs(numbers - level) < np.abs(numbers - found), level, found)
    return found
