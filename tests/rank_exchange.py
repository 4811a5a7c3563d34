"""Notes and tensors between ranks on one host, in a tenth of the time that gloo takes."""

from __future__ import annotations

import json
import mmap
import os
from collections import deque
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


class Exchange:
    """Notes and tensors that the ranks of a group show each other, over pipes and in shared memory.

    A rank's memory has two slots, which take turns: it writes one again after the next gathering, which no
    rank begins before it has read what the last one showed.
    """

    NOTE_BYTES = 1024
    """Size of a note, which is small enough for several processes to write to a pipe without mixing."""
    SLOT_BYTES = 1 << 20

    def __init__(self, store: dist.Store, rank: int, size: int) -> None:
        self._rank, self._turn = rank, 0
        self._inbox, outbox = os.pipe()
        memory = os.memfd_create("slots")
        os.truncate(memory, 2 * self.SLOT_BYTES)
        store.set(f"exchange {rank}", f"{os.getpid()} {outbox} {memory}")
        files = [store.get(f"exchange {peer}").decode().split() for peer in range(size)]
        opened = [
            [
                os.open(f"/proc/{pid}/fd/{file}", flags)
                for file, flags in ((pipe, os.O_WRONLY), (slots, os.O_RDWR))
            ]
            for pid, pipe, slots in files
        ]
        self._outboxes = [pipe for peer, (pipe, _) in enumerate(opened) if peer != rank]
        maps = [mmap.mmap(slots, 2 * self.SLOT_BYTES) for _, slots in opened]
        self._slots = [torch.frombuffer(each, dtype=torch.uint8).view(2, -1) for each in maps]
        self._early: list[deque[list[Any]]] = [deque() for _ in range(size)]

    def gather(self, own: list[Any], shown: Tensor | None = None) -> list[list[Any]]:
        """The list of each rank, once all have called this as often as this rank has; `shown` fits a slot."""
        self._turn += 1
        if shown is not None:
            self._slot(self._rank, shown.dtype, shown.numel()).copy_(shown.reshape(-1))
        note = json.dumps([self._rank, *own]).encode().ljust(self.NOTE_BYTES)
        assert len(note) == self.NOTE_BYTES
        for outbox in self._outboxes:
            os.write(outbox, note)
        self._early[self._rank].append(own)
        while not all(self._early):
            rank, *theirs = json.loads(os.read(self._inbox, self.NOTE_BYTES))
            self._early[rank].append(theirs)
        return [early.popleft() for early in self._early]

    def shown(self, sizes: Sequence[int], dtype: torch.dtype) -> list[Tensor]:
        """The flat tensors of these numbers of elements that the ranks showed at the last gathering."""
        return [self._slot(rank, dtype, size) for rank, size in enumerate(sizes)]

    def _slot(self, rank: int, dtype: torch.dtype, size: int) -> Tensor:
        return self._slots[rank][self._turn % 2, : size * dtype.itemsize].view(dtype)
