"""Detection of slow ranks, with a clock and heartbeats that the tests set."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time

import pytest

from meshwright.comm.heartbeat import BYTES, Heartbeat
from meshwright.launch import slow
from meshwright.launch.slow import Slow, SlowWatch
from meshwright.rank.processes import queued_seconds

TICK = 0.05


class Host:
    """Ranks that compute for `compute` seconds of each step, and wait for the slowest in the rest."""

    def __init__(self, compute: list[float], stages: int = 1, noise: float = 0.0) -> None:
        memory = memoryview(bytearray(len(compute) * BYTES))
        self.ranks = [Heartbeat(memory[number * BYTES :]) for number in range(len(compute))]
        self.compute, self.noise = compute, noise
        self.now, self.step, self.looked = 1000.0, 0, 1000.0
        self.watch = SlowWatch(memory, len(compute), self.now, len(compute) // stages)
        self.draw = random.Random(7)

    def train(self, seconds: float, overlap: float = 0.0) -> list[Slow]:
        """Train for so long; the supervisor looks between and within steps."""
        found, until = [], self.now + seconds
        while self.now < until:
            times = [each * (1 + self.noise * self.draw.random()) for each in self.compute]
            for rank in self.ranks:
                rank.phase("data", self.step)
                rank.phase("forward")
            longest = max(times) + overlap
            found += self._pass(longest / 2)
            for rank, each in zip(self.ranks, times, strict=True):
                rank._waited += int((longest - each) * 1e9)
                rank.phase("reduce")
            found += self._pass(longest / 2)
            self.step += 1
        return found

    def _pass(self, seconds: float) -> list[Slow]:
        found, until = [], self.now + seconds
        while self.looked + TICK <= until:
            self.looked += TICK
            found += self.watch.look(self.looked)
        self.now = until
        return found


@pytest.mark.parametrize("step", [0.02, 0.3, 2.0])
@pytest.mark.parametrize("number", [0, 1])
def test_a_slow_rank_of_two_is_named_once(number: int, step: float) -> None:
    host = Host([step * 1.4 if n == number else step for n in range(2)])
    assert host.train(max(3 * 5, 3 * 20 * 1.4 * step)) == []  # three windows
    (found,) = host.train(max(15, 60 * step))
    assert found.rank == number
    assert found.seconds == pytest.approx(1.4 * step, rel=0.1)
    assert found.others == pytest.approx(step, rel=0.1)
    assert host.train(max(60, 200 * step)) == []


@pytest.mark.parametrize(("queued", "named"), [([0.0, 0.2], []), ([0.1, 0.1], [1]), ([0.3, 0.0], [1])])
def test_a_rank_that_waits_for_a_processor_is_not_slow(
    monkeypatch: pytest.MonkeyPatch, queued: list[float], named: list[int]
) -> None:
    """Others use the host: rank 1 takes 0.4 s of each step, and rank 0 0.2 s or more."""
    host = Host([max(0.2, 0.2 + queued[0]), 0.4 + queued[0]])
    share = [each / max(host.compute) for each in queued]
    monkeypatch.setattr(slow, "queued_seconds", lambda pid: (host.looked - 1000.0) * share[pid])
    host.watch = SlowWatch(host.watch._heartbeats, 2, host.now, pids=[0, 1])
    assert [found.rank for found in host.train(120)] == named


def test_the_kernel_tells_the_wait_for_a_processor() -> None:
    core = min(os.sched_getaffinity(0))
    program = f"import os\nos.sched_setaffinity(0, [{core}])\nwhile True: pass"
    rivals = [subprocess.Popen([sys.executable, "-c", program]) for _ in range(2)]
    try:
        wait = time.monotonic() + 20
        while sum(queued_seconds(rival.pid) for rival in rivals) < 0.2 and time.monotonic() < wait:
            time.sleep(0.05)
        assert sum(queued_seconds(rival.pid) for rival in rivals) >= 0.2
    finally:
        for rival in rivals:
            rival.kill()
            rival.wait()
    assert queued_seconds(rivals[0].pid) == 0.0  # it is gone


def test_a_slow_rank_of_eight_is_named_and_equal_ones_are_not() -> None:
    host = Host([0.3] * 8, noise=0.1)
    assert host.train(300) == []
    host.compute[5] = 0.45
    assert [found.rank for found in host.train(60)] == [5]


def test_noise_is_no_slow_rank() -> None:
    """Steps take up to twice as long, on any rank."""
    assert Host([0.1, 0.1], noise=1.0).train(600) == []


def test_ranks_that_wait_long_for_each_other_are_not_slow() -> None:
    assert Host([0.01, 0.012]).train(60, overlap=0.5) == []


def test_rank_0_may_write_the_record() -> None:
    assert Host([0.006, 0.003]).train(60) == []


def test_a_rank_that_recovers_and_gets_slow_again_is_named_again() -> None:
    host = Host([0.2, 0.3])
    assert [found.rank for found in host.train(60)] == [1]
    host.compute = [0.2, 0.2]
    assert host.train(60) == []
    host.compute = [0.2, 0.3]
    assert [found.rank for found in host.train(60)] == [1]


def test_slow_for_a_moment_is_not_slow() -> None:
    host = Host([0.2, 0.2])
    host.train(30)
    host.compute = [0.2, 0.4]
    assert host.train(15) == []
    host.compute = [0.2, 0.2]
    assert host.train(60) == []


def test_ranks_of_different_stages_do_different_work() -> None:
    assert Host([0.2, 0.2, 0.4, 0.4], stages=2).train(60) == []
    assert Host([0.2, 0.4], stages=2).train(60) == []
    assert [found.rank for found in Host([0.2, 0.3, 0.4, 0.4], stages=2).train(60)] == [1]


def test_saving_and_evaluating_do_not_count() -> None:
    """Rank 0 saves for three seconds after every five of steps, and the other one waits for it."""
    host = Host([0.2, 0.2])
    for _ in range(20):
        assert host.train(5) == []
        host.ranks[0].phase("save")
        host.ranks[1].phase("save")
        assert host._pass(3) == []
        host.ranks[1]._waited += int(3e9)
        host.ranks[1].phase("save")
        host.now += 1e-6


def test_a_supervisor_that_slept_starts_a_window_anew() -> None:
    host = Host([0.2, 0.2])
    for _ in range(10):
        assert host.train(4) == []
        host.now += 60  # the ranks computed, and nobody looked
        host.looked = host.now
        host.ranks[0]._waited += int(50e9)


def test_ranks_of_a_second_host_are_compared_within_their_stage_and_named_by_their_number() -> None:
    """A second host has ranks 4 to 7 of eight in two stages: one whole stage, whose rank 6 is slow."""
    host = Host([0.1, 0.1, 0.2, 0.1])
    host.watch = SlowWatch(host.watch._heartbeats, 4, host.now, peers=4, first=4)
    (found,) = host.train(60.0)
    assert found.rank == 6
    host = Host([0.1, 0.1, 0.2, 0.1])
    host.watch = SlowWatch(host.watch._heartbeats, 4, host.now, peers=1, first=4)
    assert host.train(60.0) == []  # each does work of its own
