"""A rank's piece file as an image: the tensors themselves while training waits for the writer, or else a
copy in host memory. Training waits for that copy alone, and on a GPU for none (`side_copies.py`).

Pieces lie one after another, widest dtype first, so that each is aligned to its elements without padding:
every byte of a piece file belongs to a piece and is covered by its hash. A copy consists of blocks of at
most `image_bytes` (`spec/tiling.py`), since torch rounds what it pins up to a power of two, which would be up
to twice a rank's state. The blocks are kept from save to save.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from meshwright.checkpoint.digests import Digest, sha256
from meshwright.checkpoint.save_plan import LocalShard, cut_rows, narrow
from meshwright.checkpoint.side_copies import IssuedCopies, SideCopies, copy_all
from meshwright.checkpoint.weights import WeightPart
from meshwright.spec.sharded_tensor import Rectangle
from meshwright.spec.tiling import tiling

Forms = Mapping[str, tuple[torch.dtype, tuple[int, ...]]]
"""Dtype and shape of tensors by name."""
_CONVERTED = 4 * 2**20
"""Bytes that are converted at a time, as tensors are written that come part by part."""


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

    def data(self) -> Iterable[memoryview]:
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
        self._side: SideCopies | None = None
        self._issued: IssuedCopies | None = None
        """The copies of the last `stage`, until they have been waited for."""

    @property
    def bytes(self) -> int:
        """Size of the file."""
        return sum(self._lengths)

    def stage(self, chunks: Iterable[LocalShard]) -> None:
        """Copy the chunks to the host.

        When this returns, training may change tensors in host memory. The copies from a GPU are only issued:
        what changes its tensors is issued after `fence`, and `data` and `rows` wait for the bytes.
        """
        chunks = list(chunks)
        self._wait()
        copies, devices = self._copies(chunks), devices_of(chunks)
        if devices:
            self._side = self._side or SideCopies(*devices)
            self._issued = self._side.issue(copies)
        else:
            copy_all(copies)

    def fence(self) -> None:
        """Let what training issues from now on, which may change the chunks, wait for their copies."""
        if self._side is not None:
            self._side.fence()

    def _wait(self) -> None:
        if self._issued is not None:
            self._issued.wait()
            self._issued = None

    def _copies(self, chunks: Iterable[LocalShard]) -> list[tuple[str, Tensor, Tensor]]:
        """Make room for the chunks, and return name, place and tensor of each copy that is to be made."""
        chunks = widest_first(chunks)
        self._pieces, self._lengths = [], []
        places: list[tuple[int, int]] = []
        for chunk in chunks:
            if not self._lengths or self._lengths[-1] + chunk.local.nbytes > tiling().image_bytes:
                self._lengths.append(0)
            places.append((len(self._lengths) - 1, self._lengths[-1]))
            self._lengths[-1] += chunk.local.nbytes
        self._make_room(pinned=bool(devices_of(chunks)))
        found = []
        for chunk, (block, start) in zip(chunks, places, strict=True):
            copy = self._blocks[block][start : start + chunk.local.nbytes]
            self._pieces.append((chunk.key, chunk.rectangle, copy))
            found.append((chunk.key, copy.view(chunk.local.dtype).view(chunk.local_shape), chunk.local))
        return found

    def _make_room(self, pinned: bool) -> None:
        """See that there is a block of at least its length for each of `_lengths`."""
        for number, length in enumerate(self._lengths):
            if number == len(self._blocks):
                self._blocks.append(torch.empty(0, dtype=torch.uint8))
            if self._blocks[number].numel() < length:
                self._blocks[number] = torch.empty(0, dtype=torch.uint8)  # free the old one first
                self._blocks[number] = torch.empty(length, dtype=torch.uint8, pin_memory=pinned)

    def data(self) -> list[memoryview]:
        self._wait()
        blocks = zip(self._blocks, self._lengths, strict=False)
        return [block.numpy().data[:length] for block, length in blocks]

    def rows(self, digest: Digest = sha256) -> list[list[Any]]:
        self._wait()
        return super().rows(digest)


class StreamedImage(LiveImage):
    """A piece file of tensors that come part by part, and are converted and hashed as they are written.

    `forms` has the dtype and the shape of each tensor by name, all of which the parts fill.
    """

    def __init__(self, forms: Forms, parts: Iterable[WeightPart]) -> None:
        super().__init__()
        self._forms, self._parts = forms, parts
        self._rows: list[list[Any]] = []

    @property
    def bytes(self) -> int:
        """Size of the file."""
        return sum(math.prod(shape) * dtype.itemsize for dtype, shape in self._forms.values())

    def data(self) -> Iterator[memoryview]:
        """Yield the file's bytes, block by block, once."""
        start = 0
        for name, rectangle, value in self._parts:
            dtype = self._forms[name][0]
            for piece in _cut_first(rectangle, dtype.itemsize, tiling().piece_bytes):
                length, digest = math.prod(piece[1]) * dtype.itemsize, hashlib.sha256()
                for block in _cut_first(piece, dtype.itemsize, _CONVERTED):
                    converted = narrow(value, block, rectangle[0]).to(dtype).contiguous()
                    content = converted.view(-1).view(torch.uint8).numpy().data
                    digest.update(content)
                    yield content
                    del converted, content
                self._rows.append([name, *piece, start, length, digest.hexdigest()])
                start += length
            del value  # before the next one is read

    def rows(self, digest: Digest = sha256) -> list[list[Any]]:
        """Return [tensor, offsets, sizes, start, bytes, SHA-256] of each piece that was written."""
        return self._rows


def _cut_first(rectangle: Rectangle, item_bytes: int, most: int) -> Iterator[Rectangle]:
    """Cut a rectangle along its first dim of more than one index into pieces of at most `most` bytes."""
    offsets, sizes = rectangle
    dim = next((dim for dim, size in enumerate(sizes) if size > 1), None)
    if dim is None:
        yield rectangle
        return
    for first, count in cut_rows(sizes[dim:], item_bytes, most):
        yield (
            (*offsets[:dim], offsets[dim] + first, *offsets[dim + 1 :]),
            (*sizes[:dim], count, *sizes[dim + 1 :]),
        )


def widest_first(chunks: Iterable[LocalShard]) -> list[LocalShard]:
    """Return the chunks in the order of the file."""
    return sorted(chunks, key=lambda chunk: -chunk.local.element_size())


def devices_of(chunks: Iterable[LocalShard]) -> set[torch.device]:
    """Return the devices, other than the host, that hold any of the chunks."""
    return {chunk.local.device for chunk in chunks if chunk.local.is_cuda}
