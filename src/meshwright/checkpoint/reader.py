"""Read a published checkpoint: no byte is used before its hash is checked, no tensor changed before all are.

Any layout reads a checkpoint of any other (resharding): a rank's part of a tensor is a rectangle, which is
put together from the pieces that overlap it, whatever ranks wrote them.

A rank opens the parts of the manifest and the piece files that hold what it needs, and no others. Of ranks
that hold the same part of a tensor one reads it, and gives it to the others when all ranks have verified what
they read.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import stat
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from meshwright.checkpoint.digests import Digest, sha256
from meshwright.checkpoint.directory import candidates, latest_step
from meshwright.checkpoint.disk import MANIFEST, Disk, parse_step_name
from meshwright.checkpoint.errors import BadCheckpointError, reading, retried
from meshwright.checkpoint.manifest import DTYPE_NAMES, DTYPES, Manifest, ManifestPart, StoredPiece
from meshwright.checkpoint.rectangles import check_cover, common
from meshwright.checkpoint.replicas import Replicas, assign
from meshwright.checkpoint.save_plan import LocalShard, Tensors, local_chunks, narrow
from meshwright.comm.traffic_counter import TrafficCounter
from meshwright.parallel.flat_param import UnpaddedDTensor
from meshwright.spec.errors import UserError, did_you_mean
from meshwright.spec.records import read, show
from meshwright.spec.sharded_tensor import Rectangle
from meshwright.spec.tiling import tiling

MAX_ROOT_BYTES = 64 << 20
"""Largest size of the root of a manifest, in bytes: parsed, it takes up to 30 times as much memory."""


def read_manifest_text(path: Path, disk: Disk) -> str:
    """Return the text of the manifest's root in the published directory `path`.

    Raises BadCheckpointError, and UnreadableError as all functions here that read.
    """
    file = path / MANIFEST

    def text() -> str:
        with reading(file):
            if not stat.S_ISDIR(os.lstat(path).st_mode):
                raise BadCheckpointError(f"{path} is not a directory, so it is not a checkpoint")
            return _read_file(file, file.lstat().st_size, MAX_ROOT_BYTES, disk).decode()

    return retried(text)


def parse_manifest(path: Path, text: str) -> Manifest:
    """Return the manifest of a directory from its text, checked. Raises BadCheckpointError."""
    with reading(path / MANIFEST):
        manifest = Manifest.parse(text)
    parsed = parse_step_name(path.name)
    if parsed is None or parsed[0] != manifest.step:
        raise BadCheckpointError(
            f"{path} holds the checkpoint of step {manifest.step}, another than its name says"
        )
    if (step := manifest.state.get("step", manifest.step)) != manifest.step:
        raise BadCheckpointError(
            f"{path / MANIFEST} cannot be trusted: its state is of step {show(step)}, not {manifest.step}"
        )
    return manifest


def read_part(path: Path, manifest: Manifest, number: int, disk: Disk) -> ManifestPart:
    """Return a part of the manifest, checked against its hash in the root. Raises BadCheckpointError."""
    if manifest.inside is not None:
        return manifest.inside
    file, size, digest = manifest.parts[number]
    with reading(path / file):
        most = MAX_ROOT_BYTES + manifest.bytes // 64  # pieces are of 64 MiB, where they can
        content = retried(lambda: _read_file(path / file, size, most, disk))
        if hashlib.sha256(content).hexdigest() != digest:
            raise ValueError("its SHA-256 is not that of the manifest")
        part = read(ManifestPart, json.loads(content))
        part.check(manifest.tensors)
        return part


@contextmanager
def opened(path: Path, expected: int, disk: Disk) -> Iterator[int]:
    """Open a file of so many bytes and yield its descriptor. Raises BadCheckpointError."""
    with reading(path), disk.opened(path) as (descriptor, size):
        if size != expected:
            raise BadCheckpointError(f"{path} has {size} bytes where its manifest says {expected}")
        yield descriptor


def verify_piece(
    descriptor: int,
    name: str,
    piece: StoredPiece,
    path: Path,
    disk: Disk,
    look: Callable[[memoryview], None] = lambda _block: None,
) -> None:
    """Check a piece's hash in the memory of one call. Raises BadCheckpointError.

    `look` is called with each block of its bytes, of whole elements.
    """
    digest = hashlib.sha256()
    most = max(8, tiling().read_bytes // 8 * 8)
    block = memoryview(bytearray(min(most, piece.bytes)))
    with reading(path):
        for start in range(0, piece.bytes, most):
            part = block[: piece.bytes - start]
            _read_into(part, descriptor, piece.start + start, path, disk)
            digest.update(part)
            look(part)
    _check_digest(digest.hexdigest(), name, piece, path)


def newest_state(directory: Path) -> dict[str, Any] | None:
    """Return the JSON state of the newest checkpoint of a folder; None where there is none."""
    if not directory.is_dir() or latest_step(directory) is None:
        return None
    path = candidates(directory, None)[0]
    return dict(parse_manifest(path, read_manifest_text(path, Disk())).state)


def match_tensors(
    manifest: Manifest,
    tensors: Mapping[str, Tensor | UnpaddedDTensor],
    where: Path,
    converted: Collection[str] = (),
) -> None:
    """Raise UserError, naming the tensor, unless the checkpoint has each with its dtype and shape.

    Those in `converted` may have another dtype.
    """
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
        if entry.dtype != DTYPE_NAMES.get(tensor.dtype) and name not in converted:
            raise UserError(
                f"{where}: tensor '{name}' is {entry.dtype}, this run keeps it as "
                f"{str(tensor.dtype).removeprefix('torch.')}; use the precision that wrote it"
            )


@dataclass(eq=False)
class StagedTensor:
    """A verified rectangle of a live tensor, on the host, that waits for the other ranks to verify theirs."""

    chunk: LocalShard
    data: Tensor


@dataclass(frozen=True)
class Fetch:
    """A piece that this rank reads, and its overlap with each staged rectangle that needs it."""

    name: str
    piece: StoredPiece
    dtype: torch.dtype
    overlaps: list[tuple[StagedTensor, Rectangle]]

    def run(self, descriptor: int, path: Path, disk: Disk, digest: Digest) -> None:
        content = bytearray(self.piece.bytes)
        _read_into(memoryview(content), descriptor, self.piece.start, path, disk)
        _check_digest(digest(content), self.name, self.piece, path)
        for staged, shared in self.overlaps:
            source = torch.frombuffer(content, dtype=torch.uint8).view(self.dtype).view(self.piece.sizes)
            part = narrow(source, shared, self.piece.offsets)
            narrow(staged.data, shared, staged.chunk.offset).copy_(part)


class Reading:
    """A load of `tensors` from the checkpoint in `path`: first `read`, and when all ranks have, `commit`.

    Host memory: the share that this rank reads, and one piece. `tensors` must match the manifest
    (`match_tensors`); `digest` is that of its pieces.
    """

    def __init__(
        self, path: Path, manifest: Manifest, tensors: Tensors, disk: Disk, digest: Digest = sha256
    ) -> None:
        self.path, self.manifest, self.tensors, self.disk = path, manifest, tensors, disk
        self._digest = digest
        self._readers = _readers(tensors)
        self._staged: dict[str, list[StagedTensor]] = {}

    def read(self) -> None:
        """Read and verify this rank's share; no live tensor is written. Raises BadCheckpointError.

        Files are opened one by one, and the pieces of each are read once and in order.
        """
        for file, (size, listed) in sorted(self.plan().items()):
            retried(partial(self._read_pieces, self.path / file, size, listed))

    def plan(self) -> dict[str, tuple[int, list[Fetch]]]:
        """Return bytes and pieces of each file that this rank reads from. Raises BadCheckpointError."""
        for name, (replicas, reader) in self._readers.items():
            if reader == replicas.index:
                tensor = self.tensors[name]
                self._staged[name] = [
                    StagedTensor(chunk, torch.empty(chunk.local_shape, dtype=tensor.dtype))
                    for chunk in local_chunks(name, tensor)
                ]
        numbers = set[int]()
        for name, staged in self._staged.items():
            numbers |= self.manifest.parts_of(name, [each.chunk.rectangle for each in staged])
        fetches: dict[str, list[Fetch]] = defaultdict(list)
        sizes: dict[str, int] = {}
        for number in sorted(numbers):
            part = read_part(self.path, self.manifest, number, self.disk)
            folder = self.manifest.folder_of(number)
            sizes |= {os.path.normpath(f"{folder}/{file}"): size for file, size in part.files.items()}
            for fetch in self._fetches(part):
                fetches[os.path.normpath(f"{folder}/{fetch.piece.file}")].append(fetch)
        self._check_cover(fetch for listed in fetches.values() for fetch in listed)
        return {file: (sizes[file], listed) for file, listed in fetches.items()}

    def _read_pieces(self, path: Path, size: int, listed: list[Fetch]) -> None:
        with opened(path, size, self.disk) as descriptor:
            for fetch in sorted(listed, key=lambda fetch: fetch.piece.start):
                fetch.run(descriptor, path, self.disk, self._digest)

    def take(self, name: str) -> Tensor:
        """Return a tensor that is whole on this rank, of those that were read, in place of a `commit` of it.

        It is not copied, so `tensors` may have it on the meta device.
        """
        (staged,) = self._staged.pop(name)
        return staged.data

    def commit(self, wire: TrafficCounter) -> None:
        """Write the staged rectangles into the live tensors, and send them to this rank's replicas."""
        with torch.no_grad():
            for name, (replicas, reader) in self._readers.items():
                for staged in self._staged.pop(name, []):
                    staged.chunk.local.copy_(staged.data)
                if replicas.count > 1:
                    tensor = self.tensors[name]
                    local = tensor.padded if isinstance(tensor, UnpaddedDTensor) else tensor
                    assert isinstance(local, DTensor)
                    replicas.broadcast(local.to_local(), reader, wire)

    def _fetches(self, part: ManifestPart) -> Iterator[Fetch]:
        """Yield the pieces of a part that overlap with staged rectangles."""
        for name in part.tensors.keys() & self._staged.keys():
            for piece in part.tensors[name]:
                overlaps = [
                    (staged, shared)
                    for staged in self._staged[name]
                    if (shared := common(piece.rectangle, staged.chunk.rectangle)) is not None
                ]
                if overlaps:
                    yield Fetch(name, piece, DTYPES[self.manifest.tensors[name].dtype], overlaps)

    def _check_cover(self, fetches: Iterable[Fetch]) -> None:
        """Raise BadCheckpointError unless pieces fill each staged rectangle once."""
        covered: dict[StagedTensor, list[Rectangle]] = defaultdict(list)
        for fetch in fetches:
            for staged, shared in fetch.overlaps:
                covered[staged].append(shared)
        for name, listed in self._staged.items():
            for staged in listed:
                rows = f"tensor {name} from {list(staged.chunk.offset)} on"
                with reading(self.path / MANIFEST):
                    check_cover(rows, staged.chunk.local_shape, covered[staged])


