"""A check, for short runs, that ranks make the same collective calls: each is compared before it starts.

A collective whose ranks disagree hangs, or the backend aborts. Here each rank looks up its call in the
world's store, where the first rank to get to that place of a sequence has left its own; so it waits for no
other rank, and a difference is told at once:

    last/<rank>              the rank's last call, for the error of a rank that waits for it in vain
    group <name>/<n>         the n-th call of a group, with operation, size and format
    pair <name> <a>><b>/<n>  the n-th message from rank a to rank b of a group, with size and format
    stage <p>/<n>            the n-th call of the ranks of one pipeline stage, with axis and operation

The ranks of a stage run the same program, so the last sequence finds a call that one of them leaves out where
its next call is one of another group. Each call costs a rank two round trips to the store.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore

from meshwright.parallel.control import MissingRanksError
from meshwright.parallel.mesh import Axis, Mesh
from meshwright.spec.errors import CollectiveError

TIMED_OUT = (
    "Timed out waiting",
    "Operation timed out",
    "Application timeout",
    "collective operation timeout",
)
"""Words of gloo's and NCCL's errors about a rank that did not come."""
MOST_NAMED = 4
"""Ranks that the error about a late collective names."""


@contextmanager
def same_calls(mesh: Mesh, limit: timedelta) -> Iterator[None]:
    """Compare the ranks' calls in the context; where they differ, or one does not come: `CollectiveError`.

    Collective over the mesh. Messages of its control wait no longer than `limit` for a rank; the limit of its
    groups is theirs (`Groups.limit`).
    """
    if mesh.control.size == 1:
        yield
        return
    mesh.control.barrier()  # makes the keys of this check its own; imports are over on all ranks
    check, before = SameCalls(mesh), mesh.control.timeout
    mesh.wire.check, mesh.control.timeout = check, limit
    if mesh.device.type == "cpu":  # with NCCL such a wait would block the host; it has a watchdog
        mesh.wire.limit = limit
    try:
        yield
    except MissingRanksError as error:
        raise CollectiveError(f"{error}, in step {mesh.heartbeat.step + 1}") from error
    except RuntimeError as error:
        if not any(words in str(error) for words in TIMED_OUT):
            raise
        raise CollectiveError(check.late(limit)) from error
    finally:
        mesh.wire.check, mesh.wire.limit, mesh.control.timeout = None, None, before


class SameCalls:
    """One rank's side of the check; every rank of the mesh makes one after the same round of its control."""

    def __init__(self, mesh: Mesh) -> None:
        self._rank, self._stage, self._heartbeat = mesh.rank, mesh.pipeline.rank, mesh.heartbeat
        self._store = PrefixStore(f"calls/{mesh.control.rounds}", mesh.control.store())
        self._numbers: Counter[str] = Counter()
        """Calls so far in each sequence."""
        self._last: dict[str, tuple[str, list[int]]] = {}
        """The last call of each axis and operation, with the ranks of its group."""

    def starts(self, axis: Axis, operation: str, what: str, pair: tuple[int, int, int] | None = None) -> None:
        """Raise `CollectiveError` where the call that is about to start differs from an earlier rank's.

        `what` says its size and format. Of a message the `pair` is the sender, the receiver and the tag.
        """
        assert axis.group is not None
        group, call = axis.group.group_name, f"{operation} of {what} over the axis {axis.name}"
        in_step = f"{call} in step {self._heartbeat.step + 1}"
        self._last[f"{axis.name} {operation}"] = in_step, dist.get_process_group_ranks(axis.group)
        self._store.set(f"last/{self._rank}", in_step)
        if pair is None:
            self._compare(f"group {group}", f"{operation} of {what}", call)
        else:
            source, target, tag = pair
            self._compare(f"pair {group} {source}>{target} {tag}", what, call)
        self._compare(f"stage {self._stage}", f"{axis.name} {operation}", call)

    def _compare(self, sequence: str, compared: str, call: str) -> None:
        """Compare this rank's next call in a sequence with that of the first rank that has got to it."""
        self._numbers[sequence] += 1
        key = f"{sequence}/{self._numbers[sequence]}"
        found = self._store.compare_set(key, "", json.dumps([compared, self._rank, call]))
        theirs, rank, other = json.loads(found)
        if theirs != compared:
            raise CollectiveError(
                f"in step {self._heartbeat.step + 1} rank {self._rank} calls {call}, where rank {rank} calls "
                f"{other}: one of them left out or added a call, or has a tensor of another size or format"
            )

    def late(self, limit: timedelta) -> str:
        """A sentence about the collective that this rank waits for, and the last calls of its group."""
        label = self._heartbeat.label
        awaited, ranks = self._last.get(label, (f"{label} in step {self._heartbeat.step + 1}", []))
        calls = {rank: self._last_call(rank) for rank in ranks}
        others = [f"rank {rank} last called {call}" for rank, call in calls.items() if call != awaited]
        where = "; ".join(["", *others[:MOST_NAMED]])
        return f"rank {self._rank} has waited for {limit.total_seconds():g} s for {awaited}{where}"

    def _last_call(self, rank: int) -> str:
        key = f"last/{rank}"
        return self._store.get(key).decode() if self._store.check([key]) else "nothing"
