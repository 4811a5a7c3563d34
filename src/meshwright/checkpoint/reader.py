"""Read a published checkpoint: no byte is used before its hash is checked, no tensor changed before all are.

Under another layout than it was written in, `torch.distributed.checkpoint`'s planner says which part of which
piece goes where; the reading, the checks and the copies are here.
"""

from __future__ import annotations

import hashlib
import os
import stat
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import ReadItem
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from meshwright.checkpoint.chunks import DTYPE_NAMES, DTYPES, Chunk, local_chunks
from meshwright.checkpoint.disk import MANIFEST, open_regular, parse_step_name
from meshwright.checkpoint.errors import BadCheckpointError
from meshwright.checkpoint.manifest import Manifest, Piece, TensorEntry
from meshwright.parallel.slots import Trimmed
from meshwright.spec.errors import UserError, did_you_mean

READ_BYTES = 16 << 20
MAX_MANIFEST_BYTES = 1 << 30


def read_manifest_text(path: Path) -> str:
    """The text of the manifest in the published directory ``path``. Raises BadCheckpointError."""
    try:
        if not stat.S_ISDIR(os.lstat(path).st_mode):
            raise BadCheckpointError(f"{path} is not a directory, so it is not a checkpoint")
        with open_regular(path / MANIFEST) as descriptor:
            size = os.fstat(descriptor).st_size
            if size > MAX_MANIFEST_BYTES:
                raise BadCheckpointError(f"{path / MANIFEST} has {size} bytes, too many for a manifest")
            text = bytearray(size)
            _read_into(memoryview(text), descriptor, 0, path / MANIFEST)
            return text.decode()
    except OSError as error:
        raise BadCheckpointError(f"{path / MANIFEST} cannot be read: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise BadCheckpointError(f"{path / MANIFEST} cannot be trusted: {error}") from error


def read_manifest(path: Path) -> Manifest:
    """The checked manifest of a published directory, its files there with their sizes.

    Raises BadCheckpointError.
    """
    manifest = Manifest.parse(read_manifest_text(path), str(path / MANIFEST))
    check_directory(path, manifest)
    return manifest


def check_directory(path: Path, manifest: Manifest) -> None:
    """Raise BadCheckpointError unless the directory's name and files are those of its manifest.

    Each file must be there, be a plain file and have its size.
    """
    parsed = parse_step_name(path.name)
    if parsed is None or parsed[0] != manifest.step:
        raise BadCheckpointError(
            f"{path} holds the checkpoint of step {manifest.step}, another than its name says"
        )
    for name, expected in manifest.files.items():
        try:
            status = os.lstat(path / name)
        except OSError as error:
            raise BadCheckpointError(f"{path / name} cannot be read: {error.strerror}") from error
        if not stat.S_ISREG(status.st_mode):
            raise BadCheckpointError(f"{path / name} is not a plain file")
        if status.st_size != expected:
            raise BadCheckpointError(
                f"{path / name} has {status.st_size} bytes where its manifest says {expected}"
            )


def read_piece(descriptor: int, name: str, piece: Piece, path: Path) -> Tensor:
    """The verified bytes of a piece, (bytes,) uint8. Raises BadCheckpointError naming tensor and file."""
    data = bytearray(piece.bytes)
    _read_into(memoryview(data), descriptor, piece.start, path)
    _check_digest(hashlib.sha256(data), name, piece, path)
    return torch.frombuffer(data, dtype=torch.uint8)


def verify_piece(descriptor: int, name: str, piece: Piece, path: Path) -> None:
    """Check a piece's hash as `read_piece` does, with READ_BYTES of memory whatever its size."""
    digest = hashlib.sha256()
    block = memoryview(bytearray(min(READ_BYTES, piece.bytes)))
    for start in range(0, piece.bytes, READ_BYTES):
        part = block[: min(READ_BYTES, piece.bytes - start)]
        _read_into(part, descriptor, piece.start + start, path)
        digest.update(part)
    _check_digest(digest, name, piece, path)


def match_tensors(manifest: Manifest, tensors: Mapping[str, Tensor | Trimmed], where: str) -> None:
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
class Staged:
    """A verified part of a live tensor, on the host, that waits for the other ranks' verdict."""

    chunk: Chunk
    data: Tensor

    def commit(self) -> None:
        """Write it into the live tensor."""
        with torch.no_grad():
            self.chunk.local.copy_(self.data)


@dataclass
class _Fetch:
    """A piece that this rank needs, and what it needs of it."""

    name: str
    dtype: torch.dtype
    piece: Piece
    targets: list[tuple[Staged, ReadItem]] = field(default_factory=list)

    def run(self, descriptor: int, path: Path) -> None:
        data = read_piece(descriptor, self.name, self.piece, path).view(self.dtype).view(self.piece.sizes)
        for part, item in self.targets:
            source, target = data, part.data
            for dim, length in enumerate(item.lengths):
                source = source.narrow(dim, item.storage_offsets[dim], length)
                target = target.narrow(dim, item.dest_offsets[dim], length)
            target.copy_(source)


def read_tensors(path: Path, manifest: Manifest, tensors: Mapping[str, Tensor | Trimmed]) -> list[Staged]:
    """Read and verify what this rank holds of ``tensors``; nothing live is written.

    Files are read one by one, each piece once and in order. Host memory: the rank's own part, and one piece.
    Raises BadCheckpointError. ``tensors`` must match the manifest (`match_tensors`).
    """
    staged: list[Staged] = []
    by_file: dict[str, list[_Fetch]] = defaultdict(list)
    for name, tensor in tensors.items():
        parts = [
            Staged(chunk, torch.empty(chunk.sizes, dtype=tensor.dtype))
            for chunk in local_chunks(name, tensor)
        ]
        staged += parts
        for fetch in _fetches(name, manifest.tensors[name], parts):
            by_file[fetch.piece.file].append(fetch)
    for file, fetches in sorted(by_file.items()):
        try:
            with open_regular(path / file) as descriptor:
                for fetch in sorted(fetches, key=lambda fetch: fetch.piece.start):
                    fetch.run(descriptor, path / file)
        except OSError as error:
            raise BadCheckpointError(f"{path / file} cannot be read: {error.strerror or error}") from error
    return staged


def _fetches(name: str, entry: TensorEntry, parts: list[Staged]) -> list[_Fetch]:
    """The pieces of a tensor that overlap this rank's parts of it (the planner's resharding)."""
    saved = TensorStorageMetadata(
        properties=TensorProperties(dtype=DTYPES[entry.dtype]),
        size=torch.Size(entry.shape),
        chunks=[_rectangle(piece.offsets, piece.sizes) for piece in entry.pieces],
    )
    own = [_rectangle(part.chunk.offsets, part.chunk.sizes) for part in parts]
    fetches: dict[int, _Fetch] = {}
    for item in create_read_items_for_chunk_list(name, saved, own):
        source, target = item.storage_index.index, item.dest_index.index
        if source is None or target is None:
            raise RuntimeError(f"the planner returned a read of {name} without a place: {item}")
        fetch = fetches.setdefault(source, _Fetch(name, DTYPES[entry.dtype], entry.pieces[source]))
        fetch.targets.append((parts[target], item))
    return list(fetches.values())


def _rectangle(offsets: tuple[int, ...], sizes: tuple[int, ...]) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(offsets=torch.Size(offsets), sizes=torch.Size(sizes))


def _read_into(target: memoryview, descriptor: int, start: int, path: Path) -> None:
    done = 0
    while done < len(target):
        count = os.preadv(descriptor, [target[done : done + READ_BYTES]], start + done)
        if count == 0:
            raise BadCheckpointError(f"{path} ends at byte {start + done}, before its content does")
        done += count


def _check_digest(digest: hashlib._Hash, name: str, piece: Piece, path: Path) -> None:
    if digest.hexdigest() != piece.sha256:
        raise BadCheckpointError(
            f"{path} is damaged: the {piece.bytes} bytes of tensor '{name}' at byte {piece.start} "
            "do not have the SHA-256 of the manifest"
        )
