"""Detection of hangs, with a clock, heartbeats and states of processes that the tests set."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from meshwright.comm.heartbeat import BYTES, Heartbeat
from meshwright.launch import hang
from meshwright.launch.hang import IDLE_S, LEARNT, MOST_TIMES, UNLEARNT_STOPPED_S, Hang, HangWatch
from meshwright.launch.start import HostPlace, Job, Start
from meshwright.launch.supervisor import Restarts, Supervisor
from meshwright.rank.processes import ProcessState
from meshwright.rank.shared_memory import SharedMemory

TICK = 0.05
STEP = 0.5


class Host:
    """Two ranks and their supervisor. A rank in `computing` uses a processor; others are idle."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, ranks: int = 2, **limits: Any) -> None:
        memory = memoryview(bytearray(ranks * BYTES))
        self.ranks = [Heartbeat(memory[number * BYTES :]) for number in range(ranks)]
        self.letters = dict.fromkeys(range(ranks), "S")
        self.cpu = dict.fromkeys(range(ranks), 0.0)
        self.computing: set[int] = set()
        self.waits = ExitStack()
        self.now = 1000.0
        monkeypatch.setattr(hang, "process_state", lambda pid: ProcessState(self.letters[pid], self.cpu[pid]))
        self.watch = HangWatch({number: number for number in range(ranks)}, memory, self.now, **limits)

    def look_for(self, seconds: float) -> Hang | None:
        """Look for so long, or until a hang is found."""
        until, tick = self.now + seconds, TICK if seconds < 200 else 10 * TICK
        while self.now < until - TICK / 2:
            self.now += tick
            for number in self.computing:
                self.cpu[number] += tick
            if (found := self.watch.look(self.now)) is not None:
                return found
        return None

    def train(self, steps: int, first: int = 0, seconds: float = STEP) -> None:
        """Steps of all ranks, without an alarm; they stay in the forward of the next one."""
        self.waits.close()
        for step in range(first, first + steps + 1):
            for rank in self.ranks:
                rank.phase("data", step)
                rank.phase("forward")
            if step < first + steps:
                assert self.look_for(seconds) is None

    def wait(self, number: int, label: str = "dp all_reduce") -> None:
        """Let a rank wait for a collective from here on."""
        self.waits.enter_context(self.ranks[number].waits(label))


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> Host:
    return Host(monkeypatch)


@pytest.mark.parametrize("seconds", [0.1, 0.5, 20.0])
def test_the_limit_is_learnt_from_steps_and_not_from_the_start(host: Host, seconds: float) -> None:
    assert host.look_for(100) is None
    host.train(2, seconds=seconds)
    assert host.watch.step_seconds is None
    host.train(8, first=2, seconds=seconds)
    assert host.watch.step_seconds == pytest.approx(seconds, rel=0.1, abs=TICK)


def test_the_step_of_a_checkpoint_is_no_step_that_was_done(host: Host) -> None:
    """Ranks that resume at step 1000 have done none of those."""
    assert host.look_for(10) is None
    host.train(4, first=1000)
    assert host.watch.step_seconds == pytest.approx(STEP, abs=TICK)


@pytest.mark.parametrize("number", [0, 1])
def test_a_stopped_rank_is_named_within_two_steps_and_a_second(host: Host, number: int) -> None:
    host.train(5)
    host.letters[number] = "T"
    host.wait(1 - number)
    found = host.look_for(2 * STEP + 1 + 2 * TICK)
    assert found is not None and found.ranks == (number,)
    assert f"rank {number} has been stopped for 2.0 s in phase forward, after 5 steps" in found.sentence


@pytest.mark.parametrize("phase", ["save", "evaluate", "end"])
def test_a_rank_that_is_stopped_outside_of_steps_is_named_as_soon(host: Host, phase: str) -> None:
    host.train(5)
    for rank in host.ranks:
        rank.phase(phase)
    host.letters[0] = "T"
    found = host.look_for(2 * STEP + 1 + 2 * TICK)
    assert found is not None and found.ranks == (0,) and f"in phase {phase}" in found.sentence


