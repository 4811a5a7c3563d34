"""The order of samples as a function: no list is shuffled, and the whole state is one integer.

Global sample g is number g % n of epoch g // n, and a keyed bijection over [0, n) says which sample that is.
The bijection is a Feistel network (Luby and Rackoff 1988) over the next power of two, walked along its cycle
until it lands inside [0, n) (Black and Rogaway 2002, "Ciphers with arbitrary finite domains").
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

I64 = NDArray[np.int64]
U64 = NDArray[np.uint64]

_WORD = 2**64 - 1
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_ROUNDS = 8  # four make a strong pseudo-random permutation of large halves; small halves need more


def mix64(x: U64) -> U64:
    """Apply the output function of splitmix64 (Steele, Lea and Flood 2014), a bijection of 64-bit words."""
    x = x + _GOLDEN
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def hash64(*parts: int | I64 | U64) -> U64:
    """Hash several integers, or arrays of one shape and at least one dim, to 64 bits."""
    state = np.zeros(1, dtype=np.uint64)
    for part in parts:
        word = np.asarray(part & _WORD, dtype=np.uint64) if isinstance(part, int) else part.astype(np.uint64)
        state = mix64(state ^ word)
    return state


def permute(index: I64, n: int, key: U64) -> I64:
    """Map each index in [0, n) through the bijection that its key (broadcast to `index`) selects."""
    bits = (n - 1).bit_length()
    value = index.astype(np.uint64)
    if bits == 0:
        return np.zeros_like(index)
    keys = np.broadcast_to(key, value.shape)
    value = _feistel(value, keys, bits)
    outside = np.flatnonzero(value >= n)
    while outside.size:
        value[outside] = _feistel(value[outside], keys[outside], bits)
        outside = outside[value[outside] >= n]
    return value.astype(np.int64)


def _feistel(value: U64, keys: U64, bits: int) -> U64:
    low_bits = np.uint64((bits + 1) // 2)
    high_mask = np.uint64((1 << (bits // 2)) - 1)
    low_mask = np.uint64((1 << ((bits + 1) // 2)) - 1)
    high, low = value >> low_bits, value & low_mask
    for number in range(_ROUNDS):
        round_key = mix64(keys + np.full(1, number, dtype=np.uint64))
        if number % 2:
            low = low ^ (mix64(high ^ round_key) & low_mask)
        else:
            high = high ^ (mix64(low ^ round_key) & high_mask)
    return (high << low_bits) | low


@dataclass(frozen=True)
class SampleOrder:
    """The order of `n` samples, a new one in each epoch."""

    n: int
    seed: int

    def at(self, g: I64) -> I64:
        """Return the sample of each global index g >= 0; the indices [k*n, (k+1)*n) cover all n samples."""
        epoch, place = g // self.n, g % self.n
        return permute(place, self.n, hash64(self.seed, epoch))
