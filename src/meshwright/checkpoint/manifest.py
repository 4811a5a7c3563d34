"""The manifest of a checkpoint: a small root, and parts that say where each piece lies, with its SHA-256.

    manifest.json     {"sha256": H, "body": {"version", "step", "saved_at", "ranks", "generation", "state",
                       "tensors": {name: {"dtype", "shape", "spread"}},
                       "spreads": [[[part, offsets, sizes]]], "parts": [[file, bytes, sha256]]}}
    part-00064.json   {"tensors": {name: [piece]}, "files": {name: bytes}}
    piece             [offsets, sizes, file, start, bytes, sha256]

H is over the body as it is written, and a file whose text is not exactly what this module would write is
refused, so no altered byte passes. A part lists the pieces that some consecutive ranks wrote. A tensor's
spread, an index into the list since many tensors have an equal one, gives the rectangle around its pieces in
each part that has any: a reader opens the parts that touch what it needs. A part may lie in a directory
beside that of the checkpoint, with its pieces: those are of tensors that no step changes, which several
checkpoints have in common. Version 1 had no parts: the root
lists the pieces and the files, so it is read as a root with one part inside.

Hashes find accidents, not forgers: `Part.check` sees that pieces lie within their tensors and tile their
files, so a made-up part cannot make a reader leave the directory, read elsewhere, or allocate more than the
files hold.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Annotated, Any, NamedTuple

import torch
from pydantic import Field
from pydantic.dataclasses import dataclass

from meshwright.checkpoint.disk import rank_file
from meshwright.checkpoint.rectangles import check_cover, check_within, common, hull
from meshwright.spec.records import Record, read
from meshwright.spec.sharded_tensor import Rectangle

VERSION = 2
MAX_DIMS = 16
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


class StoredPiece(NamedTuple):
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
class ManifestPart(Record):
    """The pieces that some ranks wrote, by tensor, and the bytes of their files."""

    tensors: dict[str, list[StoredPiece]]
    files: dict[RankFile, Count]

    @classmethod
    def of(cls, gathered: Iterable[Sequence[Sequence[Any]]], first: int) -> ManifestPart:
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
        by_file: dict[str, list[StoredPiece]] = {name: [] for name in self.files}
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


class PartFile(NamedTuple):
    """A part of the manifest: a file of the directory, its bytes and its SHA-256."""

    file: Annotated[str, Field(pattern=r"^(\.\./frozen-[0-9a-f]{16}/)?part-[0-9]{5,9}\.json$")]
    bytes: Count
    sha256: str


class Hull(NamedTuple):
    """The rectangle around a tensor's pieces in the part with number `part`."""

    part: Count
    offsets: Dims
    sizes: Dims


@dataclass(frozen=True)
class _Head(Record):
    """Facts about a checkpoint that manifests of all versions have."""

    step: Count
    saved_at: str
    ranks: Count
    generation: Count
    state: dict[str, Any]


