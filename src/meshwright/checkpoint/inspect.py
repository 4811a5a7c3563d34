"""Inspection of checkpoints without a model, for `meshwright checkpoint ls` and `checkpoint verify`."""

from __future__ import annotations

import os
import re
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from meshwright.checkpoint.directory import candidates, published, read_latest
from meshwright.checkpoint.disk import MANIFEST, Disk
from meshwright.checkpoint.errors import BadCheckpointError, CheckpointError, reading, retried
from meshwright.checkpoint.frozen import parse_frozen
from meshwright.checkpoint.manifest import DTYPES, Manifest, ManifestPart, StoredPiece
from meshwright.checkpoint.reader import (
    opened,
    parse_manifest,
    read_manifest_text,
    read_part,
    verify_piece,
)
from meshwright.checkpoint.rectangles import check_cover
from meshwright.checkpoint.retention import is_permanent
from meshwright.spec.sharded_tensor import Rectangle

HOLES_FROM = 1 << 30
"""Size in bytes from which a file is looked at for holes; smaller ones are read in a second."""
_TRAINED = re.compile(r"([a-z]+\.[0-9]+/)?(model|optim|ema)/")
"""Names of tensors that a run refuses to load where they are not finite: `train/guard/nonfinite.py`."""


@dataclass(frozen=True)
class CheckpointInfo:
    """One published checkpoint. `problem` is a sentence about its manifest or a damaged file."""

    step: int
    bytes: int = 0
    tensors: int = 0
    ranks: int = 0
    saved_at: str = ""
    layout: Any = None
    latest: bool = False
    permanent: bool = False
    """True where `checkpoint.keep_every` of the run that saved it keeps it for ever."""
    problem: str | None = None


@dataclass(frozen=True)
class VerifyReport:
    """Result of `verify_checkpoint`; without `problems`, every byte is as it was written, and of use."""

    step: int | None  # None where the manifest itself is damaged
    path: Path
    tensors: int
    pieces: int
    bytes: int
    problems: tuple[str, ...]


def list_checkpoints(directory: Path) -> list[CheckpointInfo]:
    """Return every published checkpoint in `directory` by step; damaged ones too, with their problem.

    Hashes of pieces are not checked; `verify_checkpoint` does that.
    """
    latest, disk = read_latest(directory), Disk()
    infos = []
    for step, path in published(directory).items():
        info = CheckpointInfo(step, latest=path == latest)
        try:
            manifest = parse_manifest(path, read_manifest_text(path, disk))
            for number in range(manifest.part_count):
                folder = path / manifest.folder_of(number)
                for file, size in read_part(path, manifest, number, disk).files.items():
                    with opened(folder / file, size, disk):
                        pass
            info = replace(
                info,
                bytes=manifest.bytes,
                tensors=len(manifest.tensors),
                ranks=manifest.ranks,
                saved_at=manifest.saved_at,
                layout=manifest.state.get("layout"),
                permanent=is_permanent(manifest.step, _keep_every(manifest.state)),
            )
        except CheckpointError as error:
            info = replace(info, problem=str(error))
        infos.append(info)
    return infos


def _keep_every(state: dict[str, Any]) -> int:
    """Return `checkpoint.keep_every` of the spec in a state, which any program may have written."""
    found: Any = state
    for key in ("spec", "checkpoint", "keep_every"):
        found = found.get(key) if isinstance(found, dict) else None
    return found if isinstance(found, int) else 0


