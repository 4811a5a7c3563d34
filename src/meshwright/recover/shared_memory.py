"""Memory that the ranks of a host share with their supervisor, and that outlives each of them.

It belongs to no file: when the last process that has it is gone, so is the memory, however they ended.
"""

from __future__ import annotations

import mmap
import os
import sys
import tempfile
from contextlib import ExitStack
from itertools import chain

from meshwright.parallel.heartbeat import BYTES
from meshwright.spec import UserError


class SharedMemory(ExitStack):
    """Descriptors of the heartbeats of `ranks` local ranks, and of memory for a snapshot of each.

    `heartbeats` holds `BYTES` for each rank; `snapshots` are two slots for each rank, which fills them,
    and where there are `peers`, that is other hosts, two more for what a rank of one of them keeps.
    """

    def __init__(self, ranks: int, peers: bool = False) -> None:
        super().__init__()
        with ExitStack() as made:
            self.heartbeats = self._made(made, "heartbeats")
            os.ftruncate(self.heartbeats, ranks * BYTES)
            mapped = made.enter_context(mmap.mmap(self.heartbeats, ranks * BYTES))
            self.beats = made.enter_context(memoryview(mapped))
            try:
                self.snapshots = [
                    [self._made(made, f"snapshot of rank {rank}") for _ in range(4 if peers else 2)]
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
    def _made(made: ExitStack, purpose: str) -> int:
        descriptor = new_memory(purpose)
        made.callback(os.close, descriptor)
        return descriptor


def new_memory(purpose: str) -> int:
    """Return the descriptor of new memory, of no bytes yet, which `purpose` names to a debugger."""
    if sys.platform == "linux":
        return os.memfd_create(f"meshwright {purpose}")
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())
