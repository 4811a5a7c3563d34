"""A check, for short runs, that ranks make the same collective calls: each is compared before it starts.

A collective whose ranks disagree hangs, or the backend aborts. Here each rank looks up its call in the
world's store, where the first rank to get to that place of a sequence has left its own; so it waits for no
other rank, and a difference is told at once:

    group <name>/<n>         the n-th call of a group, with operation, size and format
    rows <name>/<n>          rows of an uneven all-to-all that each rank sends to and expects from the others
    pair <name> <a>><b>/<n>  the n-th message from rank a to rank b of a group, with size and format
    stage <p>/<n>            the n-th call of the ranks of one pipeline stage, with axis and operation
    last/<rank>              the rank's last call, and how far it is in each sequence
    waits/<rank>             the call that the rank has waited for in vain, and who has not made it
    late                     the sentence about the first such wait, with which all ranks end

The ranks of a stage run the same program, but for broadcasts, so their sequence finds a call that one of them
leaves out where its next call is one of another group. Each call costs a rank two round trips to the store,
and an uneven all-to-all four.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore

from meshwright.comm.control import MissingRanksError
from meshwright.comm.mesh import Axis, Mesh
from meshwright.spec.errors import ECHOES, CollectiveError

TIMED_OUT = (
    "Timed out waiting",
    "Operation timed out",
    "Application timeout",
    "collective operation timeout",
)
"""Words of gloo's and NCCL's errors about a rank that did not come."""
MOST_NAMED = 4
"""Ranks that the error about a late collective names, each with what it does."""
GATHER_S = 0.3
"""Seconds that a rank whose wait has failed leaves to others to say what they wait for.

They wake up at once, since gloo breaks off all messages of a group with one that is late.
"""


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
    except RuntimeError as error:
        sentence = check.explained(error, limit)
        if not sentence:
            raise
        raise CollectiveError(sentence) from error
    finally:
        mesh.wire.check, mesh.wire.limit, mesh.control.timeout = None, None, before


@dataclass(frozen=True)
class CollectiveCall:
    """One rank's call, and its place in a sequence, where the ranks `others` must get to as well."""

    text: str
    sequence: str
    number: int
    others: Sequence[int]
    lacks: str
    """Words about a rank that does not get there, such as "did not send"."""