def test_before_a_step_time_is_known_a_stopped_rank_has_ten_seconds(host: Host) -> None:
    host.letters[0] = "T"
    assert host.look_for(9.9) is None
    found = host.look_for(0.3)
    assert found is not None and found.ranks == (0,) and "in phase start" in found.sentence


def test_the_step_time_of_an_earlier_start_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    host = Host(monkeypatch, step_times=[STEP] * LEARNT)
    host.letters[0] = "T"
    assert host.look_for(2 * STEP + 1 + 2 * TICK) is not None
    host = Host(monkeypatch, step_times=[100.0] * LEARNT)
    host.train(5)
    assert host.watch.step_seconds == pytest.approx(STEP, abs=TICK)


def test_steps_are_counted_over_starts_of_which_none_sees_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    times: Sequence[float] = ()
    for start in range(LEARNT):
        host = Host(monkeypatch, step_times=times)
        assert host.watch.step_seconds is None
        host.train(1, first=start)
        assert host.look_for(TICK) is None
        times = host.watch.step_times
        assert times == pytest.approx([STEP] * (start + 1), abs=TICK)
    host = Host(monkeypatch, step_times=times)
    host.train(0, first=LEARNT)
    host.wait(1)
    assert host.look_for(IDLE_S - 0.2) is None
    found = host.look_for(2 * STEP + 2)
    assert found is not None and found.ranks == (0,)


@pytest.mark.parametrize("steps", [1, LEARNT - 1])
@pytest.mark.parametrize(("seconds", "idle", "waiting"), [(STEP, 60, 60), (8.0, 60, 80), (20.0, 100, 200)])
@pytest.mark.parametrize("earlier", [False, True])
def test_few_steps_give_a_limit_by_the_longest(
    monkeypatch: pytest.MonkeyPatch, steps: int, seconds: float, idle: float, waiting: float, earlier: bool
) -> None:
    """Steps of this start or of earlier ones."""
    before = [seconds, *[2 * TICK] * (steps - 1)]
    for computing, waits, limit in (
        ({0}, {1}, 3000.0),
        (set[int](), {1}, idle),
        (set[int](), {0, 1}, waiting),
    ):
        host = Host(monkeypatch, step_times=before if earlier else ())
        host.train(0)
        for number, each in enumerate(before if not earlier else ()):
            host.train(1, first=number, seconds=each)
        host.computing = computing
        for number in waits:
            host.wait(number)
        assert host.look_for(limit - 1) is None
        if not computing:  # of a rank at work it is seen from the limit for stopped ones on if it computes
            assert host.look_for(2 + UNLEARNT_STOPPED_S * (len(waits) == 1)) is not None


def test_steps_shorter_than_the_time_between_looks_are_all_counted(host: Host) -> None:
    host.train(0)
    assert host.look_for(TICK) is None
    for rank in host.ranks:
        rank.phase("data", LEARNT)
    assert host.look_for(TICK) is None
    assert host.watch.step_times == pytest.approx([TICK / LEARNT] * LEARNT)
    assert host.watch.step_seconds == pytest.approx(TICK / LEARNT)


@pytest.mark.parametrize(("first", "limit"), [(4.0, 20), (STEP, IDLE_S)])
def test_the_first_step_of_a_start_may_take_as_long_as_that_of_the_one_before(
    monkeypatch: pytest.MonkeyPatch, first: float, limit: float
) -> None:
    """Where it compiles again, in other processes, the rank is idle meanwhile."""
    host = Host(monkeypatch)
    host.train(1, seconds=first)
    host.train(2 * MOST_TIMES, first=1, seconds=0.1)
    assert len(host.watch.step_times) == MOST_TIMES
    host = Host(monkeypatch, step_times=host.watch.step_times)
    host.train(0, first=99)
    host.wait(1)
    assert host.look_for(limit - 0.2) is None
    assert host.look_for(2) is not None
    host = Host(monkeypatch, step_times=host.watch.step_times)
    host.train(LEARNT, first=99, seconds=0.1)
    host.wait(1)
    assert host.look_for(IDLE_S + 2) is not None


