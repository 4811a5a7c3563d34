"""Collectives of ranks that compute on the processors of one host, through memory that they share.

gloo moves every byte through sockets, and with threads of its own that take the cores from the ranks. Here a
rank lays down what it sends in memory that the others have mapped, counts up, and returns; who waits reads
the others' parts and adds them up, always in the order of ranks. Each rank owns one region:

    counters  how many collectives the rank has posted, and of how many it has read all parts
    records   for each of the last collectives: its kind, the bytes of its part and where they lie
    parts     of collectives that not all ranks have read yet

Collectives of a group end in the order in which they were started, which is equal on all ranks. Posting never
waits for another rank, so ranks may run ahead of each other as on gloo.
"""

from __future__ import annotations

import mmap
import os
import platform
import secrets
import select
import sys
import time
import zlib
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.host import host_number, is_switched_on

SWITCH = "MESHWRIGHT_SHM_DISABLE"
"""Set to 1 (anything but 0), it leaves all collectives to gloo."""

MOST_RANKS = 8
"""Ranks of a group at most: each adds up the parts of all, so that work grows with their number."""

_RECORDS = 1024
"""Collectives that a rank may have posted before all ranks have read the first of them."""
_COUNTERS = 64  # bytes: a cache line of their own
_HEAD = 1 << 15  # bytes before the parts
_ALIGNED = 64
_SPINS = 100
"""Looks at the counters before a rank that waits leaves its core to others."""
_LONGEST_PAUSE_S = 1e-3
_LOOK_S = 0.1
"""Seconds of waiting between two looks whether the other ranks still live."""


Finish = Callable[[list[Tensor]], None]
"""Makes a collective's result of the parts that all ranks have laid down, bytes, in the order of ranks."""


class _Region:
    """The memory of one rank, as this process has mapped it."""

    def __init__(self, descriptor: int, size: int = 0) -> None:
        self.descriptor = descriptor
        if size:
            os.ftruncate(descriptor, size)
        head = mmap.mmap(descriptor, _HEAD)
        self.counters = np.frombuffer(head, np.int64, 2)
        """Collectives posted, and read."""
        self.records = np.frombuffer(head, np.int64, 3 * _RECORDS, _COUNTERS).reshape(_RECORDS, 3)
        """(kind, bytes, start) of collective n at n mod `_RECORDS`."""
        self._parts = torch.empty(0, dtype=torch.uint8)

    def __del__(self) -> None:
        os.close(self.descriptor)

    def bytes(self, start: int, size: int) -> Tensor:
        """Return memory (size,) of uint8; the file behind it is long enough."""
        if start + size > len(self._parts):
            whole = mmap.mmap(self.descriptor, os.fstat(self.descriptor).st_size)
            self._parts = torch.frombuffer(whole, dtype=torch.uint8)
        return self._parts[start : start + size]

    def part(self, number: int) -> Tensor:
        """Return what the rank has laid down for a collective, (bytes,) of uint8."""
        _, size, start = self.records[number % _RECORDS].tolist()
        return self.bytes(start, size)


@dataclass
class SharedMemoryWork:
    """A collective under way."""

    group: SharedMemoryGroup
    number: int
    kind: int
    size: int
    done: bool = False

    def wait(self, timeout: timedelta | None = None) -> None:
        """Return when the result is there, or after `timeout`, by default the group's, raise an error."""
        if not self.done:
            self.group.wait_for(self, timeout or self.group.timeout)

    def is_completed(self) -> bool:
        """True if the result is there; reads what the other ranks have posted, and does not wait for it."""
        self.group.advance()
        return self.done