def stored_parts(
    path: Path, manifest: Manifest, wanted: Mapping[str, Sequence[Rectangle]], disk: Disk
) -> Iterator[tuple[str, Rectangle, Tensor]]:
    """Yield the verified pieces that overlap wanted rectangles of tensors, as (name, rectangle, value).

    They come file by file, and one of them is in memory. Raises BadCheckpointError.
    """
    found: dict[tuple[str, int], list[tuple[str, StoredPiece]]] = defaultdict(list)
    for name, place, piece in overlapping(path, manifest, wanted, disk):
        found[place].append((name, piece))
    for (file, size), pieces in sorted(found.items()):
        for name, piece in sorted(pieces, key=lambda each: each[1].start):
            content = retried(partial(_piece_content, path / file, size, name, piece, disk))
            dtype = DTYPES[manifest.tensors[name].dtype]
            value = torch.frombuffer(content, dtype=torch.uint8).view(dtype).view(piece.sizes)
            yield name, piece.rectangle, value


def overlapping(
    path: Path, manifest: Manifest, wanted: Mapping[str, Sequence[Rectangle]], disk: Disk
) -> Iterator[tuple[str, tuple[str, int], StoredPiece]]:
    """Yield the pieces that overlap wanted rectangles of tensors, as (name, (file, its size), piece).

    Raises BadCheckpointError.
    """
    numbers = {number for name, listed in wanted.items() for number in manifest.parts_of(name, listed)}
    for number in sorted(numbers):
        part, folder = read_part(path, manifest, number, disk), manifest.folder_of(number)
        for name in wanted.keys() & part.tensors.keys():
            for piece in part.tensors[name]:
                if any(common(piece.rectangle, rectangle) for rectangle in wanted[name]):
                    file = os.path.normpath(f"{folder}/{piece.file}")
                    yield name, (file, part.files[piece.file]), piece


