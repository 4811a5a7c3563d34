"""A rank's piece file as an image in host memory: training waits for the copy, the writer works from it.

Pieces lie one after another, widest dtype first, so that each is aligned to its elements without padding:
every byte of a piece file belongs to a piece and is covered by its hash. The image is a row of blocks of at
most BLOCK_BYTES, since torch rounds what it pins up to a power of two, which would be up to twice a rank's
state. They are kept from save to save.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from meshwright.checkpoint.pieces import ITEM_BYTES
from meshwright.checkpoint.save_plan import DTYPE_NAMES, DTYPES, LocalShard
from meshwright.spec.sharded_tensor import ShardedTensor

BLOCK_BYTES = 1 << 30


@dataclass(frozen=True)
class ImageSlot(ShardedTensor):
    """A rectangle of a tensor in the image: from byte `start` of block `block` on."""

    dtype: str
    block: int
    start: int

    @property
    def bytes(self) -> int:
        """Bytes of its elements."""
        return math.prod(self.local_shape) * ITEM_BYTES[self.dtype]


class HostImage:
    """Reusable host memory that holds the bytes of one piece file."""

    def __init__(self) -> None:
        self._blocks: list[Tensor] = []
        self._lengths: list[int] = []
        self._slots: list[ImageSlot] = []

    @property
    def bytes(self) -> int:
        """Size of the file."""
        return sum(self._lengths)

    def stage(self, chunks: Iterable[LocalShard]) -> None:
        """Copy the chunks to the host; when this returns, training may change the tensors."""
        chunks = sorted(chunks, key=lambda chunk: -chunk.local.element_size())
        self._place(chunks)
        devices = {chunk.local.device for chunk in chunks if chunk.local.is_cuda}
        for number, length in enumerate(self._lengths):
            if number == len(self._blocks):
                self._blocks.append(torch.empty(0, dtype=torch.uint8))
            if self._blocks[number].numel() < length:
                self._blocks[number] = torch.empty(0, dtype=torch.uint8)  # free the old one first
                self._blocks[number] = torch.empty(length, dtype=torch.uint8, pin_memory=bool(devices))
        with torch.no_grad():
            for slot, chunk in zip(self._slots, chunks, strict=True):
                place = self._blocks[slot.block][slot.start : slot.start + slot.bytes]
                place.view(DTYPES[slot.dtype]).view(slot.local_shape).copy_(chunk.local, non_blocking=True)
        for device in devices:
            torch.cuda.synchronize(device)

    def _place(self, chunks: Iterable[LocalShard]) -> None:
        """Find a slot for each chunk: a block ends where the next chunk would exceed BLOCK_BYTES."""
        self._slots, self._lengths = [], []
        for chunk in chunks:
            size = chunk.local.nbytes
            if not self._lengths or self._lengths[-1] + size > BLOCK_BYTES:
                self._lengths.append(0)
            dtype, block = DTYPE_NAMES[chunk.local.dtype], len(self._lengths) - 1
            self._slots.append(
                ImageSlot(chunk.key, chunk.global_shape, *chunk.rectangle, dtype, block, self._lengths[-1])
            )
            self._lengths[-1] += size

    def data(self) -> list[memoryview]:
        """The file's bytes, block by block."""
        blocks = zip(self._blocks, self._lengths, strict=False)
        return [block.numpy().data[:length] for block, length in blocks]

    def rows(self) -> list[list[Any]]:
        """[tensor, offsets, sizes, start, bytes, sha256] of each piece, in the order of the file."""
        data, found, start = self.data(), [], 0
        for slot in self._slots:
            content = data[slot.block][slot.start : slot.start + slot.bytes]
            digest = hashlib.sha256(content).hexdigest()
            found.append([slot.key, list(slot.offset), list(slot.local_shape), start, slot.bytes, digest])
            start += slot.bytes
        return found
