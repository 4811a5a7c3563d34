"""A rank's piece file as an image in host memory: training waits for the copy, the writer works from it.

Pieces lie one after another, widest dtype first, so that each is aligned to its elements without padding:
every byte of a piece file belongs to a piece and is covered by its hash. The buffer is kept from save to
save.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from meshwright.checkpoint.chunks import DTYPE_NAMES, DTYPES, Chunk
from meshwright.checkpoint.manifest import ITEM_BYTES, Piece


@dataclass(frozen=True)
class Slot:
    """Where a chunk lies in the image."""

    name: str
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    dtype: str
    start: int

    @property
    def bytes(self) -> int:
        return math.prod(self.sizes) * ITEM_BYTES[self.dtype]


class Image:
    """A reusable host buffer that holds the bytes of one piece file."""

    def __init__(self) -> None:
        self._buffer = torch.empty(0, dtype=torch.uint8)
        self.slots: list[Slot] = []
        self.bytes = 0

    def stage(self, chunks: Iterable[Chunk]) -> None:
        """Copy the chunks to the host; when this returns, training may change the tensors."""
        chunks = sorted(chunks, key=lambda chunk: -chunk.local.element_size())
        self.slots, self.bytes = [], 0
        for chunk in chunks:
            dtype = DTYPE_NAMES[chunk.local.dtype]
            slot = Slot(chunk.name, chunk.offsets, chunk.sizes, dtype, self.bytes)
            self.slots.append(slot)
            self.bytes += slot.bytes
        devices = {chunk.local.device for chunk in chunks if chunk.local.is_cuda}
        if self._buffer.numel() < self.bytes:
            self._buffer = torch.empty(0, dtype=torch.uint8)  # free the old one first
            self._buffer = torch.empty(self.bytes, dtype=torch.uint8, pin_memory=bool(devices))
        with torch.no_grad():
            for slot, chunk in zip(self.slots, chunks, strict=True):
                place = self._buffer[slot.start : slot.start + slot.bytes]
                place.view(DTYPES[slot.dtype]).view(slot.sizes).copy_(chunk.local, non_blocking=True)
        for device in devices:
            torch.cuda.synchronize(device)

    def data(self) -> memoryview:
        """The file's bytes."""
        return self._buffer.numpy().data[: self.bytes]

    def pieces(self, file: str) -> list[tuple[str, Piece]]:
        """Hash each slot: (tensor name, piece) in the order of the file."""
        data = self.data()
        return [
            (
                slot.name,
                Piece(
                    offsets=slot.offsets,
                    sizes=slot.sizes,
                    file=file,
                    start=slot.start,
                    bytes=slot.bytes,
                    sha256=hashlib.sha256(data[slot.start : slot.start + slot.bytes]).hexdigest(),
                ),
            )
            for slot in self.slots
        ]
