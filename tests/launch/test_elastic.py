"""Supervision of one of several hosts, whose ranks train nothing; the other is but its words."""

from __future__ import annotations

import json
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from meshwright.comm.authentication import shared_secret
from meshwright.launch import elastic
from meshwright.launch import start as generation
from meshwright.launch.elastic import ElasticJob, HostSupervisor
from meshwright.launch.membership import LOST_S, Host, HostWorld, Membership
from meshwright.launch.start import End, Job, Start
from meshwright.rank.env import LOOPBACK
from meshwright.rank.failure import Outcome
from meshwright.rank.shared_memory import SharedMemory
from meshwright.spec.sections import RecoverySpec

HERE = Path(__file__).parent


class OtherHost(threading.Thread):
    """A host that says "ready" until it is stopped, and that has no ranks."""

    def __init__(self, job: ElasticJob) -> None:
        super().__init__()
        self.host = Host("z", "127.0.0.1", LOOPBACK, 1)
        self.members: Membership = job.membership(self.host, shared_secret(job.folder / elastic.SECRET_FILE))
        self.over = threading.Event()

    def run(self) -> None:
        while not self.over.wait(0.2):
            self.members.look(time.monotonic())
            self.host = replace(self.host, beat=self.host.beat + 1)
            self.members.write(self.host)
        self.members.remove("z")
        self.members.close()


@pytest.fixture
def events() -> list[tuple[str, dict[str, Any]]]:
    return []


@pytest.fixture(params=["folder", "store"])
def rendezvous(request: pytest.FixtureRequest) -> str | None:
    """Where hosts meet, as `--rendezvous` says it."""
    if request.param == "folder":
        return None
    with socket.create_server(("127.0.0.1", 0)) as free:
        return f"127.0.0.1:{free.getsockname()[1]}"


@pytest.fixture
def alone(
    tmp_path: Path, events: list[tuple[str, dict[str, Any]]], rendezvous: str | None
) -> Iterator[HostSupervisor]:
    """Supervisor of host "a" of a run on two to three hosts, which has told nothing yet."""
    job = Job([], 1)
    folder = tmp_path / "hosts"
    folder.mkdir()
    own = Host("a", "127.0.0.1", LOOPBACK, 1)
    told = ElasticJob(
        folder, [1, 2, 3], lambda _first, _hosts: job, lambda kind, fields: events.append((kind, fields)),
        rendezvous,
    )  # fmt: skip
    made = HostSupervisor(told, own)
    made.members.look(0.0)
    yield made
    made.members.close()


def test_of_a_lost_host_and_the_connections_that_broke_with_it_the_host_is_told(
    alone: HostSupervisor, events: list[tuple[str, dict[str, Any]]]
) -> None:
    echo = Outcome(1, "rank 0 of 2 failed with RuntimeError: Connection closed by peer")
    failed = replace(alone.host, state="failed", generation=0, steps=7, outcome=echo)
    other = replace(alone.host, name="b", state="running", generation=0, steps=7)
    world = alone.members.world = HostWorld(0, ("a", "b"), 1, "127.0.0.1", 1)
    alone.members.hosts = {"a": failed, "b": other}
    for now in (10.0, 12.5, 10.0 + LOST_S):
        alone._lead(world, 1, now)
        assert events == []
    alone.members.hosts = {"a": failed}
    with pytest.warns(
        UserWarning, match="^host b gave no sign of life for 5 s; the ranks are started"
    ) as warned:
        alone._lead(world, 1, 10.0 + LOST_S + 0.3)
    assert len(warned) == 1
    ((kind, fields),) = events
    assert (kind, fields["host"], fields["message"]) == (
        "host_lost", "b", "host b gave no sign of life for 5 s",
    )  # fmt: skip