def test_a_rank_that_is_stopped_for_a_moment_is_no_hang(host: Host) -> None:
    host.train(5)
    host.letters[0] = "T"
    assert host.look_for(1.9) is None
    host.letters[0] = "S"
    host.train(5, first=5)


@pytest.mark.parametrize(("seconds", "limit"), [(STEP, 10), (6.0, 30)])
def test_an_idle_rank_that_others_wait_for_is_stuck(host: Host, seconds: float, limit: float) -> None:
    host.train(5, seconds=seconds)
    host.wait(1)
    assert host.look_for(limit - 0.2) is None
    found = host.look_for(2 * seconds + 3)
    assert found is not None and found.ranks == (0,)
    assert "rank 0 has not moved for " in found.sentence


def test_a_rank_that_gets_stuck_after_it_has_computed_is_noticed_as_soon(host: Host) -> None:
    host.train(5, seconds=4.0)
    host.wait(1)
    host.computing = {0}
    assert host.look_for(8) is None
    host.computing = set()
    found = host.look_for(5 * 4 + 3)
    assert found is not None and found.ranks == (0,)


def test_a_cut_link_may_heal(host: Host) -> None:
    """All ranks wait for 10 s, and go on."""
    host.train(5)
    for number in (0, 1):
        host.wait(number)
    assert host.look_for(10) is None
    host.train(5, first=5)


def test_ranks_that_wait_for_different_collectives_are_told_and_the_one_behind_is_named(host: Host) -> None:
    host.train(5)
    host.ranks[0].start()
    host.wait(0, "world scalars")
    host.wait(1)
    assert host.look_for(59) is None
    found = host.look_for(2)
    assert found is not None and found.ranks == (1,)
    assert "rank 1 has waited for dp all_reduce for 60" in found.sentence


def test_a_rank_that_is_stuck_before_it_reduces_is_named(host: Host) -> None:
    host.train(5)
    for rank in host.ranks:
        rank.phase("reduce")
    host.wait(0, "world scalars")
    found = host.look_for(15)
    assert found is not None and found.ranks == (1,)
    assert "rank 1 has not moved for 1" in found.sentence


def test_collectives_are_counted_within_a_step(host: Host) -> None:
    """Loading, and the lease of the run, take more of them on some ranks than on others."""
    for _ in range(40):
        host.ranks[1].start()
    host.train(5)
    host.ranks[0].start()
    host.wait(0, "world scalars")
    host.wait(1)
    found = host.look_for(61)
    assert found is not None and found.ranks == (1,)
    assert "after 5 steps and 1 collective of the next" in found.sentence


def test_ranks_that_wait_for_the_same_collective_are_all_named(host: Host) -> None:
    host.train(5)
    for number in (0, 1):
        host.wait(number)
    found = host.look_for(61)
    assert found is not None and found.ranks == (0, 1)
    assert "rank 0 and rank 1 have waited for dp all_reduce" in found.sentence


@pytest.mark.parametrize("letter", ["R", "D"])
def test_a_rank_that_computes_or_reads_a_disk_is_slow_and_not_hung(host: Host, letter: str) -> None:
    host.train(5)
    host.wait(1)
    host.letters[0] = letter
    host.computing = {0} if letter == "R" else set()
    assert host.look_for(299) is None
    found = host.look_for(2)
    assert found is not None and found.ranks == (0,)


