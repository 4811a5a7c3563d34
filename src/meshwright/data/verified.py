"""The record that the files of a folder were verified, so that not every process hashes them again.

It says of each file its SHA-256 and how it was then: size, time of its last change, inode. A file that is
still so is taken as verified. The device number is left out on purpose: network file systems have another on
each host, and one record serves all hosts. A record that is damaged, of another version or of another
manifest is no record.

    FOLDER/.meshwright/                 beside the tokens, or where the folder is read-only
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

from meshwright.data.publish import write_atomically

BESIDE = ".meshwright"
"""The folder beside the tokens."""

_RECORD = "verified.json"
_VERSION = 1
_TICK, _COARSE_TICK = 0.02, 1.02  # seconds between changes that have different times on a file system


class FileState(NamedTuple):
    """A file as it was, without its content."""

    size: int
    mtime_ns: int
    inode: int

    @staticmethod
    def of(found: os.stat_result) -> FileState:
        """The file state from a result of `stat`."""
        return FileState(found.st_size, found.st_mtime_ns, found.st_ino)


class Verified(NamedTuple):
    """A file that was verified."""

    state: FileState
    sha256: str


def cache_folder(cache: str | None) -> Path:
    """The folder of `data.cache`."""
    return Path(cache).expanduser() if cache else Path.home() / ".cache" / "meshwright"


def record_folders(folder: Path, cache: Path) -> list[Path]:
    """Where records and indices of `folder` may lie, the one to write to first."""
    beside = folder / BESIDE
    key = hashlib.sha256(os.fsencode(folder.resolve())).hexdigest()[:16]
    apart = cache / "verified" / key
    return [beside, apart] if os.access(folder, os.W_OK | os.X_OK) else [apart, beside]


def state_of(path: Path) -> FileState | None:
    """The state of a plain file; None for a link, a folder, and nothing at all."""
    try:
        found = os.lstat(path)
    except OSError:
        return None
    return FileState.of(found) if stat.S_ISREG(found.st_mode) else None


def wait_for_tick(states: Mapping[str, FileState]) -> None:
    """Sleep until a change of any of these files would give it another time than it has."""
    newest = max((state.mtime_ns for state in states.values()), default=0)
    tick = _TICK if newest % 10**9 else _COARSE_TICK
    time.sleep(max(0.0, min(tick, newest / 1e9 + tick - time.time())))


def write_record(folder: Path, digest: str, files: Mapping[str, Verified]) -> None:
    """Put the record of the manifest `digest` into `folder`. Raises `UserError`."""
    rows = {name: [*file.state, file.sha256] for name, file in sorted(files.items())}
    body = {"version": _VERSION, "manifest": digest, "files": rows}
    write_atomically(folder / _RECORD, json.dumps({**body, "sha256": _sha256(body)}).encode())


def drop_record(folder: Path) -> None:
    """Remove the record in `folder`, if there is one."""
    (folder / _RECORD).unlink(missing_ok=True)


def read_record(folder: Path, digest: str) -> dict[str, Verified] | None:
    """The record of the manifest `digest` in `folder`; None where there is none."""
    try:
        body = json.loads((folder / _RECORD).read_bytes())
        found = body.pop("sha256")
        if found != _sha256(body) or (body["version"], body["manifest"]) != (_VERSION, digest):
            return None
        return {
            name: Verified(FileState(int(size), int(mtime), int(inode)), str(sha256))
            for name, (size, mtime, inode, sha256) in body["files"].items()
        }
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None


def _sha256(body: object) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
