"""Every system call that changes a checkpoint directory, and the names of the files in it.

A writer changes the disk through `Disk` only: a test that fails or kills the i-th call, for every i, has then
covered every point at which a save can stop.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from meshwright.spec.tiling import tiling

MANIFEST = "manifest.json"
LATEST = "LATEST"
FROZEN = "frozen-"
"""Prefix of the directories of tensors that no step changes, which checkpoints refer to."""
TEMPORARY = ".tmp-"
"""Prefix of names that were never published, or that are about to be removed."""


def step_name(step: int, attempt: int = 0) -> str:
    """Directory of a published step; saved again, it gets `.1`, `.2`, and the old one stays until then."""
    return f"step-{step:08d}" + (f".{attempt}" if attempt else "")


def parse_step_name(name: str) -> tuple[int, int] | None:
    """Return (step, attempt) of a published directory's name, or None for any other name."""
    match = re.fullmatch(r"step-(\d{8,18})(?:\.(\d{1,9}))?", name)
    if match is None:
        return None
    step, attempt = int(match[1]), int(match[2] or 0)
    return (step, attempt) if step_name(step, attempt) == name else None


def rank_file(rank: int) -> str:
    """Name of the file that holds the pieces written by `rank`."""
    return f"rank-{rank:05d}.bin"


def part_file(first_rank: int) -> str:
    """Name of the part of the manifest that lists the files of `first_rank` and the ranks after it."""
    return f"part-{first_rank:05d}.json"


class Disk:
    """System calls that change the disk, and those that read pieces.

    Tests override them to fail, to kill, to lose data that was not synced, or to count.
    """

    def make_directory(self, path: Path) -> None:
        os.mkdir(path)

    def create(self, path: Path) -> int:
        """Open a new file for writing; raises OSError where a file or a link already has the name."""
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
        """Open a plain file for reading and yield (descriptor, size).

        A link is not followed, and a pipe or a device is not opened: either raises OSError.
        """
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode):
                raise OSError(f"{path} is not a plain file")
            yield descriptor, status.st_size
        finally:
            os.close(descriptor)

    def read(self, descriptor: int, target: memoryview, start: int) -> int:
        """Fill `target` from byte `start` on as far as one call does; return the number of bytes."""
        return os.preadv(descriptor, [target], start)

    def write_file(self, path: Path, blocks: Iterable[memoryview]) -> None:
        """Create `path`, write the blocks one after another and sync it."""
        descriptor, most = self.create(path), tiling().write_bytes
        try:
            for data in blocks:
                done = 0
                while done < len(data):
                    done += self.write(descriptor, data[done : done + most])
                del data  # before the next one is made
            self.sync(descriptor)
        finally:
            os.close(descriptor)

    def replace_file(self, path: Path, text: str, token: str) -> None:
        """Put `text` at `path` in one step: readers see the old content or the new, never a part."""
        temporary = path.with_name(f"{TEMPORARY}{path.name}-{token}")
        self.write_file(temporary, [memoryview(text.encode())])
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
