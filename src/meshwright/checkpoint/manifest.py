"""The manifest of a checkpoint: a small root, and parts that say where each piece lies, with its SHA-256.

    manifest.json   {"sha256": H, "body": {"version", "step", "saved_at", "ranks", "generation", "state",
                     "tensors": {name: {"dtype", "shape", "spread"}}, "spreads": [[[part, offsets, sizes]]],
                     "parts": [[file, bytes, sha256]]}}

H is over the body as it is written, and a file whose text is not exactly what this module would write is
refused, so no altered byte passes. A tensor's spread, one of the list since many have the same, gives the
rectangle around its pieces in each part that has any: a reader opens the parts that touch what it needs.
Version 1 had no parts: its tensors have their pieces in the root, and its files are listed there
(`pieces.py`), so it is read as a root with one part inside.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from meshwright.checkpoint.disk import is_part_file
from meshwright.checkpoint.errors import BadCheckpointError
from meshwright.checkpoint.pieces import (
    ITEM_BYTES,
    MAX_BYTES,
    Part,
    common,
    count,
    counts,
    covers_once,
    hull,
    text,
    within,
)
from meshwright.spec.sharded_tensor import Rectangle

VERSION = 2
Spread = tuple[tuple[int, Rectangle], ...]
"""(number of a part, rectangle around the tensor's pieces in it) for each part that has any."""


@dataclass(frozen=True)
class PartFile:
    """A part of the manifest: a file of the directory, its bytes and its SHA-256."""

    file: str
    bytes: int
    sha256: str


@dataclass(frozen=True)
class TensorEntry:
    """A tensor of the checkpoint: its dtype (a key of ``ITEM_BYTES``), global shape and spread."""

    dtype: str
    shape: tuple[int, ...]
    spread: Spread

    @property
    def bytes(self) -> int:
        """Bytes of its elements."""
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]

    def parts_of(self, rectangles: Sequence[Rectangle]) -> set[int]:
        """Numbers of the parts that may have pieces of these rectangles of the tensor."""
        touched = (
            (number, any(common(around, each) for each in rectangles)) for number, around in self.spread
        )
        return {number for number, touches in touched if touches}


@dataclass
class Manifest:
    """The root of a checkpoint's manifest."""

    step: int
    saved_at: str
    ranks: int
    generation: int
    state: dict[str, Any]
    tensors: dict[str, TensorEntry]
    parts: list[PartFile] = field(default_factory=list)
    inside: Part | None = None
    """The one part of a checkpoint of version 1."""

    @property
    def bytes(self) -> int:
        """Bytes of tensor data."""
        return sum(entry.bytes for entry in self.tensors.values())

    @property
    def part_count(self) -> int:
        """Parts that there are to read."""
        return 1 if self.inside is not None else len(self.parts)

    @property
    def forms(self) -> dict[str, tuple[str, tuple[int, ...]]]:
        """Each tensor's (dtype, shape)."""
        return {name: (entry.dtype, entry.shape) for name, entry in self.tensors.items()}

    def render(self) -> str:
        """The text of manifest.json."""
        spreads: dict[Spread, int] = {}
        tensors = {
            name: {
                "dtype": entry.dtype,
                "shape": list(entry.shape),
                "spread": spreads.setdefault(entry.spread, len(spreads)),
            }
            for name, entry in self.tensors.items()
        }
        return _seal(
            {
                "version": VERSION,
                "step": self.step,
                "saved_at": self.saved_at,
                "ranks": self.ranks,
                "generation": self.generation,
                "state": self.state,
                "tensors": tensors,
                "spreads": [[[number, *around] for number, around in spread] for spread in spreads],
                "parts": [[part.file, part.bytes, part.sha256] for part in self.parts],
            }
        )

    @classmethod
    def parse(cls, content: str, where: str) -> Manifest:
        """Read a manifest's text; ``where`` names it in errors.

        Raises BadCheckpointError when a byte was altered or when anything in it does not add up.
        """
        try:
            body = _unseal(content)
            if body["version"] == 1:
                return cls._of_version_1(body)
            if body["version"] != VERSION:
                raise ValueError(f"its version is {body['version']!r}, this program reads up to {VERSION}")
            return cls._of_body(body)
        except (ValueError, TypeError, KeyError, IndexError, RecursionError) as error:
            reason = f"no {error}" if isinstance(error, KeyError) else str(error)
            raise BadCheckpointError(f"{where} cannot be trusted: {reason}") from error

    @classmethod
    def _of_body(cls, body: dict[str, Any]) -> Manifest:
        if not isinstance(body["tensors"], dict):
            raise ValueError("its tensors are not a JSON object")
        parts = [
            PartFile(text(file, "a part"), count(size, f"size of {file}"), text(digest, f"sha256 of {file}"))
            for file, size, digest in body["parts"]
        ]
        for part in parts:
            if not is_part_file(part.file):
                raise ValueError(f"{part.file!r} is not the name of a part of this directory's manifest")
        spreads = [_parse_spread(spread, len(parts)) for spread in body["spreads"]]
        tensors = {
            name: TensorEntry(
                dtype=text(raw["dtype"], f"dtype of {name}"),
                shape=counts(raw["shape"], f"shape of {name}"),
                spread=spreads[count(raw["spread"], f"spread of {name}")],
            )
            for name, raw in body["tensors"].items()
        }
        for name, entry in tensors.items():
            _check_entry(name, entry)
        return cls(**_common_fields(body), tensors=tensors, parts=parts)

    @classmethod
    def _of_version_1(cls, body: dict[str, Any]) -> Manifest:
        if not all(isinstance(body[key], dict) for key in ("tensors", "files")):
            raise ValueError("its tensors or files are not a JSON object")
        pieces = {name: raw["pieces"] for name, raw in body["tensors"].items()}
        part = Part.parse({"tensors": pieces, "files": body["files"]})
        tensors: dict[str, TensorEntry] = {}
        for name, raw in body["tensors"].items():
            dtype, shape = text(raw["dtype"], f"dtype of {name}"), counts(raw["shape"], f"shape of {name}")
            around: Spread = ((0, ((0,) * len(shape), shape)),) if part.tensors[name] else ()
            tensors[name] = TensorEntry(dtype, shape, around)
            _check_entry(name, tensors[name])
        manifest = cls(**_common_fields(body), tensors=tensors, inside=part)
        part.check(manifest.forms)
        for name, found in part.tensors.items():
            check_cover(name, tensors[name].shape, [(piece.offsets, piece.sizes) for piece in found])
        return manifest


