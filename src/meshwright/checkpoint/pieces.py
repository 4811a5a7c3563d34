"""Pieces of a checkpoint, and the parts of its manifest that list them.

    part-00064.json   {"tensors": {name: [piece]}, "files": {name: bytes}}
    piece             [offsets, sizes, file, start, bytes, sha256]

A part lists what a run of consecutive ranks wrote; its hash stands in the root (`manifest.py`). Hashes find
accidents, not forgers: `Part.check` sees that pieces lie within their tensors and tile their files, so a
made-up part cannot make a reader leave the directory, read elsewhere, or allocate more than the files hold.
"""

from __future__ import annotations

import json
import math
from bisect import bisect_right, insort
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from meshwright.checkpoint.disk import is_rank_file, rank_file
from meshwright.spec.sharded_tensor import Rectangle

MAX_DIMS = 16
MAX_BYTES = 1 << 62

# Bytes per element. Nothing else can be stored: a reader refuses a dtype that is not in the list.
ITEM_BYTES = {
    "float64": 8,
    "float32": 4,
    "bfloat16": 2,
    "float16": 2,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "int64": 8,
    "int32": 4,
    "int16": 2,
    "int8": 1,
    "uint8": 1,
    "bool": 1,
}


@dataclass(frozen=True)
class Piece:
    """A rectangle of a tensor, contiguous in row-major order at ``start`` of ``file``."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str
    start: int
    bytes: int
    sha256: str

    def row(self) -> list[Any]:
        return [list(self.offsets), list(self.sizes), self.file, self.start, self.bytes, self.sha256]

    @classmethod
    def parse(cls, name: str, row: Sequence[Any]) -> Piece:
        """A piece of tensor `name` from its row. Raises ValueError."""
        offsets, sizes, file, start, length, digest = row
        return cls(
            offsets=counts(offsets, f"offsets in {name}"),
            sizes=counts(sizes, f"sizes in {name}"),
            file=text(file, f"file of {name}"),
            start=count(start, f"start in {name}"),
            bytes=count(length, f"bytes in {name}"),
            sha256=text(digest, f"sha256 in {name}"),
        )


@dataclass
class Part:
    """The pieces that some ranks wrote, by tensor, and the bytes of their files."""

    tensors: dict[str, list[Piece]] = field(default_factory=dict)
    files: dict[str, int] = field(default_factory=dict)

    def add(self, name: str, piece: Piece) -> None:
        """Append a piece, which follows the last one of its file."""
        self.tensors.setdefault(name, []).append(piece)
        self.files[piece.file] = self.files.get(piece.file, 0) + piece.bytes

    @classmethod
    def of(cls, listed: Iterable[Sequence[Sequence[Any]]], first: int) -> Part:
        """The part of ranks from `first` on: for each the (tensor, offsets, sizes, start, bytes, sha256) rows
        of the pieces in its file."""
        part = cls()
        for rank, rows in enumerate(listed, start=first):
            for name, offsets, sizes, start, length, digest in rows:
                part.add(name, Piece(tuple(offsets), tuple(sizes), rank_file(rank), start, length, digest))
        return part

    def render(self) -> str:
        """The text of the part's file."""
        tensors = {name: [piece.row() for piece in pieces] for name, pieces in self.tensors.items()}
        return json.dumps({"tensors": tensors, "files": self.files}, separators=(",", ":"))

    @classmethod
    def parse(cls, body: dict[str, Any]) -> Part:
        """The part from its JSON. Raises ValueError, TypeError or KeyError for what is none."""
        if not all(isinstance(body[key], dict) for key in ("tensors", "files")):
            raise ValueError("its tensors or files are not a JSON object")
        return cls(
            tensors={
                name: [Piece.parse(name, row) for row in rows] for name, rows in body["tensors"].items()
            },
            files={name: count(size, f"size of {name}") for name, size in body["files"].items()},
        )

    def check(self, forms: Mapping[str, tuple[str, tuple[int, ...]]]) -> None:
        """Raise ValueError unless pieces lie in their tensors, given as (dtype, shape), and tile files."""
        by_file: dict[str, list[Piece]] = {name: [] for name in self.files}
        for name in self.files:
            if not is_rank_file(name):
                raise ValueError(f"{name!r} is not the name of a piece file of this directory")
        for name, pieces in self.tensors.items():
            if name not in forms:
                raise ValueError(f"it has pieces of {name}, but the checkpoint has no such tensor")
            for piece in pieces:
                _check_piece(name, piece, *forms[name])
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


def _check_piece(name: str, piece: Piece, dtype: str, shape: tuple[int, ...]) -> None:
    if len(piece.offsets) != len(shape) or len(piece.sizes) != len(shape):
        raise ValueError(f"a piece of tensor {name} has other dims than the tensor")
    if not within(piece.offsets, piece.sizes, shape):
        raise ValueError(f"a piece of tensor {name} lies outside its shape {shape}")
    if piece.bytes != math.prod(piece.sizes) * ITEM_BYTES[dtype]:
        raise ValueError(f"a piece of tensor {name} has {piece.bytes} bytes for sizes {piece.sizes}")


def within(offsets: Sequence[int], sizes: Sequence[int], shape: Sequence[int]) -> bool:
    """Return True for a rectangle of a tensor of this shape that is not empty."""
    rows = zip(offsets, sizes, shape, strict=True)
    return all(size >= 1 and offset + size <= length for offset, size, length in rows)


def hull(rectangles: Iterable[Rectangle]) -> Rectangle:
    """The smallest rectangle around all."""
    columns = [
        (offsets, [o + s for o, s in zip(offsets, sizes, strict=True)]) for offsets, sizes in rectangles
    ]
    first = tuple(min(each) for each in zip(*(start for start, _ in columns), strict=True))
    end = tuple(max(each) for each in zip(*(end for _, end in columns), strict=True))
    return first, tuple(e - f for e, f in zip(end, first, strict=True))


def common(left: Rectangle, right: Rectangle) -> Rectangle | None:
    """The intersection of two rectangles; None if it is empty."""
    offsets, sizes = [], []
    for first, size, other, length in zip(*left, *right, strict=True):
        start = max(first, other)
        end = min(first + size, other + length)
        if end <= start:
            return None
        offsets.append(start)
        sizes.append(end - start)
    return tuple(offsets), tuple(sizes)


def covers_once(rectangles: Sequence[Rectangle], shape: Sequence[int]) -> bool:
    """Return True when the rectangles, all within the shape, fill it and no two share an element."""
    volume = sum(math.prod(sizes) for _, sizes in rectangles)
    return volume == math.prod(shape) and not _overlapping(rectangles)


def _overlapping(rectangles: Sequence[Rectangle]) -> bool:
    """True if two of the rectangles share an element; sweeps along the dim with most distinct offsets."""
    if len(rectangles) < 2:
        return False
    dims = range(len(rectangles[0][0]))
    # Sweep where most starts differ, so that few rectangles are open at once.
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


def count(value: object, what: str) -> int:
    """The value if it is a count, else ValueError."""
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= MAX_BYTES:
        raise ValueError(f"{what} is {value!r}, not a count")
    return value


def counts(values: object, what: str) -> tuple[int, ...]:
    """The values as a tuple if they are a list of counts, else ValueError."""
    if not isinstance(values, list) or len(values) > MAX_DIMS:
        raise ValueError(f"{what} is not a list of at most {MAX_DIMS} counts")
    return tuple(count(value, what) for value in values)


def text(value: object, what: str) -> str:
    """The value if it is text, else ValueError."""
    if not isinstance(value, str):
        raise ValueError(f"{what} is {value!r}, not text")
    return value