@dataclass(frozen=True)
class Manifest(_Head):
    """The root of a checkpoint's manifest; `inside` is the one part of a checkpoint of version 1."""

    tensors: dict[str, TensorEntry]
    spreads: list[list[Hull]]
    parts: list[PartFile]
    inside: ManifestPart | None = None

    @property
    def bytes(self) -> int:
        """Bytes of tensor data."""
        return sum(entry.bytes for entry in self.tensors.values())

    @property
    def part_count(self) -> int:
        """Number of parts that can be read."""
        return 1 if self.inside is not None else len(self.parts)

    def folder_of(self, number: int) -> str:
        """Return the directory of a part and its pieces, as seen from that of the checkpoint."""
        return "." if self.inside is not None else os.path.dirname(self.parts[number].file) or "."

    @property
    def frozen(self) -> str | None:
        """Name of the directory beside this one that holds what no step changes; None if there is none."""
        folders = {self.folder_of(number) for number in range(self.part_count)} - {"."}
        return next((os.path.basename(folder) for folder in folders), None)

    def parts_of(self, name: str, rectangles: Iterable[Rectangle]) -> set[int]:
        """Return the numbers of the parts that may have pieces of these rectangles of a tensor."""
        wanted = list(rectangles)
        spread = self.spreads[self.tensors[name].spread]
        return {
            number
            for number, offsets, sizes in spread
            if any(common((offsets, sizes), rectangle) for rectangle in wanted)
        }

    def with_frozen(self, frozen: Manifest, folder: str) -> Manifest:
        """Return this manifest with the tensors of another one, whose parts lie in `folder` beside it."""
        first, places = len(self.parts), len(self.spreads)
        parts = [file._replace(file=f"../{folder}/{file.file}") for file in frozen.parts]
        spreads = [[hull._replace(part=hull.part + first) for hull in listed] for listed in frozen.spreads]
        tensors = {
            name: replace(entry, spread=entry.spread + places) for name, entry in frozen.tensors.items()
        }
        return replace(
            self,
            tensors={**self.tensors, **tensors},
            spreads=[*self.spreads, *spreads],
            parts=[*self.parts, *parts],
        )

    def frozen_part(self) -> Manifest | None:
        """Return this manifest with the tensors that `with_frozen` added alone; None where it added none."""
        if self.frozen is None:
            return None
        first = next(n for n in range(self.part_count) if self.folder_of(n) != ".")
        places = next(
            n for n, listed in enumerate(self.spreads) if any(hull.part >= first for hull in listed)
        )
        parts = [file._replace(file=os.path.basename(file.file)) for file in self.parts[first:]]
        spreads = [
            [hull._replace(part=hull.part - first) for hull in listed] for listed in self.spreads[places:]
        ]
        tensors = {
            name: replace(entry, spread=entry.spread - places)
            for name, entry in self.tensors.items()
            if entry.spread >= places
        }
        return replace(self, tensors=tensors, spreads=spreads, parts=parts)

    def render(self) -> str:
        """Return the text of manifest.json."""
        body = asdict(self)
        del body["inside"]
        return _seal({"version": VERSION, **body})

    @classmethod
    def parse(cls, content: str) -> Manifest:
        """Return the manifest of a text of manifest.json.

        Raises ValueError or UserError when a byte was altered or when anything in it does not add up.
        """
        body = _unseal(content)
        version = body.pop("version", None)
        if version == 1:
            return _from_version_1(read(_Version1, body))
        if version != VERSION:
            raise ValueError(f"its version is {version!r}, but this program reads versions up to {VERSION}")
        manifest = read(cls, body)
        manifest.check()
        return manifest

    def check(self) -> None:
        """Raise ValueError unless dtypes are known, spreads fill their tensors and parts exist."""
        for name, entry in self.tensors.items():
            if entry.dtype not in DTYPES:
                raise ValueError(f"tensor {name} has the unknown dtype {entry.dtype!r}")
            if len(entry.shape) > MAX_DIMS or entry.bytes > MAX_BYTES:
                raise ValueError(f"tensor {name} of shape {entry.shape} is too large to exist")
            if entry.spread >= len(self.spreads):
                raise ValueError(f"tensor {name} has spread {entry.spread} of {len(self.spreads)}")
            spread = self.spreads[entry.spread]
            for part, offsets, sizes in spread:
                if part >= self.part_count:
                    raise ValueError(f"the spread of tensor {name} names part {part} of {self.part_count}")
                check_within(f"the spread of tensor {name}", (offsets, sizes), entry.shape)
            if sum(math.prod(sizes) for _, _, sizes in spread) < math.prod(entry.shape):
                raise ValueError(f"the spread of tensor {name} does not fill its shape {entry.shape}")


@dataclass(frozen=True)
class _TensorOfVersion1(Record):
    dtype: str
    shape: Dims
    pieces: list[StoredPiece]


@dataclass(frozen=True)
class _Version1(_Head):
    tensors: dict[str, _TensorOfVersion1]
    files: dict[RankFile, Count]


