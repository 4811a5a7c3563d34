"""Memory that holds the snapshot of one rank, and that outlives it.

slot   [step + 1, or 0 while it is written; bytes of image and text; run, part, parts; the text's sum]
       [image] [text]
image  pieces one after another, as in a checkpoint's piece file
text   {"state", "forms", "rows"}: what the root and a part of a manifest say, with sums for SHA-256
"""

from __future__ import annotations

import json
import mmap
import os
import struct
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from meshwright.checkpoint.digests import sum64
from meshwright.checkpoint.disk import Disk
from meshwright.checkpoint.errors import BadCheckpointError
from meshwright.checkpoint.staging import HostImage

HEAD_BYTES = 4096
_HEAD = struct.Struct("<6q16s")


class Head(NamedTuple):
    """The head of a slot: what it holds, and bytes and sums of what follows."""

    step: int
    """Its step; -1 if it holds no snapshot."""
    image: int
    text: int
    run: int
    """Number of the start of the ranks that kept it: snapshots of one step and run belong together."""
    part: int
    """The share of the state that it holds: equal for ranks that hold the same pieces, 0 for none."""
    parts: int
    """How many parts there are."""
    digest: str

    @property
    def key(self) -> tuple[int, int]:
        """(step, run)."""
        return self.step, self.run

    def pack(self) -> bytes:
        """Return its bytes in the slot."""
        return _HEAD.pack(self.step + 1, *self[1:-1], self.digest.encode())

    @classmethod
    def unpack(cls, content: bytes) -> Head:
        """Return the head with these bytes."""
        mark, image, text, run, part, parts, digest = _HEAD.unpack(content)
        return cls(mark - 1, image, text, run, part, parts, digest.decode("ascii", "replace"))


EMPTY = Head(-1, 0, 0, 0, 0, 0, "")
PACKED_BYTES = _HEAD.size
"""Bytes of `Head.pack`."""


class Slot:
    """A slot in the memory behind `descriptor`."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._mapped: mmap.mmap | None = None

    def head(self) -> Head:
        """Return what it holds."""
        content = os.pread(self._descriptor, PACKED_BYTES, 0)
        return Head.unpack(content) if len(content) == PACKED_BYTES else EMPTY

    def open(self) -> None:
        """Begin to write: what the slot held is no snapshot from here on."""
        os.pwrite(self._descriptor, EMPTY.pack(), 0)

    def close(self, head: Head, text: bytes) -> None:
        """End with the text, after the image: the slot now holds what `head` says."""
        os.pwrite(self._descriptor, text, HEAD_BYTES + head.image)
        os.pwrite(self._descriptor, head.pack(), 0)

    def image(self, size: int, pinned: bool = False) -> Tensor:
        """Return the memory of an image of so many bytes, `pinned` for copies from and to a device."""
        end = HEAD_BYTES + size
        if self._mapped is None or len(self._mapped) < end:
            os.ftruncate(self._descriptor, max(end, os.fstat(self._descriptor).st_size))
            self._mapped = mmap.mmap(self._descriptor, end)
            if pinned:  # else a copy from a device passes through a buffer of the driver's
                whole = torch.frombuffer(self._mapped, dtype=torch.uint8)
                torch.cuda.cudart().cudaHostRegister(whole.data_ptr(), whole.numel(), 0)
        return torch.frombuffer(self._mapped, dtype=torch.uint8)[HEAD_BYTES:end]

    def text(self) -> dict[str, Any]:
        """Return what the slot's text says. Raises BadCheckpointError."""
        head = self.head()
        content = os.pread(self._descriptor, head.text, HEAD_BYTES + head.image)
        if sum64(content) != head.digest:
            raise BadCheckpointError(
                f"the snapshot of step {head.step} in memory is damaged: its description is not what was "
                f"written"
            )
        return dict(json.loads(content))

    @property
    def size(self) -> int:
        """Bytes of the image."""
        return self.head().image

    def read(self, target: memoryview, start: int) -> int:
        """Fill `target` from byte `start` of the image on as far as one call does; return the number."""
        return os.preadv(self._descriptor, [target], HEAD_BYTES + start)


class SlotImage(HostImage):
    """An image that lies in a slot: a block each GiB, one after another."""

    def __init__(self, slot: Slot) -> None:
        super().__init__()
        self._slot = slot

    def _make_room(self, pinned: bool) -> None:
        self._blocks = list(self._slot.image(self.bytes, pinned).split(self._lengths))


class Image(Protocol):
    """The bytes of a piece file in memory."""

    @property
    def size(self) -> int:
        """Number of the bytes."""
        ...

    def read(self, target: memoryview, start: int) -> int:
        """Fill `target` from byte `start` on as far as one call does; return the number of bytes."""
        ...


class Images(Disk):
    """Reads piece files out of memory, by name."""

    def __init__(self, images: Mapping[str, Image]) -> None:
        self._images = dict(images)
        self._names = list(images)

    @contextmanager
    def opened(self, path: Path) -> Iterator[tuple[int, int]]:
        yield self._names.index(path.name), self._images[path.name].size

    def read(self, descriptor: int, target: memoryview, start: int) -> int:
        return self._images[self._names[descriptor]].read(target, start)
