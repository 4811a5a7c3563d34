"""Types and constants for which a Triton kernel is compiled."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Specialisation:
    """A kernel with the types of its arguments and the values of its constants."""

    kernel: Any
    """The function that `triton.jit` returned."""
    types: Mapping[str, str]
    """Name of an argument -> its type as Triton writes it: `*bf16`, `i32`, `fp32`."""
    constants: Mapping[str, Any]
    """Name of a `tl.constexpr` -> its value."""
    num_warps: int = 4
    num_stages: int = 3
    aligned: tuple[str, ...] = ()
    """Arguments that are multiples of 16: pointers of tensors, and sizes that launches have so."""
