"""Files that appear whole or not at all, one builder at a time, and their hashes."""

from __future__ import annotations

import fcntl
import glob
import hashlib
import os
import shutil
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from meshwright import atomic
from meshwright.spec.errors import UserError

CHUNK = 1 << 22


@contextmanager
def publishing(target: Path, key: str) -> Iterator[Path]:
    """Give a temporary folder beside `target`; when the body ends well, sync it and rename it to `target`.

    A crash at any moment leaves either no `target` or a whole one; what a killed process left beside it is
    removed by the next. `key` is what the user set, for messages.
    Raises `UserError` when the disk refuses, or when `target` exists and is not an empty folder.
    """
    temporary = target.parent / f".{target.name}.tmp-{uuid.uuid4().hex}"
    try:
        if target.exists() and not (target.is_dir() and not any(target.iterdir())):
            raise UserError(f"{key}: {target} exists already; remove it, or give another folder")
        target.parent.mkdir(parents=True, exist_ok=True)
        _remove_abandoned(target)
        temporary.mkdir()
        with _in_use(temporary):
            yield temporary
            _sync_tree(temporary)
            os.rename(temporary, target)
        _sync(target.parent)
    except OSError as error:
        reason = error.strerror or str(error)
        raise UserError(
            f"{key}: {target} cannot be written ({reason}); make room there, or give another folder"
        ) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def build_once(target: Path, key: str, build: Callable[[Path], None]) -> None:
    """Make the folder `target` with `build(temporary folder)` unless it is there.

    Of many processes that ask at once, on one host or on a shared file system with locks, one builds and the
    others wait for it; what a killed builder left behind is removed.
    """
    if target.is_dir():
        return
    with locked(target.parent / f".{target.name}.lock", key):
        if target.is_dir():
            return
        for stale in _temporaries(target):
            shutil.rmtree(stale, ignore_errors=True)
        with publishing(target, key) as temporary:
            build(temporary)


def _temporaries(target: Path) -> list[Path]:
    return list(target.parent.glob(f".{glob.escape(target.name)}.tmp-*"))


def _remove_abandoned(target: Path) -> None:
    """Remove the temporary folders of `target` that no living process builds in."""
    for path in _temporaries(target):
        with _in_use(path) as mine:
            if mine:
                shutil.rmtree(path, ignore_errors=True)


@contextmanager
def _in_use(folder: Path) -> Iterator[bool]:
    """Mark a folder as in use by this process, until it ends however it ends; False where that cannot be.

    It cannot where another process has marked it, and on file systems that lock no folders.
    """
    try:
        handle = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:  # another process has removed or published it meanwhile
        yield False
        return
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            mine = True
        except OSError:
            mine = False
        yield mine
    finally:
        os.close(handle)


@contextmanager
def locked(path: Path, key: str) -> Iterator[None]:
    """Hold an exclusive lock on `path`; the kernel releases it when the process ends, however it ends."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        fcntl.flock(handle, fcntl.LOCK_EX)
    except OSError as error:
        raise UserError(
            f"{key}: {path.parent} cannot be locked and written ({error.strerror}); give another folder"
        ) from error
    try:
        yield
    finally:
        os.close(handle)


def write_atomically(path: Path, content: bytes) -> None:
    """Make `path`, in the cache, a file of this content: at no moment is it there in part. Raises
    `UserError`."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        atomic.write(path, content)
    except OSError as error:
        raise UserError(
            f"data.cache: {path} cannot be written ({error.strerror}); make room there, "
            "or give another folder"
        ) from error


def sha256_file(path: Path, look: Callable[[bytes], None] | None = None) -> str:
    """SHA-256 of a file read in chunks; `look` sees each chunk (of a multiple of 4 KiB, but for the last)."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(CHUNK):
            digest.update(chunk)
            if look is not None:
                look(chunk)
    return digest.hexdigest()


def _sync_tree(folder: Path) -> None:
    for path in sorted(folder.rglob("*")):
        _sync(path)
    _sync(folder)


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
