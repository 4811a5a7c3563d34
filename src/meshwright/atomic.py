"""Files and folders that appear in one step: a crash at any moment leaves the old content or the new one."""

from __future__ import annotations

import errno
import fcntl
import glob
import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def write(path: Path, content: str | bytes) -> None:
    """Replace `path` by a file of this content: write a temporary file in its folder, sync it, rename it.

    A reader finds the old content or the new one, never a part. Text is written in UTF-8. Raises `OSError`,
    and leaves the old file.
    """
    temporary = _temporary(path)
    try:
        with temporary.open("wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def create(path: Path, content: str, mode: int = 0o666) -> None:
    """Make the new file `path`, with these permissions before the umask: it is there whole, or not at all.

    Of several processes that create the same file one succeeds. Raises `FileExistsError`, and `OSError`.
    """
    temporary = _temporary(path)
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    descriptor = os.open(temporary, flags, mode)
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as opened:
            opened.write(content)
            opened.flush()
            os.fsync(descriptor)
        os.link(temporary, path)
    finally:
        temporary.unlink()


@contextmanager
def file(target: Path) -> Iterator[Path]:
    """Yield a temporary name next to `target`; when the body ends well, sync that file and rename it.

    Raises `OSError`, and leaves what was at `target`.
    """
    temporary = _temporary(target)
    try:
        yield temporary
        _sync(temporary)
        os.replace(temporary, target)
        _sync(target.parent)
    finally:
        temporary.unlink(missing_ok=True)


@contextmanager
def folder(target: Path) -> Iterator[Path]:
    """Yield a temporary folder next to `target`; when the body ends well, sync it and rename it to `target`.

    Folders that killed processes left there are removed. Raises `OSError`, also when `target` exists and is
    not an empty folder.
    """
    if target.exists() and not (target.is_dir() and not any(target.iterdir())):
        raise FileExistsError(errno.EEXIST, "it exists and is not an empty folder")
    target.parent.mkdir(parents=True, exist_ok=True)
    for path in abandoned(target):
        with _in_use(path) as mine:
            if mine:
                shutil.rmtree(path, ignore_errors=True)
    temporary = _temporary(target)
    try:
        temporary.mkdir()
        with _in_use(temporary):
            yield temporary
            for path in sorted(temporary.rglob("*")):
                _sync(path)
            _sync(temporary)
            os.rename(temporary, target)
        _sync(target.parent)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def abandoned(target: Path) -> list[Path]:
    """Return the temporary folders of `target`, which are abandoned unless a process builds in them."""
    return list(target.parent.glob(f".{glob.escape(target.name)}.tmp-*"))


def _temporary(path: Path) -> Path:
    return path.with_name(f".{path.name}.tmp-{secrets.token_hex(6)}")


@contextmanager
def _in_use(path: Path) -> Iterator[bool]:
    """Mark a folder as in use by this process, until it ends however it ends; yield False where that fails.

    It fails where another process has marked it, and on file systems that cannot lock folders.
    """
    try:
        handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
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


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
