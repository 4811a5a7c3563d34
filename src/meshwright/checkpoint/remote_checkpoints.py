"""Checkpoints of a run below a URL: the names of a checkpoint directory, in a store that cannot rename.

URL/step-00000020/...           the files of the directory; manifest.json, sent last, makes it whole
URL/frozen-0123456789abcdef/... tensors that no step changes
URL/LATEST                      the name of the one to go on from, sent when that is whole
URL/writer.json                 the run that sends files here
"""

from __future__ import annotations

import json
import secrets
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from meshwright.checkpoint.directory import name_of_line, ordered, step_of
from meshwright.checkpoint.disk import FROZEN, LATEST, MANIFEST, parse_step_name
from meshwright.checkpoint.errors import BadCheckpointError, CheckpointError, UnreadableError, reading
from meshwright.checkpoint.manifest import Manifest
from meshwright.checkpoint.reader import MAX_ROOT_BYTES
from meshwright.checkpoint.retention import is_permanent
from meshwright.spec.errors import UserError
from meshwright.storage.remote_folder import RemoteFolder

KEY = "checkpoint.remote"
"""The setting that messages name."""
WRITER = "writer.json"
SENT = "REMOTE"
"""File of a checkpoint directory: lines of LATEST, one of which its run has last made the store's."""


class RemoteCheckpoints:
    """The checkpoints in a folder of a store. Methods raise `UserError` where it does not answer."""

    def __init__(self, folder: RemoteFolder) -> None:
        self.folder = folder

    def __str__(self) -> str:
        return self.folder.url

    def latest(self) -> str | None:
        """Return the name in LATEST, which may be of none; None without LATEST, or where it is damaged."""
        content = self.folder.read(LATEST)
        return None if content is None else name_of_line(content[:256].decode("ascii", "replace"))

    def history(self) -> list[str]:
        """Return the names of the checkpoints to try, best first: LATEST's, also if it is not whole."""
        return ordered(_whole(self.folder.sizes()), self.latest())

    def manifest(self, name: str) -> tuple[str, Manifest]:
        """Return the root of the manifest of a checkpoint, or of frozen tensors: its text, and what it says.

        Raises BadCheckpointError, which has the URL, where it is missing or damaged.
        """
        where = f"{self}/{name}/{MANIFEST}"
        content = self.folder.read(f"{name}/{MANIFEST}")
        if content is None:
            raise BadCheckpointError(f"{where} is missing, so that checkpoint is not whole")
        if len(content) > MAX_ROOT_BYTES:
            raise BadCheckpointError(f"{where} has {len(content)} bytes, too many for a manifest")
        try:
            text = content.decode()
            manifest = Manifest.parse(text)
        except (UserError, ValueError, RecursionError) as error:
            raise BadCheckpointError(f"{where} cannot be trusted: {error}") from error
        parsed, step = parse_step_name(name), manifest.step
        if parsed is not None and not parsed[0] == step == manifest.state.get("step", step):
            raise BadCheckpointError(f"{where} is of step {step}, another than its name or its state says")
        return text, manifest

    def retire(self, keep: int, keep_every: int) -> None:
        """Remove all but the newest `keep`, and those of steps that `keep_every` divides.

        What is no checkpoint yet, or any more, goes too, and frozen tensors that none refers to.
        """
        sizes = self.folder.sizes()
        whole, there = _whole(sizes), {name.partition("/")[0] for name in sizes if "/" in name}
        order = [name for name in ordered(whole, self.latest()) if name in whole]
        stays = {*order[:keep], *(name for name in order if is_permanent(step_of(name), keep_every))}
        for name in sorted(name for name in there - stays if parse_step_name(name) is not None):
            self.folder.remove(f"{name}/{MANIFEST}")
            self.folder.remove_below(name)
        frozen = {name for name in there if name.startswith(FROZEN)}
        if len(frozen) > 1:
            for name in sorted(frozen - self._used(stays)):
                self.folder.remove(f"{name}/{MANIFEST}")
                self.folder.remove_below(name)

    def _used(self, names: set[str]) -> set[str]:
        """The folders of frozen tensors that checkpoints refer to."""
        manifests = [self.manifest(name)[1] for name in names]
        return {manifest.frozen for manifest in manifests if manifest.frozen is not None}

    def claim(self, writer: dict[str, Any]) -> None:
        """Note who sends files from now on; whoever did before sends no more once it looks."""
        self.folder.write(WRITER, _line(writer))

    def check_writer(self, writer: dict[str, Any]) -> None:
        """Raise CheckpointError if another than `writer` has claimed the folder since."""
        content = self.folder.read(WRITER)
        if content is not None and content != _line(writer):
            other = content[:500].decode(errors="replace")
            raise CheckpointError(
                f"{KEY}: another run sends its checkpoints to {self} ({other}), so this one does not; give "
                f"one of the two another URL, or end it"
            )


def remote_checkpoints(
    url: str, wait: Callable[[float], object] = time.sleep, tries: int | None = None
) -> RemoteCheckpoints:
    """Return the checkpoints at a URL; `wait` and `tries` are those of `RemoteFolder`."""
    return RemoteCheckpoints(RemoteFolder(url, KEY, wait, tries))


@contextmanager
def answering() -> Iterator[None]:
    """Raise UnreadableError for a store that does not answer, which is no damage of what it holds."""
    try:
        yield
    except CheckpointError:
        raise
    except UserError as error:
        raise UnreadableError(str(error)) from error


def writer_of(directory: Path) -> dict[str, Any]:
    """Return what names this start of a run, of a checkpoint directory, as the writer of a store."""
    return {
        "folder": str(directory),
        "host": socket.gethostname(),
        "since": datetime.now(UTC).isoformat(timespec="seconds"),
        "token": secrets.token_hex(8),
    }


def sent_names(directory: Path) -> list[str]:
    """Return the names that the store's LATEST may have by what the run of a directory knows of it."""
    with reading(directory / SENT):
        try:
            lines = (directory / SENT).read_text("ascii", "replace").splitlines(keepends=True)
        except FileNotFoundError:
            return []
    return [name for line in lines if (name := name_of_line(line)) is not None]


def _line(writer: dict[str, Any]) -> bytes:
    return json.dumps(writer).encode()


def _whole(sizes: dict[str, int]) -> set[str]:
    """The names of checkpoints whose manifests are among these files."""
    found = {name.removesuffix(f"/{MANIFEST}") for name in sizes if name.endswith(f"/{MANIFEST}")}
    return {name for name in found if parse_step_name(name) is not None}