def verify_checkpoint(
    directory: Path,
    step: int | None = None,
    check: Callable[[dict[str, Any], Path], None] = lambda _state, _directory: None,
) -> VerifyReport:
    """Read every byte of a checkpoint (None: the latest) and check every hash, with little memory.

    What a load refuses is damage, too: numbers of the model, its average or the optimiser that are not
    finite, and a state for which `check`, given it and the directory, raises a BadCheckpointError.

    Raises CheckpointError where there is no such checkpoint, and UnreadableError where a disk does not
    answer; damage is reported, not raised.
    """
    path, disk = candidates(directory, step)[0], Disk()
    problems: list[str] = []
    try:
        manifest = parse_manifest(path, read_manifest_text(path, disk))
    except BadCheckpointError as error:
        return VerifyReport(None, path, 0, 0, 0, (str(error),))
    with _collected(problems):
        check(manifest.state, directory)
    if manifest.frozen is not None:
        with _collected(problems):
            parse_frozen(directory / manifest.frozen, read_manifest_text(directory / manifest.frozen, disk))
    places: dict[str, list[Rectangle]] = {name: [] for name in manifest.tensors}
    for number in range(manifest.part_count):
        for name, pieces in verify_part(path, manifest, number, disk, problems).items():
            places[name] += [piece.rectangle for piece in pieces]
    if not problems:
        for name, rectangles in places.items():
            with _collected(problems), reading(path / MANIFEST):
                check_cover(f"tensor {name}", manifest.tensors[name].shape, rectangles)
    count = sum(map(len, places.values()))
    return VerifyReport(manifest.step, path, len(manifest.tensors), count, manifest.bytes, tuple(problems))


def verify_part(
    path: Path, manifest: Manifest, number: int, disk: Disk, problems: list[str]
) -> dict[str, list[StoredPiece]]:
    """Return the pieces of a part by tensor, and append a sentence about each damaged one, or file, to
    `problems`; a part that is itself damaged has none."""
    with _collected(problems):
        part = read_part(path, manifest, number, disk)
        _verify_files(path / manifest.folder_of(number), manifest, part, disk, problems)
        return part.tensors
    return {}


def _verify_files(
    path: Path, manifest: Manifest, part: ManifestPart, disk: Disk, problems: list[str]
) -> None:
    by_file: dict[str, list[tuple[str, StoredPiece]]] = defaultdict(list)
    for name, pieces in part.tensors.items():
        for piece in pieces:
            by_file[piece.file].append((name, piece))
    for file, named in by_file.items():
        with _collected(problems), opened(path / file, part.files[file], disk) as descriptor:
            _check_holes(descriptor, path / file)
            for name, piece in sorted(named, key=lambda pair: pair[1].start):
                with _collected(problems):
                    dtype = DTYPES[manifest.tensors[name].dtype]
                    retried(partial(_verify_piece, descriptor, name, piece, dtype, path / file, disk))


def _verify_piece(
    descriptor: int, name: str, piece: StoredPiece, dtype: torch.dtype, path: Path, disk: Disk
) -> None:
    """Raise BadCheckpointError for a piece whose hash differs, or with numbers that no run loads."""
    finite = True

    def look(block: memoryview) -> None:
        nonlocal finite
        finite = finite and bool(torch.frombuffer(block, dtype=dtype).isfinite().all())

    if _TRAINED.match(name) and dtype.is_floating_point:
        verify_piece(descriptor, name, piece, path, disk, look)
    else:
        verify_piece(descriptor, name, piece, path, disk)
    if not finite:
        raise BadCheckpointError(
            f"tensor {name} in {path} has numbers that are not finite, which no run loads"
        )


def _check_holes(descriptor: int, path: Path) -> None:
    """Raise BadCheckpointError for a large file that is hardly on the disk at all.

    No save leaves holes, and no file system compresses weights to a thousandth. Whoever forges a tensor of a
    TiB would have it hashed for an hour.
    """
    status = os.fstat(descriptor)
    stored = status.st_blocks * 512
    if status.st_size > HOLES_FROM and stored < status.st_size // 1000:
        raise BadCheckpointError(
            f"{path} is full of holes: of its {status.st_size} bytes, {stored} are on the disk"
        )


@contextmanager
def _collected(problems: list[str]) -> Iterator[None]:
    """Append the sentence of a BadCheckpointError to `problems` and go on."""
    try:
        yield
    except BadCheckpointError as error:
        problems.append(str(error))
