"""Memory and files that the ranks of a host share with their supervisor, and that outlive each of them.

The memory belongs to no file, and the files to no folder: when the last process that has them is gone, so are
they, however it ended.

Snapshots of ranks that compute on processors are in files: the kernel may write them out and take their
memory for the ranks, while in memory each of two slots would take as much as the state for good. GPUs copy to
pinned memory, which files cannot be.
"""

from __future__ import annotations

import mmap
import os
import shutil
import sys
import tempfile
from contextlib import ExitStack
from itertools import chain
from pathlib import Path

from meshwright.comm.heartbeat import BYTES
from meshwright.profile.machine import free_memory, has_gpu_driver
from meshwright.spec import UserError

IN_MEMORY = "tmpfs", "ramfs"
"""File systems whose files take memory."""


class SharedMemory(ExitStack):
    """Descriptors of the heartbeats of `ranks` local ranks, and of memory or files for a snapshot of each.

    `heartbeats` holds `BYTES` for each rank; `snapshots` are two slots for each rank, which fills them,
    and where there are `peers`, that is other hosts, two more for what a rank of one of them keeps.
    """

    def __init__(self, ranks: int, peers: bool = False) -> None:
        super().__init__()
        with ExitStack() as made:
            self.heartbeats = self._made(made, new_memory("heartbeats"))
            os.ftruncate(self.heartbeats, ranks * BYTES)
            mapped = made.enter_context(mmap.mmap(self.heartbeats, ranks * BYTES))
            self.beats = made.enter_context(memoryview(mapped))
            on_disk = not has_gpu_driver() and disk_has_room()
            try:
                self.snapshots = [
                    [
                        self._made(made, new_file() if on_disk else new_memory(f"snapshot of rank {rank}"))
                        for _ in range(4 if peers else 2)
                    ]
                    for rank in range(ranks)
                ]
            except OSError as error:
                raise UserError(
                    f"{ranks} ranks on one host: the system has no memory to share for each "
                    f"({error.strerror}); give fewer ranks, or more hosts, or raise the limit of open files "
                    f"(`ulimit -n`)"
                ) from error
            self.push(made.pop_all().__exit__)

    @property
    def descriptors(self) -> list[int]:
        """All descriptors, for processes that inherit them."""
        return [self.heartbeats, *chain.from_iterable(self.snapshots)]

    def drop_snapshots(self) -> None:
        """Empty all slots."""
        for descriptor in chain.from_iterable(self.snapshots):
            os.ftruncate(descriptor, 0)

    @staticmethod
    def _made(made: ExitStack, descriptor: int) -> int:
        made.callback(os.close, descriptor)
        return descriptor


def new_memory(purpose: str) -> int:
    """Return the descriptor of new memory, of no bytes yet, which `purpose` names to a debugger."""
    return os.memfd_create(f"meshwright {purpose}") if sys.platform == "linux" else new_file()


def new_file() -> int:
    """Return the descriptor of a new temporary file without a name, of no bytes yet."""
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


def disk_has_room() -> bool:
    """True if the folder for temporary files is on a disk with at least as much room as memory has."""
    folder = tempfile.gettempdir()
    return file_system(folder) not in IN_MEMORY and shutil.disk_usage(folder).free >= free_memory()


def file_system(folder: str) -> str | None:
    """The kind of file system that a folder is on, as Linux names it; None where the kernel does not tell."""
    device = os.stat(folder).st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    try:
        mounts = Path("/proc/self/mountinfo").read_text(encoding="utf-8").splitlines()
    except OSError:  # not Linux
        return None
    kinds = (line.partition(" - ")[2].split()[0] for line in mounts if line.split()[2] == number)
    return next(kinds, None)