def check_cover(name: str, shape: tuple[int, ...], rectangles: Sequence[Rectangle]) -> None:
    """Raise ValueError unless the pieces of a tensor fill its shape once."""
    if not covers_once(rectangles, shape):
        raise ValueError(f"the pieces of tensor {name} do not cover its shape {shape} exactly once")


def report(part: Part, file: PartFile) -> dict[str, Any]:
    """Summary of a part for the root, as JSON: its file, and each tensor's bytes and bounding rectangle."""
    hulls: dict[Rectangle, int] = {}
    tensors = {}
    for name, pieces in part.tensors.items():
        around = hull([(piece.offsets, piece.sizes) for piece in pieces])
        tensors[name] = [hulls.setdefault(around, len(hulls)), sum(piece.bytes for piece in pieces)]
    return {"file": [file.file, file.bytes, file.sha256], "hulls": list(hulls), "tensors": tensors}


def join(
    forms: Mapping[str, tuple[str, Sequence[int]]], reports: Iterable[dict[str, Any]]
) -> tuple[dict[str, TensorEntry], list[PartFile]]:
    """The tensors, given as (dtype, shape), and the parts of a root from the reports of all parts.

    Raises ValueError where the pieces of a tensor have not as many bytes as the tensor.
    """
    parts: list[PartFile] = []
    spreads: dict[str, list[tuple[int, Rectangle]]] = {name: [] for name in forms}
    found = dict.fromkeys(forms, 0)
    for number, each in enumerate(reports):
        parts.append(PartFile(*each["file"]))
        hulls = [(number, (tuple(offsets), tuple(sizes))) for offsets, sizes in each["hulls"]]
        for name, (index, size) in each["tensors"].items():
            spreads[name].append(hulls[index])
            found[name] += size
    tensors = {}
    for name, (dtype, shape) in forms.items():
        tensors[name] = TensorEntry(dtype, tuple(shape), tuple(spreads[name]))
        if found[name] != tensors[name].bytes:
            raise ValueError(
                f"the pieces of tensor {name} have {found[name]} bytes, its shape {tuple(shape)} has "
                f"{tensors[name].bytes}: they overlap or leave a hole"
            )
    return tensors, parts


def _common_fields(body: dict[str, Any]) -> dict[str, Any]:
    if not isinstance(body["state"], dict):
        raise ValueError("its state is not a JSON object")
    return {
        "step": count(body["step"], "step"),
        "saved_at": str(body["saved_at"]),
        "ranks": count(body["ranks"], "ranks"),
        "generation": count(body["generation"], "generation"),
        "state": body["state"],
    }


def _parse_spread(raw: Sequence[Any], parts: int) -> Spread:
    found = []
    for number, offsets, sizes in raw:
        if count(number, "part of a spread") >= parts:
            raise ValueError(f"a spread names part {number} of {parts}")
        found.append((number, (counts(offsets, "offsets of a spread"), counts(sizes, "sizes of a spread"))))
    return tuple(found)


def _check_entry(name: str, entry: TensorEntry) -> None:
    if entry.dtype not in ITEM_BYTES:
        raise ValueError(f"tensor {name} has the unknown dtype {entry.dtype!r}")
    if entry.bytes > MAX_BYTES:
        raise ValueError(f"tensor {name} of shape {entry.shape} is too large to exist")
    for _, (offsets, sizes) in entry.spread:
        if len(offsets) != len(entry.shape) or len(sizes) != len(entry.shape):
            raise ValueError(f"a spread of tensor {name} has other dims than the tensor")
        if not within(offsets, sizes, entry.shape):
            raise ValueError(f"a spread of tensor {name} lies outside its shape {entry.shape}")
    if sum(math.prod(sizes) for _, (_, sizes) in entry.spread) < math.prod(entry.shape):
        raise ValueError(f"the spread of tensor {name} does not fill its shape {entry.shape}")


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