class SameCalls:
    """One rank's side of the check; every rank of the mesh makes one after the same round of its control."""

    def __init__(self, mesh: Mesh) -> None:
        self._rank, self._stage, self._heartbeat = mesh.rank, mesh.pipeline.rank, mesh.heartbeat
        self._wire = mesh.wire
        self._store: Any = PrefixStore(f"calls/{mesh.control.rounds}", mesh.control.store())
        self._numbers: Counter[str] = Counter()
        """Calls so far in each sequence."""

    @property
    def _step(self) -> int:
        return self._heartbeat.step + 1

    def starts(
        self,
        axis: Axis,
        operation: str,
        what: str,
        pair: tuple[int, int, int] | None = None,
        rows: tuple[list[int], list[int]] | None = None,
    ) -> CollectiveCall:
        """Raise `CollectiveError` where the call that is about to start differs from an earlier rank's.

        `what` says its size and format. Of a message the `pair` is the sender, the receiver and the tag; of
        an uneven all-to-all `rows` are the numbers that this rank sends to each, and expects from each.
        """
        assert axis.group is not None
        group, ranks = axis.group.group_name, dist.get_process_group_ranks(axis.group)
        compared, text = f"{operation} of {what}", f"{operation} of {what} over the axis {axis.name}"
        sequence, lacks = f"group {group}", "did not call"
        if pair is not None:
            source, target, tag = pair
            sends = source == axis.rank
            peer = ranks[target if sends else source]
            sequence, compared, ranks = f"pair {group} {source}>{target} {tag}", what, [peer]
            lacks = "did not receive" if sends else "did not send"
            text = f"{operation} of {what} {'to' if sends else 'from'} rank {peer} over the axis {axis.name}"
        self._numbers[sequence] += 1
        call = CollectiveCall(f"{text} in step {self._step}", sequence, self._numbers[sequence], ranks, lacks)
        self._store.set(f"last/{self._rank}", json.dumps([call.text, self._numbers]))
        self._compare(f"{sequence}/{call.number}", compared, text)
        if rows is not None:
            self._compare_rows(f"rows {group}/{call.number}", text, ranks, axis.rank, rows)
        # Ranks have different parts in messages across stages, and in a broadcast over several axes, which
        # only those ranks of the first one make that have the value or pass it on.
        if (axis.name != "world" or pair is None) and operation != "broadcast":
            stage = f"stage {self._stage}"
            self._numbers[stage] += 1
            self._compare(f"{stage}/{self._numbers[stage]}", f"{axis.name} {operation}", text)
        return call

    def _compare(self, key: str, compared: str, text: str) -> None:
        """Compare this rank's next call in a sequence with that of the first rank that has got to it."""
        found = self._store.compare_set(key, "", json.dumps([compared, self._rank, text]))
        theirs, rank, other = json.loads(found)
        if theirs != compared:
            raise CollectiveError(
                f"in step {self._step} rank {self._rank} calls {text}, where rank {rank} calls "
                f"{other}: one of them left out or added a call, or has a tensor of another size or format"
            )

    def _compare_rows(
        self, key: str, text: str, ranks: Sequence[int], own: int, rows: tuple[list[int], list[int]]
    ) -> None:
        """Compare the numbers of rows with those of the ranks that have got to this call, and leave them."""
        sent, expected = rows
        self._store.append(key, json.dumps([own, sent, expected]) + "\n")
        for line in self._store.get(key).splitlines():
            other, their_sent, their_expected = json.loads(line)
            for source, target, sends, expects in (
                (own, other, sent[other], their_expected[own]),
                (other, own, their_sent[own], expected[other]),
            ):
                if sends != expects:
                    raise CollectiveError(
                        f"in step {self._step} rank {ranks[source]} sends {sends:,} rows to rank "
                        f"{ranks[target]}, which expects {expects:,}, in {text}"
                    )

    def explained(self, error: RuntimeError, limit: timedelta) -> str:
        """A sentence about an error of a wait: who waits for which call, and who has not made it.

        Empty for other errors, and where the store is gone. Ranks that wait for each other get one sentence,
        that of the first.
        """
        sentence = f"{error}, in step {self._step}" if isinstance(error, MissingRanksError) else ""
        echo = not sentence and any(words in str(error) for words in ECHOES)
        if not sentence and not echo and not any(words in str(error) for words in TIMED_OUT):
            return ""
        with suppress(dist.DistError):
            text, ranks = (sentence, error.ranks) if isinstance(error, MissingRanksError) else self._awaited()
            self._store.set(f"waits/{self._rank}", json.dumps([text, ranks]))
            time.sleep(GATHER_S)
            if echo:  # of a rank that has given up waiting, or else of one that has ended
                self._store.wait(["late"], timedelta(seconds=GATHER_S))
                return self._store.get("late").decode()
            sentence = sentence or f"rank {self._rank} has waited for {limit.total_seconds():g} s for {text}"
            sentence = self._store.compare_set("late", "", sentence + self._doings(ranks)).decode()
            if self._rank == 0:  # the store may end with this process: let the others read it
                time.sleep(GATHER_S)
        return sentence

    def _awaited(self) -> tuple[str, Sequence[int]]:
        """The call that this rank waits for, and the ranks that have not made it."""
        calls: Sequence[CollectiveCall] = self._wire.awaited
        for call in calls:
            ranks = [each for each in call.others if self._last(each)[1].get(call.sequence, 0) < call.number]
            if ranks:
                listed = ", ".join(str(rank) for rank in ranks[:MOST_NAMED])
                more = f" and {len(ranks) - MOST_NAMED} more" if len(ranks) > MOST_NAMED else ""
                return f"{call.text}, which rank {listed}{more} {call.lacks}", ranks
        return (calls[0].text if calls else f"a collective in step {self._step}"), []

    def _doings(self, ranks: Sequence[int]) -> str:
        """Where the ranks are that others wait for, and those that they wait for in turn: "; rank 1 ..."."""
        told: dict[int, str] = {self._rank: ""}
        asked = [*ranks]
        while asked and len(told) <= MOST_NAMED:
            rank = asked.pop(0)
            if rank in told:
                continue
            if self._store.check([key := f"waits/{rank}"]):
                text, others = json.loads(self._store.get(key))
                told[rank] = f"; rank {rank} waits for {text}"
                asked += others
            else:
                told[rank] = f"; rank {rank} last called {self._last(rank)[0]}"
        return "".join(told.values())

    def _last(self, rank: int) -> tuple[str, dict[str, int]]:
        """A rank's last call, and the number of its calls in each sequence."""
        key = f"last/{rank}"
        text, numbers = json.loads(self._store.get(key)) if self._store.check([key]) else ("nothing", {})
        return text, numbers
