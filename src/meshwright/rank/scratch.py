"""Temporary folders of a launcher; if it is killed, its zygote removes them, or else the next launcher."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

PREFIX = "meshwright-scratch-"


@contextmanager
def scratch_folder() -> Iterator[Path]:
    """Make a folder that only this user may read, and remove it at the end.

    A lock on it lasts as long as this process: folders without one, which killed processes left, are removed.
    """
    remove_left()
    with ExitStack() as stack:
        made = _made(stack)
        while made is None:
            made = _made(stack)
        yield made


def remove_left() -> None:
    """Remove the temporary folders of launchers that were killed."""
    for left in _folders():
        with suppress(OSError), _locked(left):  # it is in use, gone by now, or another user's
            shutil.rmtree(left, ignore_errors=True)


def remove_folders_of(launcher: int, seconds: float = 10) -> None:
    """Remove the temporary folders of a launcher that was killed, by its pid, and those of others.

    The locks of a process with threads are held until its last thread is gone, which its children may be
    told a little earlier; they are waited for at most so many seconds.
    """
    deadline = time.monotonic() + seconds
    remove_left()
    while _folders(f"{launcher}-") and time.monotonic() < deadline:
        time.sleep(0.01)
        remove_left()


def _folders(owner: str = "") -> list[Path]:
    return list(Path(tempfile.gettempdir()).glob(f"{PREFIX}{owner}*"))


def _made(stack: ExitStack) -> Path | None:
    """Make a folder and lock it until the stack ends; None if another launcher took it for one left."""
    folder = Path(tempfile.mkdtemp(prefix=f"{PREFIX}{os.getpid()}-"))
    try:
        stack.enter_context(_locked(folder))
    except (BlockingIOError, FileNotFoundError):
        return None
    stack.callback(shutil.rmtree, folder, ignore_errors=True)
    return folder if folder.is_dir() else None


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Lock a folder. Raises OSError where another process has locked it, or it is not a folder."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(descriptor)
