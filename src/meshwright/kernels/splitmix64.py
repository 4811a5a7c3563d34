"""splitmix64's finaliser (Steele et al. 2014) on int64 tensors, whose arithmetic wraps modulo 2^64."""

from __future__ import annotations

from torch import Tensor

GOLDEN = 0x9E3779B97F4A7C15
_MIX_1 = 0xBF58476D1CE4E5B9
_MIX_2 = 0x94D049BB133111EB


def signed(value: int) -> int:
    """The int64 with the same 64 bits."""
    value &= 2**64 - 1
    return value - 2**64 if value >= 2**63 else value


def shift(bits: Tensor, by: int) -> Tensor:
    """Logical right shift of int64 (torch's is arithmetic)."""
    return (bits >> by).bitwise_and_((1 << (64 - by)) - 1)


def stream(index: Tensor, key: int) -> Tensor:
    """The state of the stream `key` at each index, before it is mixed; a new tensor."""
    return (index * signed(GOLDEN)).add_(signed(key))


def mix64_(bits: Tensor) -> Tensor:
    """Mix each int64 in place, one to one, so that every bit depends on all; returns it."""
    bits.bitwise_xor_(shift(bits, 30)).mul_(signed(_MIX_1))
    bits.bitwise_xor_(shift(bits, 27)).mul_(signed(_MIX_2))
    return bits.bitwise_xor_(shift(bits, 31))
