"""Pieces of a checkpoint, and the parts of its manifest that list them.

    part-00064.json   {"tensors": {name: [piece]}, "files": {name: bytes}}
    piece             [offsets, sizes, file, start, bytes, sha256]

A part lists the pieces that some consecutive ranks wrote; its hash stands in the root (`manifest.py`). Hashes
find accidents, not forgers: `Part.check` sees that pieces lie within their tensors and tile their files, so a
made-up part cannot make a reader leave the directory, read elsewhere, or allocate more than the files hold.
"""

from __future__ import annotations

import json
import math
from bisect import bisect_right, insort
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any, NamedTuple

import torch
from pydantic import Field
from pydantic.dataclasses import dataclass

from meshwright.checkpoint.disk import rank_file
from meshwright.spec.records import Record, read
from meshwright.spec.sharded_tensor import Rectangle

MAX_BYTES = 1 << 62
_FLOATS = (
    torch.float64,
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
)
_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool)
DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in (*_FLOATS, *_INTEGERS)}
"""The dtypes that can be stored, by name; a reader refuses any other."""
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}

Count = Annotated[int, Field(strict=True, ge=0, le=MAX_BYTES)]
Dims = tuple[Count, ...]
RankFile = Annotated[str, Field(pattern=r"^rank-[0-9]{5,9}\.bin$")]
"""Name of a piece file: without a separator, so that it stays within the directory."""


class Piece(NamedTuple):
    """A rectangle of a tensor, contiguous in row-major order from byte `start` of `file` on."""

    offsets: Dims
    sizes: Dims
    file: RankFile
    start: Count
    bytes: Count
    sha256: str

    @property
    def rectangle(self) -> Rectangle:
        """(offsets, sizes)."""
        return self.offsets, self.sizes


@dataclass(frozen=True)
class TensorEntry(Record):
    """A tensor of the checkpoint: its dtype (a key of `DTYPES`), global shape, and index of its spread."""

    dtype: str
    shape: Dims
    spread: Count

    @property
    def bytes(self) -> int:
        """Bytes of its elements."""
        return math.prod(self.shape) * DTYPES[self.dtype].itemsize


@dataclass(frozen=True)
class Part(Record):
    """The pieces that some ranks wrote, by tensor, and the bytes of their files."""

    tensors: dict[str, list[Piece]]
    files: dict[RankFile, Count]

    @classmethod
    def of(cls, gathered: Iterable[Sequence[Sequence[Any]]], first: int) -> Part:
        """Return the part of the ranks from `first` on, of which `gathered` has the rows of their files:
        (tensor, offsets, sizes, start, bytes, sha256) for each piece."""
        tensors: dict[str, list[list[Any]]] = {}
        files: dict[str, int] = {}
        for rank, rows in enumerate(gathered, start=first):
            file = rank_file(rank)
            for name, offsets, sizes, start, length, digest in rows:
                tensors.setdefault(name, []).append([offsets, sizes, file, start, length, digest])
                files[file] = files.get(file, 0) + length
        return read(cls, {"tensors": tensors, "files": files})

    def render(self) -> str:
        """Return the text of the part's file."""
        return json.dumps({"tensors": self.tensors, "files": self.files}, separators=(",", ":"))

    def check(self, tensors: Mapping[str, TensorEntry]) -> None:
        """Raise ValueError unless all pieces lie within `tensors` and tile their files."""
        by_file: dict[str, list[Piece]] = {name: [] for name in self.files}
        for name, pieces in self.tensors.items():
            if name not in tensors:
                raise ValueError(f"it has pieces of {name}, but the checkpoint has no such tensor")
            entry = tensors[name]
            for piece in pieces:
                check_within(f"a piece of tensor {name}", piece.rectangle, entry.shape)
                if piece.bytes != math.prod(piece.sizes) * DTYPES[entry.dtype].itemsize:
                    raise ValueError(
                        f"a piece of tensor {name} has {piece.bytes} bytes for sizes {piece.sizes}"
                    )
                if piece.file not in by_file:
                    raise ValueError(f"tensor {name} lies in {piece.file!r}, which is not among its files")
                by_file[piece.file].append(piece)
        for name, pieces in by_file.items():
            end = 0
            for piece in sorted(pieces, key=lambda piece: (piece.start, piece.bytes)):
                if piece.start != end:
                    raise ValueError(f"the pieces in {name} overlap or leave a gap at byte {end}")
                end += piece.bytes
            if end != self.files[name]:
                raise ValueError(f"the pieces in {name} end at byte {end} of {self.files[name]}")


def check_within(name: str, rectangle: Rectangle, shape: Sequence[int]) -> None:
    """Raise ValueError unless a rectangle, which errors call `name`, is not empty and lies within a shape."""
    if any(len(numbers) != len(shape) for numbers in rectangle):
        raise ValueError(f"{name} has {len(rectangle[0])} dims, but the tensor has {len(shape)}")
    for offset, size, length in zip(*rectangle, shape, strict=True):
        if size < 1 or offset + size > length:
            raise ValueError(f"{name} lies outside its shape {tuple(shape)}")


def hull(rectangles: Sequence[Rectangle]) -> Rectangle:
    """Return the smallest rectangle around all."""
    first = tuple(map(min, zip(*(offsets for offsets, _ in rectangles), strict=True)))
    ends = ([o + s for o, s in zip(*rectangle, strict=True)] for rectangle in rectangles)
    end = map(max, zip(*ends, strict=True))
    return first, tuple(e - f for e, f in zip(end, first, strict=True))


def common(left: Rectangle, right: Rectangle) -> Rectangle | None:
    """Return the intersection of two rectangles; None if it is empty."""
    offsets, sizes = [], []
    for first, size, other, length in zip(*left, *right, strict=True):
        start = max(first, other)
        end = min(first + size, other + length)
        if end <= start:
            return None
        offsets.append(start)
        sizes.append(end - start)
    return tuple(offsets), tuple(sizes)


def check_cover(name: str, shape: Sequence[int], rectangles: Sequence[Rectangle]) -> None:
    """Raise ValueError unless the rectangles, all within the shape, fill it and share no element."""
    volume = sum(math.prod(sizes) for _, sizes in rectangles)
    if volume != math.prod(shape) or _overlapping(rectangles):
        raise ValueError(f"the pieces of {name} do not cover its shape {tuple(shape)} exactly once")


def _overlapping(rectangles: Sequence[Rectangle]) -> bool:
    """Return True if two of the rectangles share an element."""
    if len(rectangles) < 2:
        return False
    dims = range(len(rectangles[0][0]))
    # Sweep along the dim where most starts differ, so that few rectangles are open at once.
    sweep = max(dims, key=lambda dim: len({offsets[dim] for offsets, _ in rectangles}), default=None)
    if sweep is None:
        return True  # a scalar can be covered by one piece only
    open_: list[tuple[int, int]] = []
    for index in sorted(range(len(rectangles)), key=lambda index: rectangles[index][0][sweep]):
        offsets, sizes = rectangles[index]
        del open_[: bisect_right(open_, (offsets[sweep], len(rectangles)))]
        if any(common(rectangles[index], rectangles[other]) for _, other in open_):
            return True
        insort(open_, (offsets[sweep] + sizes[sweep], index))
    return False
