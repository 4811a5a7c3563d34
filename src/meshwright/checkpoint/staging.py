"""A rank's piece file as an image: the tensors themselves while training waits for the writer, or else a
copy in host memory, for which alone training waits.

Pieces lie one after another, widest dtype first, so that each is aligned to its elements without padding:
every byte of a piece file belongs to a piece and is covered by its hash. A copy consists of blocks of at
most `image_bytes` (`spec/tiling.py`), since torch rounds what it pins up to a power of two, which would be up
to twice a rank's state. The blocks are kept from save to save.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from meshwright.checkpoint.digests import Digest, sha256
from meshwright.checkpoint.save_plan import LocalShard
from meshwright.spec.tiling import tiling


class LiveImage:
    """A piece file in the memory of its chunks: a view of each, or a copy of one that is not contiguous."""

    def __init__(self, chunks: Iterable[LocalShard] = ()) -> None:
        self._pieces = [
            (chunk.key, chunk.rectangle, chunk.local.detach().contiguous().flatten().view(torch.uint8))
            for chunk in widest_first(chunks)
        ]
        """Tensor, rectangle and bytes of each piece, in the order of the file."""

    @property
    def bytes(self) -> int:
        """Size of the file."""
        return sum(content.numel() for _, _, content in self._pieces)

    def data(self) -> list[memoryview]:
        """Return the file's bytes, block by block."""
        return [content.numpy().data for _, _, content in self._pieces]

    def rows(self, digest: Digest = sha256) -> list[list[Any]]:
        """Return [tensor, offsets, sizes, start, bytes, digest] of each piece, in the order of the file."""
        rows: list[list[Any]] = []
        start = 0
        for name, rectangle, content in self._pieces:
            rows.append([name, *rectangle, start, content.numel(), digest(content.numpy().data)])
            start += content.numel()
        return rows


class HostImage(LiveImage):
    """Reusable host memory that holds the bytes of one piece file."""

    def __init__(self) -> None:
        super().__init__()
        self._blocks: list[Tensor] = []
        self._lengths: list[int] = []
        """Bytes of the file in each block."""

    @property
    def bytes(self) -> int:
        """Size of the file."""
        return sum(self._lengths)

    def stage(self, chunks: Iterable[LocalShard]) -> None:
        """Copy the chunks to the host; when this returns, training may change the tensors."""
        chunks = widest_first(chunks)
        devices = devices_of(chunks)
        self._pieces, self._lengths = [], []
        places: list[tuple[int, int]] = []
        for chunk in chunks:
            if not self._lengths or self._lengths[-1] + chunk.local.nbytes > tiling().image_bytes:
                self._lengths.append(0)
            places.append((len(self._lengths) - 1, self._lengths[-1]))
            self._lengths[-1] += chunk.local.nbytes
        self._make_room(pinned=bool(devices))
        with torch.no_grad():
            for chunk, (block, start) in zip(chunks, places, strict=True):
                copy = self._blocks[block][start : start + chunk.local.nbytes]
                copy.view(chunk.local.dtype).view(chunk.local_shape).copy_(chunk.local, non_blocking=True)
                self._pieces.append((chunk.key, chunk.rectangle, copy))
        for device in devices:
            torch.cuda.synchronize(device)

    def _make_room(self, pinned: bool) -> None:
        """See that there is a block of at least its length for each of `_lengths`."""
        for number, length in enumerate(self._lengths):
            if number == len(self._blocks):
                self._blocks.append(torch.empty(0, dtype=torch.uint8))
            if self._blocks[number].numel() < length:
                self._blocks[number] = torch.empty(0, dtype=torch.uint8)  # free the old one first
                self._blocks[number] = torch.empty(length, dtype=torch.uint8, pin_memory=pinned)

    def data(self) -> list[memoryview]:
        blocks = zip(self._blocks, self._lengths, strict=False)
        return [block.numpy().data[:length] for block, length in blocks]


def widest_first(chunks: Iterable[LocalShard]) -> list[LocalShard]:
    """Return the chunks in the order of the file."""
    return sorted(chunks, key=lambda chunk: -chunk.local.element_size())


def devices_of(chunks: Iterable[LocalShard]) -> set[torch.device]:
    """Return the devices, other than the host, that hold any of the chunks."""
    return {chunk.local.device for chunk in chunks if chunk.local.is_cuda}
