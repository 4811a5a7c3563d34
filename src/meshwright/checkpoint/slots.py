"""Slots that hold the snapshot of one rank and outlive it: memory, or a file that no folder names any more.

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
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from meshwright.checkpoint.digests import Digest, sum64
from meshwright.checkpoint.disk import Disk
from meshwright.checkpoint.errors import BadCheckpointError
from meshwright.checkpoint.manifest import Hull, Manifest, ManifestPart, TensorEntry
from meshwright.checkpoint.pinned_memory import pin, unpin
from meshwright.checkpoint.save_plan import LocalShard
from meshwright.checkpoint.staging import HostImage, LiveImage

HEAD_BYTES = 4096
_HEAD = struct.Struct("<6q16s")


class SlotHeader(NamedTuple):
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
    def unpack(cls, content: bytes) -> SlotHeader:
        """Return the head with these bytes."""
        mark, image, text, run, part, parts, digest = _HEAD.unpack(content)
        return cls(mark - 1, image, text, run, part, parts, digest.decode("ascii", "replace"))


EMPTY = SlotHeader(-1, 0, 0, 0, 0, 0, "")
PACKED_BYTES = _HEAD.size
"""Bytes of `SlotHeader.pack`."""


class Slot:
    """A slot in the memory or the file behind `descriptor`."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._mapped: mmap.mmap | None = None
        self._pinned: Tensor | None = None
        self.unpinned = ""
        """Why its memory could not be pinned, if it could not."""

    @property
    def free_on_disk(self) -> int | None:
        """Bytes that are free where the file lies; None for memory."""
        room = os.fstatvfs(self._descriptor)
        return room.f_bavail * room.f_frsize if room.f_blocks else None  # the kernel's own memory has none

    def head(self) -> SlotHeader:
        """Return what it holds."""
        content = os.pread(self._descriptor, PACKED_BYTES, 0)
        return SlotHeader.unpack(content) if len(content) == PACKED_BYTES else EMPTY

    def open(self) -> None:
        """Begin to write: what the slot held is no snapshot from here on."""
        os.pwrite(self._descriptor, EMPTY.pack(), 0)

    def close(self, head: SlotHeader, text: bytes) -> None:
        """End with the text, after the image: the slot now holds what `head` says."""
        self.write(memoryview(text), head.image)
        os.pwrite(self._descriptor, head.pack(), 0)

    def write(self, content: memoryview, start: int) -> None:
        """Write bytes to byte `start` of the image on."""
        done = 0
        while done < len(content):
            done += os.pwrite(self._descriptor, content[done:], HEAD_BYTES + start + done)

    def image(self, size: int) -> Tensor:
        """Return the memory of an image of so many bytes, pinned for copies from and to a device."""
        end = HEAD_BYTES + size
        if self._mapped is None or len(self._mapped) < end:
            os.ftruncate(self._descriptor, max(end, os.fstat(self._descriptor).st_size))
            if self._pinned is not None:
                unpin(self._pinned)
                self._pinned = None
            self._mapped = mmap.mmap(self._descriptor, end)
            if torch.cuda.is_available():
                whole = torch.frombuffer(self._mapped, dtype=torch.uint8)
                self.unpinned = pin(whole)
                self._pinned = None if self.unpinned else whole
        return torch.frombuffer(self._mapped, dtype=torch.uint8)[HEAD_BYTES:end]

    def block(self, start: int, size: int) -> Tensor:
        """Return `size` bytes of the image from `start` on, or as many as there are: a view where the slot is
        mapped, else a copy."""
        size = max(0, min(size, self.size - start))
        if self._mapped is not None:
            return self.image(self.size)[start : start + size]
        content, done = torch.empty(size, dtype=torch.uint8), 0
        while done < size and (read := self.read(content.numpy().data[done:], start + done)):
            done += read
        return content

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
    """The image of a slot. A device's tensors are copied to its memory (`stage`), a block each GiB, one
    after another; from host memory they are written without a copy of it, and the slot is not mapped."""

    def __init__(self, slot: Slot) -> None:
        super().__init__()
        self._slot = slot

    def keep(self, chunks: Iterable[LocalShard], digest: Digest) -> list[list[Any]]:
        """Write the chunks, in host memory, into the slot, and return their rows (`LiveImage.rows`)."""
        live, start = LiveImage(chunks), 0
        for content in live.data():
            self._slot.write(content, start)
            start += len(content)
        return live.rows(digest)

    def _make_room(self, pinned: bool) -> None:
        self._blocks = list(self._slot.image(sum(self._lengths)).split(self._lengths))


def manifest_of(step: int, texts: Sequence[Mapping[str, Any]]) -> Manifest:
    """Return a manifest of these parts of the state, with one part inside, each piece once."""
    forms: dict[str, Any] = {}
    for text in texts:
        forms |= text["forms"]
    tensors = {
        name: TensorEntry(dtype, tuple(shape), number)
        for number, (name, (dtype, shape, _)) in enumerate(forms.items())
    }
    spreads = [[Hull(0, (0,) * len(entry.shape), entry.shape)] for entry in tensors.values()]
    inside = ManifestPart.of([text["rows"] for text in texts], 0)
    for pieces in inside.tensors.values():
        pieces[:] = {piece.rectangle: piece for piece in reversed(pieces)}.values()
    return Manifest(step, "", len(texts), 0, dict(texts[0]["state"]), tensors, spreads, [], inside)


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
