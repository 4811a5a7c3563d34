"""The record that the files of a folder were verified, so that not every process hashes them again.

It lists the SHA-256 of each file, and its size, time of last change and inode when it was verified. A file
with the same three is taken as verified. The device number is left out on purpose: network file systems have
another on each host, and one record serves all hosts. A record that is damaged, of another version or of
another manifest does not count.

    FOLDER/.meshwright/                 in the folder of tokens, unless that is read-only
    CACHE/verified/<hash of FOLDER>/    in the cache: the record, its lock, and indices
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
import time
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from meshwright.data.manifest import Manifest
from meshwright.data.publish import write_atomically
from meshwright.spec.files import user_path

BESIDE = ".meshwright"
"""The folder of the record in a folder of tokens."""
RECORD = "verified.json"

_VERSION = 1
_TICK, _COARSE_TICK = 0.02, 1.02  # seconds between changes that have different times on a file system


class FileState(NamedTuple):
    """Facts that change when a file changes."""

    size: int
    mtime_ns: int
    inode: int

    @staticmethod
    def of(status: os.stat_result) -> FileState:
        """Return the file state from a result of `stat`."""
        return FileState(status.st_size, status.st_mtime_ns, status.st_ino)


def cache_folder(cache: str | None) -> Path:
    """Return the folder of `data.cache`."""
    return user_path(cache or "~/.cache/meshwright", "data.cache")


def record_folders(folder: Path, cache: Path) -> list[Path]:
    """Return the folders that may hold records and indices of `folder`, the one to write to first."""
    inside = folder / BESIDE
    cached = cache / "verified" / hashlib.sha256(os.fsencode(folder.resolve())).hexdigest()[:16]
    return [inside, cached] if os.access(folder, os.W_OK | os.X_OK) else [cached, inside]


def state_of(path: Path) -> FileState | None:
    """Return the state of a plain file; None for a link, a folder, or nothing at all."""
    try:
        status = os.lstat(path)
    except OSError:
        return None
    return FileState.of(status) if stat.S_ISREG(status.st_mode) else None


def wait_for_tick(states: Mapping[str, FileState]) -> None:
    """Sleep until a change of any of these files would give it another time than it has."""
    newest = max((state.mtime_ns for state in states.values()), default=0)
    tick = _TICK if newest % 10**9 else _COARSE_TICK
    time.sleep(max(0.0, min(tick, newest / 1e9 + tick - time.time())))


def write_record(folder: Path, manifest: Manifest, states: Mapping[str, FileState]) -> None:
    """Record in `folder` that the files of a manifest were verified in these states. Raises `UserError`."""
    write_atomically(folder / RECORD, _render(manifest, states))


def read_record(folder: Path, manifest: Manifest) -> dict[str, FileState] | None:
    """Return the states in which the files of a manifest were verified; None without a valid record."""
    try:
        content = (folder / RECORD).read_text(encoding="utf-8")
        rows = json.loads(content)["files"]
        states = {name: FileState(*row[:3]) for name, row in rows.items()}
        return states if content == _render(manifest, states) else None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None


def _render(manifest: Manifest, states: Mapping[str, FileState]) -> str:
    files = {name: [*states[name], entry.sha256] for name, entry in sorted(manifest.files.items())}
    body = {"version": _VERSION, "manifest": manifest.digest, "files": files}
    digest = hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
    return json.dumps({**body, "sha256": digest})
