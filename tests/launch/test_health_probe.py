"""The health probe before ranks are started again: what it finds, and what follows; ranks train nothing."""

from __future__ import annotations

import json
import os
import signal
import tempfile
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import small
from meshwright.launch import elastic, health_checks, health_probe
from meshwright.launch import start as generation
from meshwright.launch.elastic import ElasticJob, HostSupervisor
from meshwright.launch.membership import FAILS_OFTEN, Host, HostWorld
from meshwright.launch.membership_folder import FolderMembership
from meshwright.launch.start import Job, ProbedRun
from meshwright.launch.supervisor import Restarts, Supervisor
from meshwright.parallel.precision import DTYPES
from meshwright.rank.env import LOOPBACK, Worker
from meshwright.rank.failure import FATAL, Outcome
from meshwright.runs.record import read_run
from meshwright.spec.errors import UnhealthyHostError
from meshwright.spec.sections import RecoverySpec
from supervised import Fault, check_as_if_unfaulted, spec_of, train
from unhealthy import ENVIRONMENT

HERE, TESTS = Path(__file__).parent, Path(__file__).parents[1]
PRELOAD = ("meshwright.launch.health_checks",)
KILLED = {"0/0/3": "kill"}
Events = list[tuple[str, dict[str, Any]]]

FINDINGS = {
    "product/1": "1 of 1,048,576 numbers of a product in float32 on the processor, of rank 1 of this host, ",
    "sum/1": "1 of 1,024 sums of an all-reduce of this host's 2 ranks are wrong on rank 1; take it out of ",
    "memory/0": "1 KB of its memory are free, and parameters, gradients and moments of its ranks take ",
    "disk/0": "(Input/output error); look at the disk or its server",
    "stuck/1": "its checks have not ended within 8 s (rank 0 at: a collective, rank 1 at: a collective); ",
    "crash/1": "rank 1 of 2 was ended by SIGBUS; take it out of the run, and look at its memory, devices ",
}
"""Words of the sentence for each fault of the program `unhealthy`."""


@pytest.fixture(autouse=True)
def planted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Probes run the program `unhealthy`, without a fault as yet; ranks find theirs."""
    monkeypatch.setenv(
        "PYTHONPATH", os.pathsep.join([str(HERE), str(TESTS), os.environ.get("PYTHONPATH", "")])
    )
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setattr(health_probe, "CHECKS", "unhealthy")
    monkeypatch.setattr(generation, "ECHO_S", 0.1)


def job_of(folder: Path, plan: dict[str, str], ranks: int = 2) -> Job:
    """Ranks that take five steps and do what the plan says, on a host that is probed for a small run."""
    argv, probed = [str(folder), "5", json.dumps(plan)], ProbedRun(small.spec_of({}), folder)
    return Job(argv, ranks, "deeds", PRELOAD, RecoverySpec(), health=probed)


def run(folder: Path, plan: dict[str, str]) -> tuple[Outcome, Events, HostStarts]:
    events: Events = []
    job = job_of(folder, plan)
    restarts = Restarts(job.argv, lambda kind, fields: events.append((kind, fields)))
    return Supervisor(job, restarts).run(), events, HostStarts(folder)


class HostStarts:
    """Starts of ranks, by generation."""

    def __init__(self, folder: Path) -> None:
        lines = (folder / "starts").read_text().splitlines()
        self.generations = len({line.split()[0] for line in lines})


def test_a_healthy_host_starts_its_ranks_again_and_is_not_probed_twice_in_a_moment(tmp_path: Path) -> None:
    outcome, events, starts = run(tmp_path, {**KILLED, "1/1/4": "kill"})
    assert (outcome, starts.generations) == (Outcome(), 3)
    assert [kind for kind, _ in events] == ["failure", "healthy", "failure"]
    healthy = events[1][1]
    assert (healthy["generation"], healthy["hosts"]) == (1, 1) and 0 < healthy["seconds"] < 30


@pytest.mark.parametrize(
    "fault",
    [
        pytest.param(fault, marks=pytest.mark.full if fault in ("disk/0", "stuck/1") else ())
        for fault in FINDINGS
    ],
)
def test_what_is_wrong_ends_the_run_with_host_cause_and_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    monkeypatch.setenv(ENVIRONMENT, fault)
    if fault == "stuck/1":
        monkeypatch.setattr(health_probe, "PROBE_S", 8.0)
    outcome, events, starts = run(tmp_path, KILLED)
    assert starts.generations == 1
    assert outcome.code == UnhealthyHostError.code and not outcome.final
    assert outcome.sentence.startswith(f"host {os.uname().nodename} has failed its health probe: ")
    assert FINDINGS[fault] in outcome.sentence
    kinds = [kind for kind, _ in events]
    assert kinds == ["failure", "unhealthy"]
    assert events[1][1]["message"] == outcome.sentence and events[1][1]["host"] == os.uname().nodename
    with pytest.raises(UnhealthyHostError):
        outcome.raise_for_failure()
    assert outcome.code not in FATAL  # a job is started again, maybe on another host


def test_a_signal_ends_a_probe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ENVIRONMENT, "stuck/1")

    def ask_for_the_end() -> None:
        while not list(tmp_path.glob("tmp/*/probe-1/first/1")):
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGTERM)

    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    user = threading.Thread(target=ask_for_the_end)
    user.start()
    outcome, events, _ = run(tmp_path, KILLED)
    user.join()
    assert outcome.stopped and outcome.code == 128 + signal.SIGTERM
    assert [kind for kind, _ in events] == ["failure"]


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=str)
def test_products_of_a_good_device_are_exact(dtype: torch.dtype) -> None:
    for rank in range(2):
        health_checks.check_product(dtype, torch.device("cpu"), Worker(rank, 2, rank, 2))


@pytest.mark.full  # the first test has ranks that go on after their probe, and `test_recovery.py` a run
def test_a_run_goes_on_after_its_probe_as_if_nothing_was(
    corpus: Path, whole: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(health_probe, "CHECKS", "meshwright.launch.health_checks")
    result, _ = train(spec_of(corpus), tmp_path / "run", [Fault(1, "forward", 13)])
    check_as_if_unfaulted(tmp_path / "run", result, whole)
    print([e for e in read_run(tmp_path / "run").events if e["kind"] == "healthy"])
    assert [event["hosts"] for event in read_run(tmp_path / "run").events if event["kind"] == "healthy"] == [
        1
    ]


@pytest.mark.full  # the jobs of `test_restarts.py` have no probe
def test_a_probe_can_be_turned_off(
    corpus: Path, whole: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(ENVIRONMENT, "crash/0")
    spec = spec_of(corpus, **{"recovery.health_probe": "false"})
    result, _ = train(spec, tmp_path / "run", [Fault(1, "forward", 13)])
    check_as_if_unfaulted(tmp_path / "run", result, whole)


# Several hosts ------------------------------------------------------------------------------------------


class Spare(threading.Thread):
    """A host that waits to take part, until it is stopped, and that has no ranks."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.members, self.host = FolderMembership(folder, "z"), Host("z", "127.0.0.1", LOOPBACK, 1)
        self.over = threading.Event()

    def run(self) -> None:
        while not self.over.wait(0.2):
            self.host = replace(self.host, beat=self.host.beat + 1)
            self.members.write(self.host)


