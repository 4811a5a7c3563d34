"""The control plane: small JSON messages between all ranks, over the store that joined them into a world.

Values of a `torch.distributed.Store` (on clusters a TCPStore, one connection from each rank to one server)
need no process group, hence no sockets between ranks, where each gloo group over n ranks opens n - 1 a rank.
No pickle crosses the wire. Each operation is a round, numbered in the program's order, in which a rank
makes a bounded number of store operations, whatever the size of the world:

    <round>/block/<b>      arrivals of 32 ranks: a bit for each, and how many of them raised a flag
    <round>/blocks         how many blocks are complete, and the flags in them
    <round>/all            set by whoever completes the last block
    <round>/value          a broadcast message
    <round>/messages/<r>   those that rank r gathers, one JSON line each

Once a round is complete every rank has left the one before, whose keys are then deleted.
"""

from __future__ import annotations

import json
import math
import socket
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist
from torch._C._distributed_c10d import Store
from torch.distributed.distributed_c10d import PrefixStore, _get_default_store

from meshwright.comm.heartbeat import Heartbeat
from meshwright.spec.differences import as_in_file, differences
from meshwright.spec.errors import UserError

T = TypeVar("T")
BLOCK = 32
"""Ranks whose arrivals are bits of one counter; the bits above count flags."""
PART_BYTES = 4 << 20
"""Longer messages are cut: TCPStore's server refuses values above 8 MiB."""
MOST_NAMED, MOST_DIFFERENCES = 16, 5
"""Missing ranks, and values that differ between ranks, that an error lists."""


class MissingRanksError(RuntimeError):
    """Ranks that did not take part in an operation within its limit; `ranks` are theirs, if known."""

    def __init__(self, sentence: str, ranks: Sequence[int] = ()) -> None:
        super().__init__(sentence)
        self.ranks = ranks


class Connections:
    """Connections of this process to the default group's store, one for each purpose, made when first used.

    A client that waits for a key holds its connection's lock, so what must not wait for each other (training,
    the thread behind it that saves, torch itself) has a connection of its own.
    """

    def __init__(self) -> None:
        self._made: dict[str, Store] = {}

    def control(
        self,
        purpose: str,
        size: int,
        scope: str,
        timeout: timedelta,
        heartbeat: Heartbeat | None = None,
        rank: int | None = None,
    ) -> Control:
        """A control over `size` ranks, its keys within `scope`; this one is number `rank` of them.

        By default they are the first ranks of the default group.
        """

        def connect() -> Store:
            if purpose not in self._made:
                self._made[purpose] = _get_default_store().clone()  # type: ignore[attr-defined]  # stubs lack it
            return PrefixStore(f"{scope}/{purpose}", self._made[purpose])

        own = dist.get_rank() if rank is None else rank
        return Control(purpose, own, size, connect, timeout, heartbeat)


def new_scope() -> str:
    """A prefix for the keys of one mesh, which no other mesh of this world has.

    Every rank of the default group calls this, in the same order. It waits for no other rank.
    """
    if dist.get_world_size() == 1 or dist.get_backend() == "fake":  # a fake store cannot count
        return "meshwright/0"
    return f"meshwright/{_get_default_store().add(f'meshwright/scopes/{dist.get_rank()}', 1)}"


