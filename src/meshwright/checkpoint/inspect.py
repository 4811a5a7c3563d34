"""Look at checkpoints without a model: what `meshwright checkpoint ls` and `verify` show."""

from __future__ import annotations

import os
import stat
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from meshwright.checkpoint.directory import candidates, published, read_latest
from meshwright.checkpoint.disk import MANIFEST, Disk
from meshwright.checkpoint.errors import BadCheckpointError
from meshwright.checkpoint.manifest import Manifest, check_cover
from meshwright.checkpoint.pieces import Part, Piece
from meshwright.checkpoint.reader import check_size, read_manifest, read_part, verify_piece
from meshwright.spec.sharded_tensor import Rectangle


@dataclass(frozen=True)
class CheckpointInfo:
    """One published checkpoint. ``problem`` says what is wrong with its manifest or its files."""

    step: int
    path: Path
    latest: bool
    bytes: int = 0
    tensors: int = 0
    ranks: int = 0
    saved_at: str = ""
    state: dict[str, Any] = field(default_factory=dict)
    problem: str | None = None

    @property
    def layout(self) -> dict[str, Any]:
        """The layout that wrote it, as its state tells; empty where it does not."""
        spec = self.state.get("spec")
        found = spec.get("layout") if isinstance(spec, dict) else self.state.get("layout")
        return found if isinstance(found, dict) else {}


@dataclass(frozen=True)
class VerifyReport:
    """Result of `verify_checkpoint`: what was read, and problems; without any, every byte is as written."""

    step: int | None  # None where the manifest itself is damaged
    path: Path
    tensors: int
    pieces: int
    bytes: int
    problems: tuple[str, ...]

    @property
    def good(self) -> bool:
        return not self.problems


def list_checkpoints(directory: Path) -> list[CheckpointInfo]:
    """Every published checkpoint in ``directory``, by step; damaged ones too, with their problem.

    Hashes of pieces are not read: that is `verify_checkpoint`.
    """
    latest = read_latest(directory)
    rows = []
    for step, path in published(directory).items():
        try:
            manifest = read_manifest(path, Disk())
            for number in range(manifest.part_count):
                _check_files(path, read_part(path, manifest, number, Disk()))
        except BadCheckpointError as error:
            rows.append(CheckpointInfo(step, path, path == latest, problem=str(error)))
            continue
        rows.append(
            CheckpointInfo(
                step=step,
                path=path,
                latest=path == latest,
                bytes=manifest.bytes,
                tensors=len(manifest.tensors),
                ranks=manifest.ranks,
                saved_at=manifest.saved_at,
                state=manifest.state,
            )
        )
    return rows


def verify_checkpoint(directory: Path, step: int | None = None) -> VerifyReport:
    """Read every byte of a checkpoint (None: the latest) and check every hash, with little memory.

    Raises CheckpointError where there is no such checkpoint; damage is reported, not raised.
    """
    path, disk = candidates(directory, step)[0], Disk()
    try:
        manifest = read_manifest(path, disk)
    except BadCheckpointError as error:
        return VerifyReport(None, path, 0, 0, 0, (str(error),))
    problems: list[str] = []
    places: dict[str, list[Rectangle]] = {name: [] for name in manifest.tensors}
    for number in range(manifest.part_count):
        try:
            part = read_part(path, manifest, number, disk)
        except BadCheckpointError as error:
            problems.append(str(error))
            continue
        problems += _verify_part(path, part, disk)
        for name, pieces in part.tensors.items():
            places[name] += [(piece.offsets, piece.sizes) for piece in pieces]
    return VerifyReport(
        step=manifest.step,
        path=path,
        tensors=len(manifest.tensors),
        pieces=sum(map(len, places.values())),
        bytes=manifest.bytes,
        problems=tuple(problems or _holes(path, manifest, places)),
    )


def _check_files(path: Path, part: Part) -> None:
    """Raise BadCheckpointError unless each file of a part is a plain file of its size."""
    for name, expected in part.files.items():
        try:
            status = os.lstat(path / name)
        except OSError as error:
            raise BadCheckpointError(f"{path / name} cannot be read: {error.strerror}") from error
        if not stat.S_ISREG(status.st_mode):
            raise BadCheckpointError(f"{path / name} is not a plain file")
        check_size(path / name, status.st_size, expected)


def _verify_part(path: Path, part: Part, disk: Disk) -> list[str]:
    """Problems of the files of a part."""
    by_file: dict[str, list[tuple[str, Piece]]] = defaultdict(list)
    for name, pieces in part.tensors.items():
        for piece in pieces:
            by_file[piece.file].append((name, piece))
    problems: list[str] = []
    for file, listed in by_file.items():
        try:
            with disk.opened(path / file) as (descriptor, size):
                check_size(path / file, size, part.files[file])
                for name, piece in sorted(listed, key=lambda pair: pair[1].start):
                    try:
                        verify_piece(descriptor, name, piece, path / file, disk)
                    except BadCheckpointError as error:
                        problems.append(str(error))
        except BadCheckpointError as error:
            problems.append(str(error))
        except OSError as error:
            problems.append(f"{path / file} cannot be read: {error.strerror or error}")
    return problems


def _holes(path: Path, manifest: Manifest, places: dict[str, list[Rectangle]]) -> list[str]:
    """Tensors that their pieces do not cover exactly once."""
    problems = []
    for name, rectangles in places.items():
        try:
            check_cover(name, manifest.tensors[name].shape, rectangles)
        except ValueError as error:
            problems.append(f"{path / MANIFEST} cannot be trusted: {error}")
    return problems