def _piece_content(path: Path, size: int, name: str, piece: StoredPiece, disk: Disk) -> bytearray:
    """Return the verified bytes of a piece in a file of `size` bytes. Raises BadCheckpointError."""
    content = bytearray(piece.bytes)
    with opened(path, size, disk) as descriptor:
        _read_into(memoryview(content), descriptor, piece.start, path, disk)
    _check_digest(sha256(content), name, piece, path)
    return content


def _readers(tensors: Mapping[str, Tensor | UnpaddedDTensor]) -> dict[str, tuple[Replicas, int]]:
    """Return (replicas, the one of them that reads it) of each tensor that this rank holds, by name."""
    held = [
        (name, math.prod(tensors[name].shape) * tensors[name].dtype.itemsize, replicas)
        for name in sorted(tensors)
        if (replicas := Replicas.of(tensors[name])) is not None
    ]
    return {name: (replicas, reader) for name, replicas, reader in sorted(assign(held))}


def _read_file(path: Path, size: int, most: int, disk: Disk) -> bytes:
    """Return all of a file of the manifest, of `size` bytes, at most `most`. Raises BadCheckpointError."""
    with opened(path, size, disk) as descriptor:
        if size > most:
            raise BadCheckpointError(f"{path} has {size} bytes, too many for a manifest")
        content = bytearray(size)
        _read_into(memoryview(content), descriptor, 0, path, disk)
        return bytes(content)


def _read_into(target: memoryview, descriptor: int, start: int, path: Path, disk: Disk) -> None:
    """Fill `target` with the bytes of a file from `start` on. Raises BadCheckpointError where it ends."""
    done, most = 0, tiling().read_bytes
    while done < len(target):
        count = disk.read(descriptor, target[done : done + most], start + done)
        if count == 0:
            raise BadCheckpointError(f"{path} ends at byte {start + done}, before its content does")
        done += count


def _check_digest(digest: str, name: str, piece: StoredPiece, path: Path) -> None:
    if digest != piece.sha256:
        raise BadCheckpointError(
            f"{path} is damaged: the {piece.bytes} bytes of tensor '{name}' at byte {piece.start} "
            "do not have the SHA-256 of the manifest"
        )
