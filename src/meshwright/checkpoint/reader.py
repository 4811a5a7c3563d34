"""Read a published checkpoint: no byte is used before its hash is checked, no tensor changed before all are.

A rank opens the parts of the manifest and the piece files that hold what it needs, and no others. What
several ranks hold alike one of them reads, and gives to the others when all have verified what they read.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import stat
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from meshwright.checkpoint.disk import MANIFEST, Disk, parse_step_name
from meshwright.checkpoint.errors import BadCheckpointError
from meshwright.checkpoint.manifest import Manifest
from meshwright.checkpoint.pieces import Part, Piece, common, covers_once
from meshwright.checkpoint.replicas import Replicas, deal
from meshwright.checkpoint.save_plan import DTYPE_NAMES, DTYPES, LocalShard, local_chunks
from meshwright.parallel.flat_param import UnpaddedDTensor
from meshwright.parallel.mesh import TrafficCounter
from meshwright.spec.errors import UserError, did_you_mean
from meshwright.spec.sharded_tensor import Rectangle

READ_BYTES = 16 << 20
MAX_TEXT_BYTES = 1 << 30
"""Largest size of a manifest file, in bytes."""


def read_manifest_text(path: Path, disk: Disk) -> str:
    """The text of the manifest's root in the published directory ``path``. Raises BadCheckpointError."""
    try:
        if not stat.S_ISDIR(os.lstat(path).st_mode):
            raise BadCheckpointError(f"{path} is not a directory, so it is not a checkpoint")
        return _read_text(path / MANIFEST, disk).decode()
    except OSError as error:
        raise BadCheckpointError(f"{path / MANIFEST} cannot be read: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise BadCheckpointError(f"{path / MANIFEST} cannot be trusted: {error}") from error


def read_manifest(path: Path, disk: Disk) -> Manifest:
    """The checked root of a published directory. Raises BadCheckpointError."""
    manifest = Manifest.parse(read_manifest_text(path, disk), str(path / MANIFEST))
    check_name(path, manifest)
    return manifest


def check_name(path: Path, manifest: Manifest) -> None:
    """Raise BadCheckpointError unless the directory's name has the step of its manifest."""
    parsed = parse_step_name(path.name)
    if parsed is None or parsed[0] != manifest.step:
        raise BadCheckpointError(
            f"{path} holds the checkpoint of step {manifest.step}, another than its name says"
        )


def read_part(path: Path, manifest: Manifest, number: int, disk: Disk) -> Part:
    """A part of the manifest, checked against its hash in the root. Raises BadCheckpointError."""
    if manifest.inside is not None:
        return manifest.inside
    expected = manifest.parts[number]
    where = path / expected.file
    try:
        content = _read_text(where, disk, expected.bytes)
        if hashlib.sha256(content).hexdigest() != expected.sha256:
            raise ValueError("its SHA-256 is not that of the manifest")
        part = Part.parse(json.loads(content))
        part.check(manifest.forms)
        return part
    except OSError as error:
        raise BadCheckpointError(f"{where} cannot be read: {error.strerror or error}") from error
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise BadCheckpointError(f"{where} cannot be trusted: {error}") from error


def check_size(path: Path, size: int, expected: int) -> None:
    """Raise BadCheckpointError unless a file has the bytes that its manifest says."""
    if size != expected:
        raise BadCheckpointError(f"{path} has {size} bytes where its manifest says {expected}")


def verify_piece(descriptor: int, name: str, piece: Piece, path: Path, disk: Disk) -> None:
    """Check a piece's hash with READ_BYTES of memory whatever its size. Raises BadCheckpointError."""
    digest = hashlib.sha256()
    block = memoryview(bytearray(min(READ_BYTES, piece.bytes)))
    for start in range(0, piece.bytes, READ_BYTES):
        part = block[: min(READ_BYTES, piece.bytes - start)]
        _read_into(part, descriptor, piece.start + start, path, disk)
        digest.update(part)
    _check_digest(digest, name, piece, path)


def match_tensors(manifest: Manifest, tensors: Mapping[str, Tensor | UnpaddedDTensor], where: str) -> None:
    """Raise UserError, naming the tensor, unless the checkpoint has each with its dtype and shape."""
    for name, tensor in tensors.items():
        entry = manifest.tensors.get(name)
        if entry is None:
            hint = did_you_mean(name, manifest.tensors)
            raise UserError(f"{where} has no tensor '{name}', which this model needs{hint}")
        if entry.shape != tuple(tensor.shape):
            raise UserError(
                f"{where}: tensor '{name}' has shape {list(entry.shape)}, this model has "
                f"{list(tensor.shape)}; load it with the model that wrote it"
            )
        if entry.dtype != DTYPE_NAMES.get(tensor.dtype):
            raise UserError(
                f"{where}: tensor '{name}' is {entry.dtype}, this run keeps it as "
                f"{str(tensor.dtype).removeprefix('torch.')}; use the precision that wrote it"
            )


@dataclass
class StagedTensor:
    """A verified rectangle of a live tensor, on the host, that waits for the other ranks' verdict."""

    chunk: LocalShard
    data: Tensor

    @property
    def rectangle(self) -> Rectangle:
        """Its place in the tensor."""
        return self.chunk.rectangle


@dataclass(frozen=True)
class _Copy:
    """The overlap of a piece with a staged rectangle."""

    target: StagedTensor
    shared: Rectangle

    def run(self, data: Tensor, piece: Piece) -> None:
        source, target = data, self.target.data
        for dim, (offset, size) in enumerate(zip(*self.shared, strict=True)):
            source = source.narrow(dim, offset - piece.offsets[dim], size)
            target = target.narrow(dim, offset - self.target.chunk.offset[dim], size)
        target.copy_(source)


@dataclass
class _Fetch:
    """A piece that this rank reads, and what it needs of it."""

    name: str
    dtype: torch.dtype
    piece: Piece
    copies: list[_Copy] = field(default_factory=list)

    def run(self, descriptor: int, path: Path, disk: Disk) -> None:
        content = bytearray(self.piece.bytes)
        _read_into(memoryview(content), descriptor, self.piece.start, path, disk)
        _check_digest(hashlib.sha256(content), self.name, self.piece, path)
        data = torch.frombuffer(content, dtype=torch.uint8).view(self.dtype).view(self.piece.sizes)
        for copy in self.copies:
            copy.run(data, self.piece)


class Reading:
    """A load of `tensors` from the checkpoint in `path`: first `read`, and when all ranks have, `commit`.

    Host memory: what this rank reads, and one piece. ``tensors`` must match the manifest (`match_tensors`).
    """

    def __init__(
        self, path: Path, manifest: Manifest, tensors: Mapping[str, Tensor | UnpaddedDTensor], disk: Disk
    ) -> None:
        self.path, self.manifest, self.tensors, self.disk = path, manifest, tensors, disk
        self._readers = _readers(tensors)
        self._staged: dict[str, list[StagedTensor]] = {}

    def read(self) -> None:
        """Read and verify this rank's share; nothing live is written. Raises BadCheckpointError.

        Files are opened one by one, and of each the pieces are read once and in order.
        """
        for name, (replicas, reader) in self._readers.items():
            if reader == replicas.index:
                tensor = self.tensors[name]
                self._staged[name] = [
                    StagedTensor(chunk, torch.empty(chunk.local_shape, dtype=tensor.dtype))
                    for chunk in local_chunks(name, tensor)
                ]
        fetches: dict[str, list[_Fetch]] = defaultdict(list)
        sizes: dict[str, int] = {}
        for number in sorted(self._parts()):
            part = read_part(self.path, self.manifest, number, self.disk)
            for fetch in self._fetches(part):
                fetches[fetch.piece.file].append(fetch)
                sizes[fetch.piece.file] = part.files[fetch.piece.file]
        self._check_cover(fetch for each in fetches.values() for fetch in each)
        for file, each in sorted(fetches.items()):
            self._read_file(self.path / file, sizes[file], each)

    def commit(self, wire: TrafficCounter) -> None:
        """Write what was read into the live tensors, and give it to the ranks that hold the same."""
        with torch.no_grad():
            for name, (replicas, reader) in self._readers.items():
                for staged in self._staged.pop(name, []):
                    staged.chunk.local.copy_(staged.data)
                if replicas.count > 1:
                    tensor = self.tensors[name]
                    local = tensor.padded if isinstance(tensor, UnpaddedDTensor) else tensor
                    assert isinstance(local, DTensor)
                    replicas.broadcast(local.to_local(), reader, wire)

    def _parts(self) -> set[int]:
        """Numbers of the parts that may have what is staged."""
        entries = self.manifest.tensors
        return {
            number
            for name, staged in self._staged.items()
            for number in entries[name].parts_of([each.rectangle for each in staged])
        }

    def _fetches(self, part: Part) -> Iterator[_Fetch]:
        for name in part.tensors.keys() & self._staged.keys():
            for piece in part.tensors[name]:
                shared = [
                    _Copy(each, overlap)
                    for each in self._staged[name]
                    if (overlap := common((piece.offsets, piece.sizes), each.rectangle)) is not None
                ]
                if shared:
                    yield _Fetch(name, DTYPES[self.manifest.tensors[name].dtype], piece, shared)

    def _check_cover(self, fetches: Iterable[_Fetch]) -> None:
        """See that pieces fill each staged rectangle once."""
        found: dict[int, list[Rectangle]] = defaultdict(list)
        for fetch in fetches:
            for copy in fetch.copies:
                found[id(copy.target)].append(copy.shared)
        for name, staged in self._staged.items():
            for each in staged:
                if not covers_once(found[id(each)], each.chunk.local_shape):
                    raise BadCheckpointError(
                        f"{self.path / MANIFEST} cannot be trusted: the pieces of tensor {name} do not cover "
                        f"its rows from {list(each.chunk.offset)} on, {list(each.chunk.local_shape)}, "
                        "exactly once"
                    )

    def _read_file(self, path: Path, size: int, fetches: list[_Fetch]) -> None:
        try:
            with self.disk.opened(path) as (descriptor, found):
                check_size(path, found, size)
                for fetch in sorted(fetches, key=lambda fetch: fetch.piece.start):
                    fetch.run(descriptor, path, self.disk)
        except OSError as error:
            raise BadCheckpointError(f"{path} cannot be read: {error.strerror or error}") from error


def _readers(tensors: Mapping[str, Tensor | UnpaddedDTensor]) -> dict[str, tuple[Replicas, int]]:
    """The replicas of each tensor that this rank holds, and which of them reads it, by name."""
    shared: dict[Replicas, list[str]] = defaultdict(list)
    for name in sorted(tensors):
        replicas = Replicas.of(tensors[name])
        if replicas is not None:
            shared[replicas].append(name)
    found: dict[str, tuple[Replicas, int]] = {}
    for replicas, names in shared.items():
        sizes = [math.prod(tensors[name].shape) * tensors[name].dtype.itemsize for name in names]
        for name, reader in zip(names, deal(sizes, replicas.count), strict=True):
            found[name] = replicas, reader
    return dict(sorted(found.items()))


def _read_text(path: Path, disk: Disk, expected: int | None = None) -> bytes:
    """All of a file of the manifest. Raises OSError, and BadCheckpointError for another size."""
    with disk.opened(path) as (descriptor, size):
        if size > MAX_TEXT_BYTES:
            raise BadCheckpointError(f"{path} has {size} bytes, too many for a manifest")
        check_size(path, size, size if expected is None else expected)
        content = bytearray(size)
        _read_into(memoryview(content), descriptor, 0, path, disk)
        return bytes(content)


def _read_into(target: memoryview, descriptor: int, start: int, path: Path, disk: Disk) -> None:
    done = 0
    while done < len(target):
        count = disk.read(descriptor, target[done : done + READ_BYTES], start + done)
        if count == 0:
            raise BadCheckpointError(f"{path} ends at byte {start + done}, before its content does")
        done += count


def _check_digest(digest: hashlib._Hash, name: str, piece: Piece, path: Path) -> None:
    if digest.hexdigest() != piece.sha256:
        raise BadCheckpointError(
            f"{path} is damaged: the {piece.bytes} bytes of tensor '{name}' at byte {piece.start} "
            "do not have the SHA-256 of the manifest"
        )
