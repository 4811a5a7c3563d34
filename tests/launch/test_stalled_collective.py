"""Hangs of ranks whose waits return at once, as NCCL's do: who is late, and for which collective."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack

import pytest
import torch.distributed as dist

from asynchronous_groups import AsyncGroup, AsyncRank
from meshwright.comm.collective_log import GROUPS, CollectiveLog, GroupProgress
from meshwright.comm.heartbeat import BYTES, Beat
from meshwright.launch import hang
from meshwright.launch.hang import Hang, HangWatch
from meshwright.launch.stalled_collective import names, stalled_collective
from meshwright.rank.processes import ProcessState

RANKS = 8


class Host:
    """Ranks of one host that have done ten steps, and wait for their devices in the next."""

    def __init__(self, log: bool = True) -> None:
        self.memory = memoryview(bytearray(RANKS * BYTES))
        self.ranks = [AsyncRank(n, self.memory[n * BYTES : (n + 1) * BYTES], log) for n in range(RANKS)]
        self.world = AsyncGroup("world", [*range(RANKS)])
        self.pairs = [AsyncGroup(f"pair {n}", [n, n + 1]) for n in range(0, RANKS, 2)]
        for rank in self.ranks:
            rank.join(self.world, "shard")
            rank.join(self.pairs[rank.number // 2], "tensor")

    def issue(self, number: int, count: int) -> None:
        """Let a rank issue so many collectives of the backward, and wait for each at once."""
        for _ in range(count):
            self.ranks[number].start(self.world, "shard", "reduce_scatter", 268_000_000).wait()

    def hang(self) -> Hang:
        """The hang that is found once all hosts wait for their devices."""
        with ExitStack() as waits:
            for rank in self.ranks:
                waits.enter_context(rank.heartbeat.waits("the device"))
            settled = time.monotonic() + 0.3
            while time.monotonic() < settled:
                for rank in self.ranks:
                    rank.publish()
                time.sleep(0.02)
            watch = HangWatch({n: n for n in range(RANKS)}, self.memory, 0.0, stuck_seconds=30.0)
            return next(found for now in range(100) if (found := watch.look(float(now))) is not None)


@pytest.fixture(autouse=True)
def sleeping(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(hang, "process_state", lambda pid: ProcessState("S", 0.0))
    monkeypatch.setattr(dist, "get_process_group_ranks", lambda group: group.ranks)
    yield


def begin(host: Host) -> None:
    for rank in host.ranks:
        rank.heartbeat.phase("data", 10)
        rank.heartbeat.phase("backward")


@pytest.mark.parametrize("log", [False, True])
def test_a_rank_that_skips_a_collective_is_named_with_it(log: bool) -> None:
    """Without what has ended, all hosts look alike: each waits for its device after as many calls."""
    host = Host(log)
    begin(host)
    for number in range(RANKS):
        host.issue(number, 17 if number == 5 else 20)
        if number == 5:  # on its way, it has called others
            for _ in range(3):
                host.ranks[number].heartbeat.start()
    found = host.hang()
    if not log:
        assert found.ranks == tuple(range(RANKS)) and "collective 18" not in found.sentence
        return
    assert found.ranks == (5,)
    assert found.sentence.startswith("rank 5 has waited for the device for 30.0 s in phase backward, after")
    assert found.sentence.endswith(
        "rank 5 has not started collective 18 of its group (shard reduce_scatter, 268 MB to send), which "
        "ranks 0-4 and 6-7 wait for"
    )


def test_a_kernel_that_hangs_on_one_device_is_told_by_the_collective_that_others_reached() -> None:
    """Hosts have issued all of it; events say which devices are in it."""
    host = Host()
    begin(host)
    for number, rank in enumerate(host.ranks):
        host.issue(number, 3)
        if number == 2:
            rank.device.kernels.launch(threading.Event().wait)
        host.issue(number, 1)
    found = host.hang()
    assert found.ranks == (2,)
    assert "the device of rank 2 has not reached collective 4 of its group" in found.sentence


def test_a_rank_that_waits_in_another_group_is_not_blamed() -> None:
    """Rank 0 is late for all since it waits for rank 1 in a pair: rank 1 is."""
    host = Host()
    begin(host)
    for number in range(RANKS):
        host.issue(number, 1)
    host.ranks[0].start(host.pairs[0], "tensor", "all_gather", 4096).wait()
    for number in range(2, RANKS):
        host.issue(number, 1)
    found = host.hang()
    assert found.ranks == (1,)
    assert "has not started collective 1 of its group (tensor all_gather, 4.1 KB to send)" in found.sentence


def test_all_that_ended_is_no_stall_and_moves_the_rank() -> None:
    host = Host()
    begin(host)
    rank = host.ranks[0]
    before = Beat.of(host.memory, 0).progress
    for number in range(RANKS):
        host.issue(number, 4)
    until = time.monotonic() + 10
    while time.monotonic() < until:
        rank.publish()
        group, _ = sorted(Beat.of(host.memory, 0).groups, key=lambda each: each.axis)
        if group.finished == 4:
            break
        time.sleep(0.01)
    assert group[1:6] == (RANKS, -1, 4, 4, 4) and group[6:] == (0, "shard", "reduce_scatter")
    assert Beat.of(host.memory, 0).progress != before
    assert stalled_collective({n: Beat.of(host.memory, n).groups for n in (0,)}) is None


def progress(started: int, finished: int, reached: int | None = None, ranks: int = 2) -> GroupProgress:
    at = started if reached is None else reached
    return GroupProgress(1, ranks, -1, started, at, finished, 8, "dp", "all_reduce")


@pytest.mark.parametrize(
    ("of_ranks", "late", "words"),
    [
        ([progress(3, 2), progress(2, 2)], (1,), "rank 9 has not started collective 3"),
        ([progress(3, 2), progress(3, 3)], (0,), "rank 8 has not finished collective 3"),
        ([progress(5, 2), progress(5, 2, 2)], (1,), "the device of rank 9 has not reached collective 3"),
        ([progress(3, 2), progress(3, 2)], (), "which all have reached and none has finished"),
        ([progress(3, 2, ranks=4), progress(3, 2, ranks=4)], (), "2 ranks of other hosts"),
        ([progress(3, 2), progress(2, 1)], (1,), "rank 9 has not finished collective 2"),
    ],
)
def test_the_first_that_is_not_finished_decides(
    of_ranks: list[GroupProgress], late: tuple[int, ...], words: str
) -> None:
    found = stalled_collective({number: [each] for number, each in enumerate(of_ranks)})
    assert found is not None and found.late == late
    assert words in found.sentence(8)


@pytest.mark.parametrize(
    ("ranks", "text"),
    [([3], "rank 3"), ([0, 2], "ranks 0 and 2"), ([0, 1, 2, 5], "ranks 0-2 and 5"), ([0, 1, 2], "ranks 0-2")],
)
def test_ranks_are_listed_in_runs(ranks: list[int], text: str) -> None:
    assert names(ranks) == text


def test_groups_that_were_last_used_are_published_when_there_are_many() -> None:
    memory = memoryview(bytearray(BYTES))
    rank = AsyncRank(0, memory, log=False)
    log = rank.heartbeat.collectives = CollectiveLog(memory[BYTES - GROUPS * 128 :], rank.device.record)
    for number in range(GROUPS + 5):
        rank.start(AsyncGroup(f"{number}", [0]), f"axis{number}", "all_reduce", 1).wait()
    log.publish()
    found = {each.axis for each in Beat.of(memory, 0).groups}
    assert found == {f"axis{number}" for number in range(5, GROUPS + 5)}


def test_a_rank_that_never_sent_is_late_for_who_receives() -> None:
    receives = GroupProgress(7, 2, 9, 1, 1, 0, 0, "pipeline", "receive")
    found = stalled_collective({0: [receives], 1: []}, first=8)
    assert found is not None and found.late == (1,)
    assert found.sentence(8) == (
        "rank 9 has not started collective 1 of its group (pipeline receive), which rank 8 waits for"
    )