def supervise(folder: Path, events: Events, monkeypatch: pytest.MonkeyPatch) -> Outcome:
    """Run host a, whose ranks fail once, of a run on one host."""
    monkeypatch.setattr(elastic, "GATHER_S", 0.0)
    monkeypatch.setattr(elastic, "PATIENT_S", 0.0)
    job = job_of(folder, KILLED, ranks=1)
    told = ElasticJob(
        folder / "hosts", [1], lambda *_: job, lambda kind, fields: events.append((kind, fields))
    )
    return HostSupervisor(told, Host("a", "127.0.0.1", LOOPBACK, 1)).run()


def test_a_healthy_host_of_several_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    events: Events = []
    assert supervise(tmp_path, events, monkeypatch) == Outcome()
    assert [kind for kind, _ in events if kind != "healthy"] == ["failure"]
    assert FolderMembership(tmp_path / "hosts", "a").failures("a") == 1


def test_hosts_that_have_all_passed_are_told_once_with_the_slowest(tmp_path: Path) -> None:
    events: Events = []
    told = ElasticJob(
        tmp_path, [2], lambda *_: Job([], 1), lambda kind, fields: events.append((kind, fields))
    )
    leader = HostSupervisor(told, Host("a", "127.0.0.1", LOOPBACK, 1))
    world = leader.members.world = HostWorld(7, ("a", "b"), 1, origin=4, probe=True)
    passed = replace(leader.host, state="running", generation=7, probed=2.0)
    probing = replace(passed, name="b", probed=None)
    before = replace(passed, name="b", generation=6)
    for other in (probing, before):
        leader.members.hosts = {"a": passed, "b": other}
        leader._lead(world, 8, 10.0)
        assert events == []
    leader.members.hosts = {"a": passed, "b": replace(probing, probed=3.0)}
    for now in (11.0, 12.0):
        leader._lead(world, 8, now)
    assert events == [("healthy", {"generation": 3, "seconds": 3.0, "hosts": 2})]
    leader._store.close()


def test_an_unhealthy_host_without_another_ends_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(ENVIRONMENT, "product/0")
    events: Events = []
    outcome = supervise(tmp_path, events, monkeypatch)
    assert outcome.code == UnhealthyHostError.code
    assert outcome.sentence.startswith("host a has failed its health probe: 1 of ")
    assert [(kind, fields["host"]) for kind, fields in events] == [("failure", "a"), ("unhealthy", "a")]
    members = FolderMembership(tmp_path / "hosts", "a")
    members.look(0.0)
    assert members.world is not None and members.world.end == outcome
    assert members.failures("a") == 2


def test_an_unhealthy_host_is_left_out_where_there_is_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(ENVIRONMENT, "product/0")
    events: Events = []
    (tmp_path / "hosts").mkdir()
    spare = Spare(tmp_path / "hosts")
    spare.start()
    try:
        with pytest.warns(UserWarning) as warned:
            outcome = supervise(tmp_path, events, monkeypatch)
    finally:
        spare.over.set()
        spare.join()
    assert outcome.code == UnhealthyHostError.code  # of the launcher on that host; the run has no end
    members = FolderMembership(tmp_path / "hosts", "z")
    members.look(0.0)
    assert members.world is not None
    assert (members.world.hosts, members.world.end, members.world.probe) == (("z",), None, True)
    assert [kind for kind, _ in events] == ["failure", "unhealthy", "host_joined"]
    assert str(warned[-1].message) == f"{outcome.sentence}; the ranks are started again without it"
    assert outcome.sentence.startswith("host a has failed its health probe: 1 of 1,048,576 numbers")


def test_failures_are_those_of_an_address_whichever_launcher_is_there(tmp_path: Path) -> None:
    members = FolderMembership(tmp_path, "10.0.0.1-17")
    for name in ("10.0.0.1-17", "10.0.0.1-99", "10.0.0.2-17"):
        members.count_failure(name)
    later = FolderMembership(tmp_path, "10.0.0.3-1")
    found = [later.failures(f"10.0.0.{number}-5") for number in (1, 2, 3)]
    assert found == [2, 1, 0] and found[0] < FAILS_OFTEN
    later.look(0.0)
    assert later.hosts == {}