def test_the_first_steps_may_take_long(host: Host) -> None:
    """As torch.compile's, before a step time is known."""
    host.train(0)
    host.wait(1)
    host.computing = {0}
    assert host.look_for(3000) is None
    host.computing = set()
    assert host.look_for(290) is None
    found = host.look_for(20)
    assert found is not None and found.ranks == (0,)


@pytest.mark.parametrize("computing", [{0}, set()])
def test_tokenizing_at_the_start_for_an_hour_raises_no_alarm(host: Host, computing: set[int]) -> None:
    host.computing = computing
    assert host.look_for(3600) is None


@pytest.mark.parametrize(("phase", "limit"), [("evaluate", 600), ("save", 1800), ("end", 1800)])
def test_other_phases_have_limits_of_their_own(host: Host, phase: str, limit: float) -> None:
    host.train(5)
    host.ranks[0].phase(phase)
    host.wait(1)
    assert host.look_for(limit - 1) is None
    found = host.look_for(2)
    assert found is not None and found.ranks == (0,) and f"in phase {phase}" in found.sentence


def test_a_supervisor_that_slept_raises_no_alarm(host: Host) -> None:
    """Its clock jumps, and the ranks moved meanwhile, or slept with it and go on soon."""
    host.train(5)
    host.now += 3600
    assert host.look_for(0.4) is None
    host.train(1, first=5)
    host.wait(1)
    for _ in range(5):
        host.now += 3600
        assert host.look_for(0.4) is None
    host.train(1, first=6)


@pytest.mark.parametrize("number", [0, 1])
def test_a_rank_under_a_debugger_is_no_hang_and_neither_are_those_that_wait_for_it(
    host: Host, number: int
) -> None:
    host.train(5)
    host.letters[number] = "t"
    host.wait(1 - number)
    assert host.look_for(3600) is None
    host.letters[number] = "S"
    assert host.look_for(1) is None
    host.train(5, first=6)


def test_a_rank_that_has_ended_is_not_waited_for(host: Host) -> None:
    host.train(5)
    for rank in host.ranks:
        rank.phase("end")
    host.watch.ended(0)
    host.letters[1] = "T"
    found = host.look_for(11)
    assert found is not None and found.ranks == (1,)
    host.watch.ended(1)
    assert host.look_for(100) is None


@pytest.mark.parametrize("computing", [{0}, set()])
def test_a_limit_of_the_users_replaces_the_learnt_ones(
    monkeypatch: pytest.MonkeyPatch, computing: set[int]
) -> None:
    host = Host(monkeypatch, stuck_seconds=100.0)
    host.train(5)
    host.wait(1)
    host.computing = computing
    assert host.look_for(99) is None
    found = host.look_for(2)
    assert found is not None and found.ranks == (0,)


def test_the_step_of_a_hang_is_that_of_its_sentence(host: Host, tmp_path: Path) -> None:
    """Ranks that go on until they are killed may get further."""
    host.train(5)
    host.ranks[1].phase("data", 6)
    host.wait(1)
    found = host.look_for(20)
    assert found is not None and "after 5 steps" in found.sentence and found.step == 5
    with SharedMemory(2) as memory:
        made = Start(0, Job([], 2), HostPlace("127.0.0.1", 1), memory, 0.0, tmp_path)
        made._hang = found
        Heartbeat(memory.beats[BYTES:]).phase("data", 8)
        events: list[dict[str, Any]] = []
        supervisor = Supervisor(Job([], 2), Restarts([], lambda _, fields: events.append(fields)))
        with pytest.warns(UserWarning, match="after 5 steps"):
            assert supervisor._final(made._ended([]), []) is None
    assert [(event["step"], event["furthest"]) for event in events] == [(5, 8)]


def test_many_ranks_move_on_without_an_alarm(monkeypatch: pytest.MonkeyPatch) -> None:
    host = Host(monkeypatch, ranks=8)
    host.train(200, seconds=0.1)
    host.letters[5] = "T"
    found = host.look_for(2)
    assert found is not None and found.ranks == (5,)
