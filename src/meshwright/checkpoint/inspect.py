"""Look at checkpoints without a model: what `meshwright checkpoint ls` and `verify` show."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from meshwright.checkpoint.directory import candidates, published, read_latest
from meshwright.checkpoint.disk import open_regular
from meshwright.checkpoint.errors import BadCheckpointError
from meshwright.checkpoint.manifest import Piece
from meshwright.checkpoint.reader import read_manifest, verify_piece


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
    """What `verify_checkpoint` read, and what is wrong; no problem: every byte is as written."""

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
            manifest = read_manifest(path)
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
    path = candidates(directory, step)[0]
    try:
        manifest = read_manifest(path)
    except BadCheckpointError as error:
        return VerifyReport(None, path, 0, 0, 0, (str(error),))
    by_file: dict[str, list[tuple[str, Piece]]] = {name: [] for name in manifest.files}
    for name, entry in manifest.tensors.items():
        for piece in entry.pieces:
            by_file[piece.file].append((name, piece))
    problems: list[str] = []
    for file, pieces in by_file.items():
        problems += _verify_file(path / file, pieces)
    return VerifyReport(
        step=manifest.step,
        path=path,
        tensors=len(manifest.tensors),
        pieces=sum(len(pieces) for pieces in by_file.values()),
        bytes=manifest.bytes,
        problems=tuple(problems),
    )


def _verify_file(path: Path, pieces: list[tuple[str, Piece]]) -> list[str]:
    problems: list[str] = []
    try:
        with open_regular(path) as descriptor:
            for name, piece in sorted(pieces, key=lambda pair: pair[1].start):
                try:
                    verify_piece(descriptor, name, piece, path)
                except BadCheckpointError as error:
                    problems.append(str(error))
    except OSError as error:
        problems.append(f"{path} cannot be read: {error.strerror or error}")
    return problems