class SharedMemoryGroup:
    """All-gather, reduce-scatter and all-reduce of one gloo group whose ranks share a host's memory."""

    def __init__(self, group: dist.ProcessGroup, timeout: timedelta) -> None:
        self.timeout = timeout
        self.rank, self.size = group.rank(), group.size()
        self._group = group
        self._regions: list[_Region] | None = None
        self._pids: list[int] = []
        self._lives = select.poll()
        self._descriptors: dict[int, int] = {}
        """Ranks by the descriptor that tells of their end."""
        self._posted = 0
        self._pending: deque[tuple[SharedMemoryWork, Finish]] = deque()
        self._laid: list[tuple[int, int, int]] = []
        """(start, end, number) of this rank's parts that some rank may not have read, by start."""

    def __del__(self) -> None:
        for descriptor in self._descriptors:
            os.close(descriptor)

    # Joining ------------------------------------------------------------------------------------------------

    def joined(self) -> bool:
        """True if all ranks reach each other's memory. The first call is collective."""
        if self._regions is None:
            self._regions = self._join()
        return bool(self._regions)

    def _join(self) -> list[_Region]:
        """Map the regions of all ranks; none of them if any rank cannot."""
        able = (
            sys.platform == "linux"
            and platform.machine() == "x86_64"  # where stores are seen in the order in which they were made
            and hasattr(os, "pidfd_open")
            and not is_switched_on(SWITCH)
        )
        place, own = [-1 - self.rank, 0, 0, 0], None
        with suppress(OSError):  # no descriptor is left: gloo needs none
            if able:
                own, mark = _Region(os.memfd_create("meshwright collectives"), _HEAD), secrets.randbits(48)
                own.counters[0] = mark
                place = [host_number(), os.getpid(), own.descriptor, mark]
        places = self._agree(place).tolist()
        self._pids = [pid for _, pid, *_ in places]
        found: list[_Region] = []
        if own is not None and len({host for host, *_ in places}) == 1:
            with suppress(OSError):  # another user's process, or one of another container
                for rank, (_, pid, descriptor, mark) in enumerate(places):
                    found.append(own if rank == self.rank else self._reach(rank, pid, descriptor, mark))
        reached = self._agree([int(len(found) == self.size)])
        if own is None or not bool(reached.all()):
            return []
        own.counters[0] = 0  # all have seen the mark
        self._agree([0])
        return found

    def _reach(self, rank: int, pid: int, descriptor: int, mark: int) -> _Region:
        """Map the region of another rank. Raises OSError where this process may not."""
        life = os.pidfd_open(pid)
        self._descriptors[life] = rank
        self._lives.register(life, select.POLLIN)
        region = _Region(os.open(f"/proc/{pid}/fd/{descriptor}", os.O_RDWR))
        if region.counters[0] != mark:
            raise OSError(f"process {pid} has another file at descriptor {descriptor}")
        return region

    def _agree(self, own: Sequence[int]) -> Tensor:
        """Return the numbers of all ranks, by gloo."""
        found = torch.zeros(self.size, len(own), dtype=torch.int64)
        found[self.rank] = torch.tensor(own)
        dist.all_reduce(found, group=self._group)
        return found

    # Collectives --------------------------------------------------------------------------------------------

    def all_gather(self, wholes: Sequence[Tensor], parts: Sequence[Tensor]) -> SharedMemoryWork:
        """Fill each of `wholes` (n, k) with the part (k,) of each rank; own parts may lie in their places."""

        def finish(laid: list[Tensor]) -> None:
            for rank, theirs in enumerate(laid):
                sent = parts if rank == self.rank else theirs.view(parts[0].dtype).split(sizes)
                for whole, part in zip(wholes, sent, strict=True):
                    if whole[rank].data_ptr() != part.data_ptr():
                        whole[rank].copy_(part)

        sizes = [part.numel() for part in parts]
        return self._post("all_gather", parts, finish)

    def reduce_scatter(self, part: Tensor, wholes: Sequence[Tensor]) -> SharedMemoryWork:
        """Sum each of `wholes` (n, k) over the ranks, and write this rank's row of each to `part`, one after
        another."""
        into = part.view(-1).split([whole.shape[1] for whole in wholes])
        others = [rank for rank in range(self.size) if rank != self.rank]

        def finish(laid: list[Tensor]) -> None:
            summands = [
                # a rank lays down all rows but its own
                theirs.view(part.dtype).view(self.size - 1, -1)[self.rank - (self.rank > rank)]
                for rank, theirs in enumerate(laid)
                if rank != self.rank
            ]
            rows = [each.split([piece.numel() for piece in into]) for each in summands]
            for place, (whole, piece) in enumerate(zip(wholes, into, strict=True)):
                terms = [each[place] for each in rows]
                terms.insert(self.rank, whole[self.rank])
                _reduce(terms, piece, torch.add)

        return self._post("reduce_scatter", [whole[rank] for rank in others for whole in wholes], finish)

    def all_reduce(self, tensor: Tensor, largest: bool = False) -> SharedMemoryWork:
        """Sum `tensor` over the ranks in place, or take the `largest` of each number."""
        flat, kind = tensor.view(-1), torch.maximum if largest else torch.add

        def finish(parts: list[Tensor]) -> None:
            _reduce([theirs.view(flat.dtype) for theirs in parts], flat, kind)

        return self._post("amax" if largest else "all_reduce", [flat], finish)

    def _post(self, operation: str, sent: Sequence[Tensor], finish: Finish) -> SharedMemoryWork:
        """Lay down the tensors of this rank for the others, one after another, and tell them."""
        assert self._regions
        own, number = self._regions[self.rank], self._posted
        size = sum(each.nbytes for each in sent)
        self.advance()
        self._wait(lambda: self._behind(1, number - _RECORDS), self.timeout)  # else its record is still read
        start = place = self._room(size, number)
        with torch.no_grad():
            for each in sent:
                own.bytes(place, each.nbytes).view(each.dtype).copy_(each)
                place += each.nbytes
        kind = zlib.crc32(f"{operation} {sent[0].dtype}".encode())
        own.records[number % _RECORDS] = kind, size, start
        self._posted += 1
        own.counters[0] = self._posted  # after all of the above
        work = SharedMemoryWork(self, number, kind, size)
        self._pending.append((work, finish))
        return work

    def _room(self, size: int, number: int) -> int:
        """Return the start of memory for a part, the lowest that is free, and note that it is taken."""
        assert self._regions
        read = min(int(region.counters[1]) for region in self._regions)
        self._laid = [each for each in self._laid if each[2] >= read]
        index, start = 0, _HEAD
        for taken, end, _ in self._laid:
            if start + size <= taken:
                break
            index, start = index + 1, -(-end // _ALIGNED) * _ALIGNED
        self._laid.insert(index, (start, start + size, number))
        descriptor = self._regions[self.rank].descriptor
        if start + size > os.fstat(descriptor).st_size:
            os.ftruncate(descriptor, start + size)
        return start

    # Waiting ------------------------------------------------------------------------------------------------

    def advance(self) -> None:
        """End all collectives, in order, whose parts are there."""
        assert self._regions is not None
        others = [region for rank, region in enumerate(self._regions) if rank != self.rank]
        while self._pending and all(each.counters[0] > self._pending[0][0].number for each in others):
            self._end(*self._pending[0])
            self._pending.popleft()  # not one that failed, so that every later wait fails as well

    def _end(self, work: SharedMemoryWork, finish: Finish) -> None:
        """Read the other ranks' parts of a collective."""
        assert self._regions is not None
        parts = []
        for rank, region in enumerate(self._regions):
            kind, size, _ = region.records[work.number % _RECORDS].tolist()
            if (kind, size) != (work.kind, work.size):
                raise RuntimeError(
                    f"ranks {self.rank} and {rank} of a group have started different collectives as its call "
                    f"{work.number}: with {work.size:,} bytes from each rank and with {size:,}"
                    + (", of another operation or format" if kind != work.kind else "")
                )
            parts.append(region.part(work.number))
        with torch.no_grad():
            finish(parts)
        self._regions[self.rank].counters[1] = work.number + 1
        work.done = True

    def wait_for(self, work: SharedMemoryWork, timeout: timedelta) -> None:
        """Return when a collective has ended. Raises RuntimeError for a rank that is late or gone."""
        self._wait(lambda: self._behind(0, work.number), timeout)
        self.advance()

    def _behind(self, counter: int, number: int) -> list[int]:
        """Return the ranks whose counter has not come past a collective: 0 of posted ones, 1 of read ones."""
        assert self._regions is not None
        return [rank for rank, each in enumerate(self._regions) if each.counters[counter] <= number]

    def _wait(self, behind: Callable[[], list[int]], timeout: timedelta) -> None:
        """Return when no rank is `behind`. Raises RuntimeError for one that is late or gone."""
        for _ in range(_SPINS):
            if not behind():
                return
        self.advance()  # others may wait for this rank to have read their parts
        pause, began = 1e-5, time.monotonic()
        look = began + _LOOK_S
        while late := behind():
            time.sleep(pause)
            self.advance()
            pause = min(1.5 * pause, _LONGEST_PAUSE_S)
            now = time.monotonic()
            if now > look:
                look = now + _LOOK_S
                gone = {self._descriptors[descriptor] for descriptor, _ in self._lives.poll(0)}
                if lost := gone.intersection(behind()):
                    named = ", ".join(f"rank {rank} (process {self._pids[rank]})" for rank in sorted(lost))
                    raise RuntimeError(f"Connection closed by peer: {named} of the group has ended")
            if now - began > timeout.total_seconds():
                ranks = ", ".join(map(str, late))
                raise RuntimeError(
                    f"Timed out waiting {1000 * timeout.total_seconds():g} ms for rank {ranks} of the group"
                )


def _reduce(summands: list[Tensor], into: Tensor, kind: Callable[..., Tensor]) -> None:
    """Reduce tensors in their order."""
    kind(summands[0], summands[1], out=into)
    for each in summands[2:]:
        kind(into, each, out=into)