def test_at_its_third_failure_a_host_makes_room_for_a_spare(
    alone: HostSupervisor, events: list[tuple[str, dict[str, Any]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    alone.job = replace(alone.job, sizes=[2])
    made: list[HostWorld] = []
    monkeypatch.setattr(alone.members, "propose", made.append)
    crash = Outcome(137, "rank 1 of 2 was ended by SIGKILL")
    spare = replace(alone.host, name="c")
    for number in range(3):
        world = alone.members.world = HostWorld(number, ("a", "b"), 1, "127.0.0.1", 1)
        running = replace(alone.host, state="running", generation=number, steps=9 * number + 7)
        failed = replace(running, name="b", state="failed", outcome=crash)
        alone.members.hosts = {"a": running, "b": failed, "c": spare}
        with pytest.warns(UserWarning, match="SIGKILL; the ranks are started again$"):
            alone._lead(world, number + 1, time.monotonic() + 100.0)
    assert [world.number for world in made] == [1, 2, 3]
    assert [world.hosts for world in made] == [("a", "b"), ("a", "b"), ("a", "c")]
    assert all(world.probe for world in made)
    assert [kind for kind, _ in events] == ["failure"] * 3 + ["host_lost", "host_joined"]
    assert events[3][1]["message"] == (
        "host b is left out of the next start, in which another one takes its place: it has failed 3 times"
    )
    assert [alone.members.failures(name) for name in "abc"] == [0, 3, 0]


def test_a_host_that_waits_says_for_whom(alone: HostSupervisor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(elastic, "SILENT_S", 0.3)
    alone.job = replace(alone.job, sizes=[2, 3])
    asked: list[int] = []
    user = threading.Timer(0.8, lambda: asked.append(signal.SIGTERM))
    user.start()
    with pytest.warns(UserWarning) as warned:
        assert isinstance(alone._next_world(asked), Outcome)
    user.join()
    assert [str(each.message) for each in warned] == [
        "1 of 2 to 3 hosts is here (a); the run waits up to 600 s for 1 more: start the same command there"
    ]


def test_the_users_signal_does_not_end_ranks_that_save_for_a_host_that_joins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rendezvous: str | None
) -> None:
    monkeypatch.setenv("PYTHONPATH", f"{HERE}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    monkeypatch.setattr(elastic, "GATHER_S", 0.0)
    monkeypatch.setattr(generation, "OTHER_ECHO_SECONDS", 0.1)
    monkeypatch.setattr(generation, "AT_ONCE_S", 0.1)
    plan = json.dumps({"0/0/0": "hold signals", "0/0/2": "save slowly"})
    job = Job([str(tmp_path), "5", plan], 1, "deeds", recovery=RecoverySpec(grace_seconds=20))
    events: list[tuple[str, dict[str, Any]]] = []
    folder = tmp_path / "hosts"
    own = Host("a", "127.0.0.1", LOOPBACK, 1)
    told = ElasticJob(
        folder, [1, 2], lambda _first, _hosts: job, lambda kind, fields: events.append((kind, fields)),
        rendezvous,
    )  # fmt: skip
    supervisor = HostSupervisor(told, own)
    other = OtherHost(told)

    def join_and_ask_for_the_end() -> None:
        while not (tmp_path / "starts").exists():
            time.sleep(0.01)
        other.start()
        while supervisor._pending is None or not supervisor._pending.stop:
            time.sleep(0.01)
        time.sleep(0.5)
        os.kill(os.getpid(), signal.SIGTERM)

    user = threading.Thread(target=join_and_ask_for_the_end)
    user.start()
    try:
        outcome = supervisor.run()
    finally:
        user.join()
        other.over.set()
        other.join()
    assert (tmp_path / "saved").exists()
    assert outcome.stopped and outcome.code == 128 + signal.SIGTERM
    assert not [kind for kind, _ in events if kind == "failure"]


def test_the_times_of_steps_are_known_to_the_next_start_unless_a_host_joins(
    alone: HostSupervisor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that joins has compiled nothing yet."""
    given: list[tuple[float, ...]] = []

    class SeenSteps(Start):
        def run(self, *_: Any) -> End:
            given.append(self.step_times)
            self._step_times = (*self.step_times, float(len(given)))
            return End(Outcome(), 0, 0.0)

    monkeypatch.setattr(elastic, "Start", SeenSteps)
    monkeypatch.setattr(elastic, "Zygote", lambda *_: None)
    with SharedMemory(1, peers=True) as memory:
        for number, hosts in enumerate((["a", "b"], ["a", "b"], ["a"], ["a", "c"], ["a", "c"])):
            world = HostWorld(number, hosts, 1, "127.0.0.1", 1)
            alone._run_once(world, memory, 0.0, tmp_path, [])
    assert given == [(), (1.0,), (1.0, 2.0), (), (4.0,)]
