"""Hashes of integers to 64 bits, written apart from `meshwright.data`."""

from __future__ import annotations

WORD = 2**64 - 1


def hash64(*parts: int) -> int:
    """Hash integers to 64 bits."""
    state = 0
    for part in parts:
        state = mix64(state ^ (part & WORD))
    return state


def mix64(word: int) -> int:
    """Return the output of splitmix64 (Steele et al. 2014) that follows the state `word`."""
    word = (word + 0x9E3779B97F4A7C15) & WORD
    word = ((word ^ (word >> 30)) * 0xBF58476D1CE4E5B9) & WORD
    word = ((word ^ (word >> 27)) * 0x94D049BB133111EB) & WORD
    return word ^ (word >> 31)


def uniform(word: int) -> float:
    """Return a number in [0, 1) from the top 53 bits of a hash."""
    return (word >> 11) / 2**53