class Control:
    """Messages between the hosts of `size` ranks, for one `purpose`; by default of a process alone.

    Every operation is collective: all ranks call the same ones in the same order, each from one thread at a
    time. `rounds` counts them. Alone, a rank has nothing to send and the store is not touched. A rank that
    does not arrive within `timeout` makes the ones that wait for it raise `MissingRanksError`, which names
    it; after that the object is of no use. `connect` returns the store, under a prefix of its own. Waits show
    in `heartbeat`.
    """

    def __init__(
        self,
        purpose: str = "alone",
        rank: int = 0,
        size: int = 1,
        connect: Callable[[], Store] | None = None,
        timeout: timedelta = timedelta(),
        heartbeat: Heartbeat | None = None,
    ) -> None:
        self.purpose, self.rank, self.size, self.timeout = purpose, rank, size, timeout
        self.heartbeat = heartbeat or Heartbeat()
        self.rounds = 0
        self._connect = connect
        self._store: Any = None
        self._operation = ""
        self._parts = 0
        """Into how many parts the value of the last round was cut."""

    # Operations -------------------------------------------------------------------------------------

    def any(self, flag: bool) -> bool:
        """Return True on every rank when the flag is set on one."""
        return self._vote("any", flag)

    def barrier(self) -> None:
        """Return when every rank has called this."""
        self._vote("barrier", False)

    def gather(self, message: Any, within: int | None = None) -> list[Any]:
        """Every rank's message, in the order of ranks, on rank 0; an empty list on the others.

        With `within`, every run of so many ranks gathers on its first. Only who receives waits.
        """
        if self.size == 1:
            return [message]
        self._begin("gather")
        count = within or self.size
        first = self.rank - self.rank % count
        if self.rank == first:
            self._arrive(announce=True)
            return [message, *self._gathered(first, min(count, self.size - first) - 1)]
        text = json.dumps(message)
        parts = self._put_parts(f"long/{self.rank}", text)
        line = f"[{self.rank},{parts},{'null' if parts else text}]\n"
        self._store.append(self._key(f"messages/{first}"), line)
        self._arrive(announce=True)
        return []

    def broadcast(self, message: Any) -> Any:
        """Rank 0's message, on every rank; the others wait for it."""
        if self.size == 1:
            return message
        self._begin("broadcast")
        self._arrive(announce=False)
        if self.rank == 0:
            text = json.dumps(message)
            self._parts = self._put_parts("value", text)
            self._store.set(self._key("value"), f"{self._parts}\n{'' if self._parts else text}")
            return message
        parts, _, content = self._wait("value").partition(b"\n")
        self._parts = int(parts)
        return json.loads(self._take_parts("value", self._parts) if self._parts else content)

    def sum(self, values: Sequence[float]) -> list[float]:
        """The sums of each number over all ranks, correctly rounded, on every rank."""
        rows = self.gather(list(values))
        return [float(total) for total in self.broadcast([*map(math.fsum, zip(*rows, strict=True))])]

    def together(self, work: Callable[[], T]) -> T:
        """Run `work` on every rank; when it fails anywhere, every rank raises the same error.

        `work` makes no collective call. Where several ranks fail, the gravest error of the lowest rank is
        the one that all raise: first a bug, then a user's mistake, a disk's failure, damaged data
        (`UserError.gravity`).
        """
        value, failure = None, None
        try:
            value = work()
        except Exception as error:
            failure = error
        if self._vote("together", failure is not None):
            self._raise_first(failure)
        return value  # type: ignore[return-value]  # None only when `work` returned it

    def on_first(self, work: Callable[[], T]) -> T:
        """Run `work` on rank 0 alone and return its (JSON) value everywhere; its failure is everyone's."""
        return self.broadcast(self.together(lambda: work() if self.rank == 0 else None))

    def agree(self, own: Mapping[str, Any], remedy: str) -> None:
        """Raise `UserError` on every rank where a rank's values (JSON, by key) are other than rank 0's."""
        name = f"rank {self.rank} on {socket.gethostname()}"
        first, where = self.broadcast([own, name])

        def compare() -> None:
            pairs = differences(first, json.loads(json.dumps(own)))
            if pairs:
                listed = "; ".join(
                    f"{key} is {as_in_file(other)} on {where} and {as_in_file(value)} on {name}"
                    for key, (other, value) in [*pairs.items()][:MOST_DIFFERENCES]
                )
                more = f"; and {len(pairs) - MOST_DIFFERENCES} more" if len(pairs) > MOST_DIFFERENCES else ""
                raise UserError(f"the ranks would not run the same: {listed}{more}; {remedy}")

        self.together(compare)

    def _raise_first(self, failure: Exception | None) -> None:
        own = None if failure is None else _report(failure)
        reports = [report for report in self.gather(own) if report is not None]
        first = self.broadcast(min(reports, key=lambda report: report[0]) if reports else None)
        if failure is not None and own == first:
            raise failure
        _, names, sentence = first
        known = _known_errors(UserError)
        raise next((known[name] for name in names if name in known), RuntimeError)(sentence) from failure

    # Rounds -----------------------------------------------------------------------------------------

    def _vote(self, operation: str, flag: bool) -> bool:
        if self.size == 1:
            return flag
        self._begin(operation)
        self._arrive(flag, announce=True)
        return self._wait("all") == b"1"

    def store(self) -> Any:
        """The store under this control's prefix; keys beside those of the rounds are the caller's."""
        if self._store is None:
            assert self._connect is not None  # only one rank alone has none
            self._store = self._connect()
        return self._store

    def _begin(self, operation: str) -> None:
        self.store()
        self.rounds += 1
        self._operation = operation

    def _arrive(self, flag: bool = False, *, announce: bool) -> None:
        """Note that this rank is in the round; the last one may announce it, and deletes the round before."""
        block = self.rank // BLOCK
        bits = self._store.add(self._key(f"block/{block}"), (1 << self.rank % BLOCK) + (int(flag) << BLOCK))
        mask = (1 << min(BLOCK, self.size - block * BLOCK)) - 1
        parts, self._parts = self._parts, 0
        if bits & ((1 << BLOCK) - 1) != mask:
            return
        complete = self._store.add(self._key("blocks"), 1 + (bits >> BLOCK << BLOCK))
        if complete & ((1 << BLOCK) - 1) != self._blocks:
            return
        if announce:
            self._store.set(self._key("all"), "1" if complete >> BLOCK else "0")
        names = ["blocks", "all", "value", *(f"value/{index}" for index in range(parts))]
        for name in [*names, *(f"block/{index}" for index in range(self._blocks))]:
            self._store.delete_key(f"{self.rounds - 1}/{name}")

    @property
    def _blocks(self) -> int:
        return -(-self.size // BLOCK)

    def _key(self, name: str) -> str:
        return f"{self.rounds}/{name}"

    def _put_parts(self, name: str, text: str) -> int:
        """Store a long message in parts and return their number; none of a short one."""
        if len(text) <= PART_BYTES:
            return 0
        parts = [text[start : start + PART_BYTES] for start in range(0, len(text), PART_BYTES)]
        for index, part in enumerate(parts):
            self._store.set(self._key(f"{name}/{index}"), part)
        return len(parts)

    def _take_parts(self, name: str, parts: int) -> bytes:
        return b"".join(self._store.get(self._key(f"{name}/{index}")) for index in range(parts))

    def _gathered(self, first: int, count: int) -> list[Any]:
        """On rank `first`: the messages of the `count` ranks after it, which leave the store."""
        self._wait("all")
        found: list[Any] = [None] * count
        key = self._key(f"messages/{first}")
        for line in self._store.get(key).splitlines() if count else []:
            rank, parts, message = json.loads(line)
            if parts:
                message = json.loads(self._take_parts(f"long/{rank}", parts))
                for index in range(parts):
                    self._store.delete_key(self._key(f"long/{rank}/{index}"))
            found[rank - first - 1] = message
        self._store.delete_key(key)
        return found

    def _wait(self, name: str) -> bytes:
        """The value of a key, once it is there."""
        try:
            with self.heartbeat.waits(f"control {self._operation}"):
                self._store.wait([self._key(name)], self.timeout)
        except dist.DistStoreError as error:
            raise self._missing() from error
        return bytes(self._store.get(self._key(name)))

    def _missing(self) -> MissingRanksError:
        """An error that names who has not arrived in this round."""
        bits = [self._store.add(self._key(f"block/{index}"), 0) for index in range(self._blocks)]
        missing = [rank for rank in range(self.size) if not bits[rank // BLOCK] >> rank % BLOCK & 1]
        more = f" and {len(missing) - MOST_NAMED} more" if len(missing) > MOST_NAMED else ""
        named = ", ".join(map(str, missing[:MOST_NAMED])) + more
        reason = f"rank {named} did not arrive" if missing else "all arrived, but rank 0 sent no message"
        return MissingRanksError(
            f"{self._operation} (round {self.rounds} of {self.purpose}, {self.size} ranks): "
            f"{reason} within {self.timeout.total_seconds():g} s",
            missing,
        )


def _report(error: Exception) -> list[Any]:
    """[gravity, the names of its classes from its own to UserError, its sentence]."""
    if not isinstance(error, UserError):
        return [0, [], f"{type(error).__name__}: {error}"]
    classes = [cls for cls in type(error).__mro__ if issubclass(cls, UserError)]
    return [error.gravity, [_name(cls) for cls in classes], str(error)]


def _known_errors(cls: type[UserError]) -> dict[str, type[UserError]]:
    """`cls` and the classes derived from it that this process knows, by name."""
    known = {_name(cls): cls}
    for derived in cls.__subclasses__():
        known |= _known_errors(derived)
    return known


def _name(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"
