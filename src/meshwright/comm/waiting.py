"""Work of some ranks that may take hours, while the others wait and see that those still live.

It goes through the store that joined the ranks, where the time limit of collectives does not apply. The keys
of one call, beside those of `comm/control.py`:

    beat/<rank>    a count that each rank at work, and rank 0, adds to
    ended          how many ranks are at the end of their work; the others are at once
    all            set when all of them are
    lost           the sentence about a rank whose count stands still, by rank 0

Rank 0 looks at the counts of all ranks at work, and the others at that of rank 0.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from typing import Any

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore

from meshwright.comm.control import MOST_NAMED, Control, MissingRanksError

LONGEST_PAUSE = 1.0
"""Seconds between two looks at the store, at most."""


def while_others_wait(control: Control, chosen: bool, work: Callable[[], object]) -> None:
    """Run `work` on the ranks that are chosen, and return on all ranks when it has ended on all of those.

    When it fails anywhere, every rank raises the same error. When a rank at work gives no sign of life for as
    long as a collective may take, the others raise `MissingRanksError`, which names it and its host.
    """
    if control.size == 1:
        if chosen:
            work()
        return
    failure: Exception | None = None
    hosts = control.gather(socket.gethostname() if chosen else None)
    at_work = {rank: host for rank, host in enumerate(hosts) if host is not None and rank > 0}
    watch = _Watch(control, at_work if control.rank == 0 else {0: "the first host"})
    with watch.alive() if chosen or control.rank == 0 else nullcontext():
        if chosen:
            try:
                work()
            except Exception as error:  # raised below, on all ranks
                failure = error
        watch.wait_for_all()

    def tell() -> None:
        if failure is not None:
            raise failure

    control.together(tell)


class _Watch:
    """One rank's part in one call: `watched` are the ranks whose counts it looks at, with their hosts."""

    def __init__(self, control: Control, watched: Mapping[int, str]) -> None:
        self._rank, self._size, self._watched = control.rank, control.size, watched
        self._limit = control.timeout.total_seconds()
        self._pause = min(LONGEST_PAUSE, self._limit / 10)
        self._seen: dict[int, tuple[int, float]] = {}
        """The last count of each rank, and when it was new, by this rank's own clock."""
        group: Any = dist.group.WORLD
        every = PrefixStore(f"while_others_wait/{self._size}", group.get_group_store())
        call = (every.add("calls", 1) - 1) // self._size  # all ranks enter a call before any enters the next
        self._store = PrefixStore(str(call), every)

    @contextmanager
    def alive(self) -> Iterator[None]:
        """Give signs of life from a thread of its own, while this rank works and waits."""
        over = threading.Event()
        thread = threading.Thread(target=self._beat, args=(over,), name="signs of life", daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()

    def _beat(self, over: threading.Event) -> None:
        with suppress(dist.DistError):  # the store is gone, which `wait_for_all` tells
            while not over.wait(self._pause):
                self._store.add(f"beat/{self._rank}", 1)
                if self._rank == 0 and (sentence := self._silent()):
                    self._store.set("lost", sentence)
                    return

    def _silent(self) -> str:
        """Return a sentence about watched ranks whose counts have not moved for the limit, or nothing."""
        now = time.monotonic()
        for rank in self._watched:
            count = self._store.add(f"beat/{rank}", 0)
            if rank not in self._seen or self._seen[rank][0] != count:
                self._seen[rank] = count, now
        silent = [rank for rank, (_, since) in self._seen.items() if now - since > self._limit]
        named = ", ".join(f"rank {rank} on {self._watched[rank]}" for rank in silent[:MOST_NAMED])
        more = f" and {len(silent) - MOST_NAMED} more" if len(silent) > MOST_NAMED else ""
        reason = f"gave no sign of life for {self._limit:g} s, while others waited for its work"
        return f"{named}{more} {reason}: it was killed, or its host or network failed" if silent else ""

    def wait_for_all(self) -> None:
        """Return when all ranks have called this; a signal ends the wait."""
        pause = 0.005
        try:
            if self._store.add("ended", 1) == self._size:
                self._store.set("all", "")
            while not self._store.check(["all"]):
                lost = self._store.get("lost").decode() if self._store.check(["lost"]) else ""
                if lost := lost or (self._silent() if self._rank else ""):
                    if self._rank == 0:  # the store may end with this process: let the others read the reason
                        time.sleep(3 * self._pause)
                    raise MissingRanksError(lost)
                time.sleep(pause)
                pause = min(self._pause, 1.1 * pause)  # a tenth of the time waited so far
        except dist.DistError as error:
            reason = "the store that joined the ranks, on the first host, does not answer any more"
            raise MissingRanksError(f"{reason} ({str(error).splitlines()[0]})") from error
