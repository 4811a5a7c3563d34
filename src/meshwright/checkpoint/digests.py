"""Digests of pieces of a checkpoint: SHA-256 for files, a sum at memory speed for snapshots in memory."""

from __future__ import annotations

import hashlib
from collections.abc import Callable

import numpy as np

Digest = Callable[[bytes | bytearray | memoryview], str]


def sha256(data: bytes | bytearray | memoryview) -> str:
    """Return the SHA-256 of the data, in hexadecimal digits."""
    return hashlib.sha256(data).hexdigest()


def sum64(data: bytes | bytearray | memoryview) -> str:
    """Return the sum of the data's 64-bit words modulo 2^64: it finds any one word that changed."""
    whole = len(data) // 8 * 8
    total = np.frombuffer(data, np.uint64, whole // 8).sum(dtype=np.uint64)
    rest = int.from_bytes(bytes(data[whole:]), "little")
    return f"{(int(total) + rest) % (1 << 64):016x}"
