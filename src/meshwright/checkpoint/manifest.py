"""The manifest of a checkpoint: where each piece of each tensor lies, and the SHA-256 of each.

    manifest.json   {"sha256": H, "body": {"version", "step", "saved_at", "ranks", "generation", "state",
                     "tensors": {name: {"dtype", "shape", "pieces": [piece]}}, "files": {name: bytes}}}
    piece           [offsets, sizes, file, start, bytes, sha256]

H is over the body as it is written, and a file whose text is not exactly what this module would write is
refused, so no altered byte passes. Hashes find accidents, not forgers: whatever the hash says,
`Manifest.parse` also checks that pieces tile their tensor and their file, so a made-up manifest cannot make a
reader leave the directory, read elsewhere, or allocate more than the files on the disk hold.
"""

from __future__ import annotations

import hashlib
import json
import math
from bisect import bisect_right, insort
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from meshwright.checkpoint.disk import is_rank_file
from meshwright.checkpoint.errors import BadCheckpointError

VERSION = 1
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


@dataclass
class TensorEntry:
    """A tensor of the checkpoint: its dtype (a key of ``ITEM_BYTES``), global shape and pieces."""

    dtype: str
    shape: tuple[int, ...]
    pieces: list[Piece] = field(default_factory=list)


@dataclass
class Manifest:
    """All that a checkpoint says of itself."""

    step: int
    saved_at: str
    ranks: int
    generation: int
    state: dict[str, Any]
    tensors: dict[str, TensorEntry]
    files: dict[str, int]

    @property
    def bytes(self) -> int:
        """Bytes of tensor data."""
        return sum(self.files.values())

    def render(self) -> str:
        """The text of manifest.json."""
        return _seal(
            {
                "version": VERSION,
                "step": self.step,
                "saved_at": self.saved_at,
                "ranks": self.ranks,
                "generation": self.generation,
                "state": self.state,
                "tensors": {
                    name: {
                        "dtype": entry.dtype,
                        "shape": list(entry.shape),
                        "pieces": [piece.row() for piece in entry.pieces],
                    }
                    for name, entry in self.tensors.items()
                },
                "files": self.files,
            }
        )

    @classmethod
    def parse(cls, text: str, where: str) -> Manifest:
        """Read a manifest's text; ``where`` names it in errors.

        Raises BadCheckpointError when a byte was altered or when anything in it does not add up.
        """
        try:
            return cls._from_body(_unseal(text))
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            reason = f"no {error}" if isinstance(error, KeyError) else str(error)
            raise BadCheckpointError(f"{where} cannot be trusted: {reason}") from error

    @classmethod
    def _from_body(cls, body: dict[str, Any]) -> Manifest:
        if body["version"] != VERSION:
            raise ValueError(f"its version is {body['version']!r}, this program reads version {VERSION}")
        if not all(isinstance(body[key], dict) for key in ("state", "tensors", "files")):
            raise ValueError("its state, tensors or files are not a JSON object")
        manifest = cls(
            step=_count(body["step"], "step"),
            saved_at=str(body["saved_at"]),
            ranks=_count(body["ranks"], "ranks"),
            generation=_count(body["generation"], "generation"),
            state=body["state"],
            tensors={name: _parse_entry(name, raw) for name, raw in body["tensors"].items()},
            files={name: _count(size, f"size of {name}") for name, size in body["files"].items()},
        )
        manifest.check()
        return manifest

    def check(self) -> None:
        """Raise ValueError unless the pieces tile each tensor and each file exactly."""
        by_file: dict[str, list[Piece]] = {name: [] for name in self.files}
        for name in self.files:
            if not is_rank_file(name):
                raise ValueError(f"{name!r} is not the name of a piece file of this directory")
        for name, entry in self.tensors.items():
            check_entry(name, entry)
            for piece in entry.pieces:
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