def _from_version_1(old: _Version1) -> Manifest:
    tensors = {
        name: TensorEntry(tensor.dtype, tensor.shape, number)
        for number, (name, tensor) in enumerate(old.tensors.items())
    }
    spreads = [
        [Hull(0, (0,) * len(tensor.shape), tensor.shape)] if tensor.pieces else []
        for tensor in old.tensors.values()
    ]
    part = ManifestPart({name: tensor.pieces for name, tensor in old.tensors.items()}, old.files)
    manifest = Manifest(
        old.step, old.saved_at, old.ranks, old.generation, old.state, tensors, spreads, [], part
    )
    manifest.check()
    part.check(tensors)
    for name, pieces in part.tensors.items():
        check_cover(f"tensor {name}", tensors[name].shape, [piece.rectangle for piece in pieces])
    return manifest


def lists(content: bytes, rank: int, rows: Sequence[Sequence[Any]]) -> bool:
    """True if a part's text has exactly these rows (`ManifestPart.of`) for the file of `rank`."""
    file = rank_file(rank)
    found = [
        [name, offsets, sizes, start, length, digest]
        for name, pieces in json.loads(content)["tensors"].items()
        for offsets, sizes, of, start, length, digest in pieces
        if of == file
    ]
    return sorted(found) == sorted(json.loads(json.dumps(rows)))


def report(part: ManifestPart, file: PartFile) -> dict[str, Any]:
    """Return a part's summary for the root, as JSON: its file, and each tensor's bytes and its hull."""
    hulls: dict[Rectangle, int] = {}
    tensors = {}
    for name, pieces in part.tensors.items():
        around = hull([piece.rectangle for piece in pieces])
        tensors[name] = [hulls.setdefault(around, len(hulls)), sum(piece.bytes for piece in pieces)]
    return {"file": file, "hulls": list(hulls), "tensors": tensors}


def join(
    forms: Mapping[str, tuple[str, Sequence[int]]], reports: Iterable[dict[str, Any]]
) -> tuple[dict[str, TensorEntry], list[list[Hull]], list[PartFile]]:
    """Return the tensors, spreads and parts of a root, of all tensors' (dtype, shape) and all parts' reports.

    Raises ValueError where the pieces of a tensor have more or fewer bytes than the tensor.
    """
    parts: list[PartFile] = []
    hulls: dict[str, list[Hull]] = {name: [] for name in forms}
    written = dict.fromkeys(forms, 0)
    for number, summary in enumerate(reports):
        parts.append(PartFile(*summary["file"]))
        around = [Hull(number, tuple(offsets), tuple(sizes)) for offsets, sizes in summary["hulls"]]
        for name, (index, size) in summary["tensors"].items():
            hulls[name].append(around[index])
            written[name] += size
    spreads: dict[tuple[Hull, ...], int] = {}
    tensors = {}
    for name, (dtype, shape) in forms.items():
        number = spreads.setdefault(tuple(hulls[name]), len(spreads))
        tensors[name] = TensorEntry(dtype, tuple(shape), number)
        if written[name] != tensors[name].bytes:
            raise ValueError(
                f"the pieces of tensor {name} have {written[name]} bytes, its shape {tuple(shape)} has "
                f"{tensors[name].bytes}: they overlap or leave a hole"
            )
    return tensors, [list(spread) for spread in spreads], parts


def _seal(body: dict[str, Any]) -> str:
    text = json.dumps(body, separators=(",", ":"))
    return f'{{"sha256":"{hashlib.sha256(text.encode()).hexdigest()}","body":{text}}}\n'


def _unseal(text: str) -> dict[str, Any]:
    """Return the body of a manifest's text. Raises ValueError unless `_seal` would write the same text."""
    sealed = json.loads(text)
    if not isinstance(sealed, dict) or not isinstance(sealed.get("body"), dict):
        raise ValueError("it is not a manifest")
    if _seal(sealed["body"]) != text:
        raise ValueError("its SHA-256 is not that of its content")
    return sealed["body"]
