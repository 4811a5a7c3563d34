"""Checksums of tensors that several ranks must hold alike to the bit."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

_CHUNK_WORDS = {"cpu": 1 << 16, "cuda": 1 << 22}
"""Words of one part of a checksum: on a CPU those whose products fit into the cache."""


@torch.no_grad()
def checksum(flat: Tensor) -> Tensor:
    """A sum of the bits of 8 bytes at a time, each times an odd number of its place, modulo 2^64: int64, ().

    A change within 8 bytes always changes it, as an odd factor loses no bit; several changes cancel out by
    accident once in some 2^63. It depends on the order of elements, unlike the sums of `train/digest.py`, and
    takes a fifth of their time.
    """
    if flat.nbytes % 8 or flat.data_ptr() % 8:
        flat = torch.cat([flat, flat.new_zeros(-flat.nbytes % 8 // flat.element_size())])
    words = flat.view(torch.int64)
    size = max(1, min(len(words), _CHUNK_WORDS[flat.device.type]))
    odd = torch.arange(1, 2 * size, 2, device=flat.device)
    total = torch.zeros((), dtype=torch.int64, device=flat.device)
    for number, chunk in enumerate(words.split(size)):
        total += (chunk * odd[: len(chunk)]).sum() * (2 * number + 1)
    return total


def checksum_of(tensors: Iterable[Tensor]) -> int:
    """One number of 64 bits for several tensors in their order, each weighed by an odd number."""
    total = 0
    for place, tensor in enumerate(tensors):
        total += int(checksum(tensor.detach().contiguous().view(-1))) * (2 * place + 1)
    return total % (1 << 64)