def check_entry(name: str, entry: TensorEntry) -> None:
    """Raise ValueError unless dtype and bytes are right and the pieces cover the tensor once."""
    if entry.dtype not in ITEM_BYTES:
        raise ValueError(f"tensor {name} has the unknown dtype {entry.dtype!r}")
    if math.prod(entry.shape) * ITEM_BYTES[entry.dtype] > MAX_BYTES:
        raise ValueError(f"tensor {name} of shape {entry.shape} is too large to exist")
    for piece in entry.pieces:
        if len(piece.offsets) != len(entry.shape) or len(piece.sizes) != len(entry.shape):
            raise ValueError(f"a piece of tensor {name} has other dims than the tensor")
        rows = zip(piece.offsets, piece.sizes, entry.shape, strict=True)
        if any(size < 1 or offset + size > length for offset, size, length in rows):
            raise ValueError(f"a piece of tensor {name} lies outside its shape {entry.shape}")
        if piece.bytes != math.prod(piece.sizes) * ITEM_BYTES[entry.dtype]:
            raise ValueError(f"a piece of tensor {name} has {piece.bytes} bytes for sizes {piece.sizes}")
    volume = sum(math.prod(piece.sizes) for piece in entry.pieces)
    if volume != math.prod(entry.shape) or _overlapping(entry.pieces):
        raise ValueError(f"the pieces of tensor {name} do not cover its shape {entry.shape} exactly once")


def _overlapping(pieces: Sequence[Piece]) -> bool:
    """Whether two rectangles share an element: a sweep along the first dim that is split."""
    if len(pieces) < 2:
        return False
    dims = range(len(pieces[0].offsets))
    # Sweep where most starts differ, so that few rectangles are open at once.
    sweep = max(dims, key=lambda dim: len({piece.offsets[dim] for piece in pieces}), default=None)
    if sweep is None:
        return True  # a scalar can be covered by one piece only
    open_: list[tuple[int, int]] = []
    for index in sorted(range(len(pieces)), key=lambda index: pieces[index].offsets[sweep]):
        piece = pieces[index]
        del open_[: bisect_right(open_, (piece.offsets[sweep], len(pieces)))]
        for _, other in open_:
            if all(
                piece.offsets[dim] < pieces[other].offsets[dim] + pieces[other].sizes[dim]
                and pieces[other].offsets[dim] < piece.offsets[dim] + piece.sizes[dim]
                for dim in dims
            ):
                return True
        insort(open_, (piece.offsets[sweep] + piece.sizes[sweep], index))
    return False


def _parse_entry(name: str, raw: Mapping[str, Any]) -> TensorEntry:
    shape = _counts(raw["shape"], f"shape of {name}")
    pieces = []
    for offsets, sizes, file, start, length, digest in raw["pieces"]:
        pieces.append(
            Piece(
                offsets=_counts(offsets, f"offsets in {name}"),
                sizes=_counts(sizes, f"sizes in {name}"),
                file=_text(file, f"file of {name}"),
                start=_count(start, f"start in {name}"),
                bytes=_count(length, f"bytes in {name}"),
                sha256=_text(digest, f"sha256 in {name}"),
            )
        )
    return TensorEntry(dtype=_text(raw["dtype"], f"dtype of {name}"), shape=shape, pieces=pieces)


def _count(value: object, what: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= MAX_BYTES:
        raise ValueError(f"{what} is {value!r}, not a count")
    return value


def _counts(values: object, what: str) -> tuple[int, ...]:
    if not isinstance(values, list) or len(values) > MAX_DIMS:
        raise ValueError(f"{what} is not a list of at most {MAX_DIMS} counts")
    return tuple(_count(value, what) for value in values)


def _text(value: object, what: str) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{what} is {value!r}, not text")
    return value


def _seal(body: dict[str, Any]) -> str:
    text = json.dumps(body, separators=(",", ":"))
    return f'{{"sha256":"{hashlib.sha256(text.encode()).hexdigest()}","body":{text}}}\n'


def _unseal(text: str) -> dict[str, Any]:
    outer = json.loads(text)
    if not isinstance(outer, dict) or not isinstance(outer.get("body"), dict):
        raise ValueError("it is not a manifest")
    if _seal(outer["body"]) != text:
        raise ValueError("its SHA-256 is not that of its content")
    return outer["body"]
