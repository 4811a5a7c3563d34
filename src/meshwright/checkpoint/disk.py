"""Every system call that changes a checkpoint directory, and the names that stand in it.

A writer does nothing to the disk but through ``Disk``: a test that fails or kills the i-th call, for every i,
has then seen every point at which a save can stop.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

MANIFEST = "manifest.json"
LATEST = "LATEST"
TEMPORARY = ".tmp-"  # whatever starts so was never published, or is on its way out
WRITE_BYTES = 16 << 20  # one write call; large enough for the bandwidth of parallel file systems

_STEP = re.compile(r"step-(\d{8,18})(?:\.(\d{1,9}))?")
_RANK_FILE = re.compile(r"rank-\d{5,9}\.bin")
_PART_FILE = re.compile(r"part-\d{5,9}\.json")


def step_name(step: int, attempt: int = 0) -> str:
    """Directory of a published step. A step saved again gets ``.1``, ``.2``: the old one stays until then."""
    return f"step-{step:08d}" + (f".{attempt}" if attempt else "")


def parse_step_name(name: str) -> tuple[int, int] | None:
    """Return (step, attempt) of a published directory's name, or None for any other name."""
    match = _STEP.fullmatch(name)
    if match is None:
        return None
    step, attempt = int(match[1]), int(match[2] or 0)
    return (step, attempt) if step_name(step, attempt) == name else None


def rank_file(rank: int) -> str:
    """Name of the file that holds the pieces written by ``rank``."""
    return f"rank-{rank:05d}.bin"


def is_rank_file(name: str) -> bool:
    """True if ``name`` is a piece file's name: no separator or dots, so it stays within the directory."""
    return _RANK_FILE.fullmatch(name) is not None


def part_file(first_rank: int) -> str:
    """Name of the part of the manifest that lists the files of ``first_rank`` and the ranks after it."""
    return f"part-{first_rank:05d}.json"


def is_part_file(name: str) -> bool:
    """Return True for the name of a part of a manifest, which never leaves the directory."""
    return _PART_FILE.fullmatch(name) is not None


class Disk:
    """The calls that change the disk, and those that read pieces.

    Tests override them to fail, to kill, to lose what is not synced, or to count.
    """

    def make_directory(self, path: Path) -> None:
        os.mkdir(path)

    def create(self, path: Path) -> int:
        """Open a new file for writing; an existing one, or a link, is an error."""
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)

    def write(self, descriptor: int, data: memoryview) -> int:
        return os.write(descriptor, data)

    def sync(self, descriptor: int) -> None:
        os.fsync(descriptor)

    def sync_directory(self, path: Path) -> None:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def rename(self, source: Path, target: Path) -> None:
        os.rename(source, target)

    def unlink(self, path: Path) -> None:
        os.unlink(path)

    def remove_directory(self, path: Path) -> None:
        os.rmdir(path)

    @contextmanager
    def opened(self, path: Path) -> Iterator[tuple[int, int]]:
        """Open a plain file for reading and yield (descriptor, size). Raises OSError as `open_regular`."""
        with open_regular(path) as descriptor:
            yield descriptor, os.fstat(descriptor).st_size

    def read(self, descriptor: int, target: memoryview, start: int) -> int:
        """Fill ``target`` from byte ``start`` on as far as one call does; return the number of bytes."""
        return os.preadv(descriptor, [target], start)

    def write_file(self, path: Path, *blocks: memoryview) -> None:
        """Create ``path``, write the blocks one after another and sync it."""
        descriptor = self.create(path)
        try:
            for data in blocks:
                done = 0
                while done < len(data):
                    done += self.write(descriptor, data[done : done + WRITE_BYTES])
            self.sync(descriptor)
        finally:
            os.close(descriptor)

    def replace_file(self, path: Path, text: str, token: str) -> None:
        """Put ``text`` at ``path`` in one step: readers see the old content or the new, never a part."""
        temporary = path.with_name(f"{TEMPORARY}{path.name}-{token}")
        self.write_file(temporary, memoryview(text.encode()))
        self.rename(temporary, path)
        self.sync_directory(path.parent)

    def remove_tree(self, path: Path) -> None:
        """Remove a file or a directory with its files; links are removed, never followed."""
        if not path.is_symlink() and path.is_dir():
            for entry in sorted(os.listdir(path)):
                self.remove_tree(path / entry)
            self.remove_directory(path)
        else:
            self.unlink(path)


@contextmanager
def open_regular(path: Path) -> Iterator[int]:
    """Open a plain file for reading and yield its descriptor.

    A link is not followed, and a pipe or a device is not opened: either raises OSError.
    """
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    descriptor = os.open(path, flags)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(f"{path} is not a plain file")
        yield descriptor
    finally:
        os.close(descriptor)


def free_bytes(path: Path) -> int:
    """Bytes that this user may still write on the file system of ``path``."""
    status = os.statvfs(path)
    return status.f_bavail * status.f_frsize


def in_words(bytes_: int) -> str:
    """A size for people: ``1.5 GiB``."""
    size = float(bytes_)
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "bytes" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"
