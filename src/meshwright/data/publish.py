"""Files that appear whole or not at all, one builder at a time, and their hashes."""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

from meshwright import atomic
from meshwright.spec.errors import UserError

CHUNK = 3 << 20
"""Bytes that are read at once: a multiple of a token's 2 or 4 and of a document's record of 24."""


@contextmanager
def publishing(target: Path, key: str) -> Iterator[Path]:
    """Yield a temporary folder that becomes `target` when the body ends well (`atomic.folder`).

    `key` is the setting that names the folder, for messages. Raises `UserError` when the disk refuses, or
    when `target` exists and is not an empty folder.
    """
    with _written(target, key), atomic.folder(target) as temporary:
        yield temporary


def build_once(target: Path, key: str, build: Callable[[Path], None]) -> None:
    """Make the folder `target` with `build(temporary folder)` unless it exists.

    Of many processes that ask at once, on one host or on a shared file system with locks, one builds and the
    others wait for it; leftovers of a killed builder are removed.
    """
    if target.is_dir():
        return
    with locked(target.with_name(f".{target.name}.lock"), key):
        if target.is_dir():
            return
        for path in atomic.abandoned(target):
            shutil.rmtree(path, ignore_errors=True)
        with publishing(target, key) as temporary:
            build(temporary)


@contextmanager
def locked(path: Path, key: str) -> Iterator[None]:
    """Hold an exclusive lock on `path`; the kernel releases it when the process ends, however it ends."""
    with _written(path.parent, key, "locked and written"):
        path.parent.mkdir(parents=True, exist_ok=True)
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        fcntl.flock(handle, fcntl.LOCK_EX)
    try:
        yield
    finally:
        os.close(handle)


def write_atomically(path: Path, content: str | bytes) -> None:
    """Make `path`, in the cache, a file of this content, never there in part. Raises `UserError`."""
    with _written(path, "data.cache"):
        path.parent.mkdir(parents=True, exist_ok=True)
        atomic.write(path, content)


@contextmanager
def _written(path: Path, key: str, verb: str = "written") -> Iterator[None]:
    """Raise `UserError` where the file system refuses to write `path`, which the setting `key` names."""
    try:
        yield
    except OSError as error:
        raise UserError(
            f"{key}: {path} cannot be {verb} ({error.strerror or error}); make room there, or give another "
            "folder"
        ) from error


class Digest(Protocol):
    """A hash that takes bytes in sequence."""

    def update(self, data: bytes, /) -> None:
        """Take the next bytes."""
        ...


def hashed_chunks(path: Path, digest: Digest) -> Iterator[bytes]:
    """Yield the content of a file in chunks of CHUNK bytes, the last one shorter, and update `digest`."""
    with path.open("rb") as file:
        while chunk := file.read(CHUNK):
            digest.update(chunk)
            yield chunk


def sha256_file(path: Path) -> str:
    """Return the SHA-256 of a file in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextmanager
def readable(name: str, remedy: str) -> Iterator[None]:
    """Raise `UserError` where the file system refuses to read the file that messages call `name`."""
    try:
        yield
    except OSError as error:
        raise UserError(f"{name} cannot be read ({error.strerror or error}); {remedy}") from error
