"""Hosts on each other, and their leader's next act."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from meshwright.checkpoint.digests import sum64
from meshwright.checkpoint.slots import Slot, SlotHeader
from meshwright.comm.authentication import new_secret
from meshwright.comm.store_server import StoreServer
from meshwright.launch import membership
from meshwright.launch.membership import (
    FAILS_OFTEN,
    LOST_S,
    NOBODY,
    Decision,
    Host,
    HostWorld,
    Membership,
    decide,
    hosts_going_on,
)
from meshwright.launch.membership_folder import FolderMembership
from meshwright.launch.membership_store import StoreMembership
from meshwright.launch.store_holder import HostCensus
from meshwright.launch.store_terms import StoreTerm, StoreTerms
from meshwright.rank.failure import Outcome
from meshwright.rank.shared_memory import SharedMemory

A, B, C = (Host(name, f"10.0.0.{number}", "eth0", 2) for number, name in enumerate("abc", start=1))
WORLD = HostWorld(4, ("a", "b"), 2, "10.0.0.1", 99)
CRASH, ECHO = (
    Outcome(137, "rank 2 of 4 was ended by SIGKILL"),
    Outcome(1, "RuntimeError: Connection reset by peer"),
)
UNHEALTHY = Outcome(80, "host b has failed its health probe", restart=True)
STOPPED = Outcome(75, "stopped by SIGUSR1 after step 7", stopped=True)


def at(host: Host, state: str, outcome: Outcome | None = None, generation: int = 4, steps: int = 7) -> Host:
    return replace(host, state=state, generation=generation, steps=steps, outcome=outcome or Outcome())


def again(_: Host) -> None:
    return None


RUN_A, RUN_B = at(A, "running"), at(B, "running")
CASES = {
    "both run": ([RUN_A, RUN_B], (1, 2, 3), None),
    "the first start takes whoever is ready": ([A, B], (1, 2), Decision(("a", "b"))),
    "one is lost": ([RUN_A], (1, 2), Decision(("a",))),
    "the first is lost": ([RUN_B], (1, 2), Decision(("b",))),
    "one is lost, and the other alone cannot run": ([RUN_A], (2,), None),
    "a spare takes the place of a lost one": ([RUN_A, C], (2,), Decision(("a", "c"))),
    "ranks failed": ([RUN_A, at(B, "failed", CRASH)], (1, 2), Decision(("a", "b"))),
    "one wants to join: the ranks save": ([RUN_A, RUN_B, C], (1, 2, 3), Decision(stop=True)),
    "one wants to join, and there is no room": ([RUN_A, RUN_B, C], (1, 2), None),
    "one wants to join before the first step": ([at(A, "running", steps=0), RUN_B, C], (1, 2, 3), None),
    "the ranks have saved for it": (
        [at(A, "stopped", STOPPED), at(B, "stopped", STOPPED), C],
        (1, 2, 3),
        Decision(("a", "b", "c")),
    ),
    "one has not yet ended": ([at(A, "stopped", STOPPED), RUN_B, C], (1, 2, 3), None),
    "one leaves": ([at(A, "stopped", STOPPED), at(B, "leaving", STOPPED)], (1, 2), Decision(("a",))),
    "all leave": ([at(A, "leaving", STOPPED), at(B, "leaving", STOPPED)], (1, 2), Decision(end=STOPPED)),
    "all are done": ([at(A, "done"), at(B, "done")], (1, 2), Decision(end=Outcome())),
    "one is done": ([at(A, "done"), RUN_B], (1, 2), None),
    "one has failed its probe": ([RUN_A, at(B, "unhealthy", UNHEALTHY)], (1, 2), Decision(("a",))),
    "the first has failed its probe, and its store goes": (
        [at(A, "unhealthy", UNHEALTHY), at(B, "failed", ECHO), C],
        (1, 2),
        Decision(("b", "c")),
    ),
    "one has failed its probe, and the others are too few": (
        [RUN_A, at(B, "unhealthy", UNHEALTHY)],
        (2,),
        Decision(end=UNHEALTHY),
    ),
    "a failure of the generation before": ([RUN_A, at(B, "failed", CRASH, 3)], (1, 2), None),
}


@pytest.mark.parametrize(("hosts", "sizes", "expected"), CASES.values(), ids=CASES)
def test_the_leader_s_next_act(hosts: list[Host], sizes: tuple[int, ...], expected: Decision | None) -> None:
    world = NOBODY if hosts == [A, B] else WORLD
    assert decide(world, {host.name: host for host in hosts}, sizes, again) == expected


def test_hosts_that_fail_often_are_chosen_last_and_the_others_stay_in_order() -> None:
    failures = {"a": FAILS_OFTEN, "b": FAILS_OFTEN - 1, "c": 0}.__getitem__
    failed = {"a": at(A, "failed", CRASH), "b": RUN_B}
    spare = failed | {"c": C}
    assert decide(WORLD, failed, (1, 2), again, failures=failures) == Decision(("a", "b"))
    assert decide(WORLD, spare, (2,), again, failures=failures) == Decision(("b", "c"))
    assert decide(WORLD, spare, (2,), again) == Decision(("a", "b"))
    assert decide(WORLD, spare, (1, 2, 3), again, failures=failures) == Decision(("a", "b", "c"))
    first = {"a": A, "b": B, "c": C}
    assert decide(NOBODY, first, (1, 2), again, failures=failures) == Decision(("b", "c"))
    running = {"a": RUN_A, "b": RUN_B, "c": C}
    assert decide(WORLD, running, (2,), again, failures=failures) is None  # a run that goes well is let be


def test_a_failure_that_ends_the_run_ends_it_with_its_cause() -> None:
    hosts = {"a": at(A, "failed", ECHO), "b": at(B, "failed", CRASH)}
    assert decide(WORLD, hosts, (1, 2), lambda host: host.outcome) == Decision(end=CRASH)
    mistake = Outcome(2, "layout.dp: 3 does not fit")
    hosts["a"] = at(A, "failed", mistake)
    assert decide(WORLD, hosts, (1, 2), lambda host: host.outcome) == Decision(end=mistake)


def test_an_echo_waits_for_its_cause_for_a_while() -> None:
    hosts = {"a": at(A, "failed", ECHO), "b": RUN_B}
    assert decide(WORLD, hosts, (1, 2), again, patient=True) is None
    assert decide(WORLD, hosts, (1, 2), again, patient=False) == Decision(("a", "b"))
    hosts["a"] = at(A, "failed", CRASH)
    assert decide(WORLD, hosts, (1, 2), again, patient=True) == Decision(("a", "b"))


def test_the_loss_of_a_host_explains_the_echo_of_it() -> None:
    def judge(host: Host) -> Outcome:
        return pytest.fail(f"{host.outcome.sentence!r} was taken for a failure")

    assert decide(WORLD, {"a": at(A, "failed", ECHO)}, (1, 2), judge) == Decision(("a",))
    spare = {"a": at(A, "failed", ECHO), "c": C}
    assert decide(WORLD, spare, (2,), judge) == Decision(("a", "c"))


class Meeting:
    """Hosts that meet in a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def member(self, name: str) -> Membership:
        return FolderMembership(self.folder, name)

    def look(self, members: Membership, now: float) -> None:
        members.look(now)

    def made(self) -> list[str]:
        """The generations that were made."""
        return sorted(file.stem.replace("-", "/") for file in self.folder.glob("generation-*"))

    def close(self) -> None:
        """Nothing is open."""


class StoreMeeting(Meeting):
    """Hosts that meet in a store, whose clock is the test's."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.secret = new_secret()
        self.server = StoreServer("127.0.0.1", self.secret)
        self.census = HostCensus(-2 * LOST_S)
        StoreTerms(folder).begin(0, StoreTerm(self.server.endpoint, "nobody"))
        self.members: list[Membership] = []

    def member(self, name: str) -> Membership:
        made = StoreMembership(self.folder, name, "127.0.0.1", self.server.endpoint, self.secret)
        made.look(0.0)
        self.members.append(made)
        return made

    def look(self, members: Membership, now: float) -> None:
        self.server.use(lambda table: self.census.look(table, now))
        members.look(now)

    def made(self) -> list[str]:
        keys = self.server.use(lambda table: sorted(key.decode() for key in table.values))
        return [key for key in keys if key.startswith("generation/")]

    def close(self) -> None:
        for members in self.members:
            members.close()
        self.server.close()


@pytest.fixture(params=[Meeting, StoreMeeting], ids=["folder", "store"])
def meeting(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Meeting]:
    made = request.param(tmp_path)
    yield made
    made.close()


def test_of_two_proposals_one_is_taken_by_all(meeting: Meeting) -> None:
    one, two = meeting.member("a"), meeting.member("b")
    one.propose(HostWorld(0, ("a",), 2))
    two.propose(HostWorld(0, ("b",), 2))
    for members in (one, two):
        meeting.look(members, 0.0)
        assert members.world == HostWorld(0, ("a",), 2)
    two.propose(HostWorld(1, ("b",), 2))
    meeting.look(one, 0.0)
    assert one.world == HostWorld(1, ("b",), 2)
    assert one.missed == 1
    assert two.missed == 0
    late = meeting.member("c")
    meeting.look(late, 0.0)
    assert late.world == one.world
    assert meeting.made() == ["generation/0", "generation/1"]


def test_a_host_that_gives_no_sign_of_life_is_lost_and_another_leads(meeting: Meeting) -> None:
    one, two = meeting.member("a"), meeting.member("b")
    one.write(A)
    two.write(B)
    meeting.look(two, 0.0)
    assert list(two.here) == ["a", "b"]
    assert not two.leads
    for second in range(1, int(LOST_S) + 1):
        assert list(two.here) == ["a", "b"]
        two.write(replace(B, beat=second))
        meeting.look(two, float(second))
    assert list(two.here) == ["b"]
    assert two.leads
    assert two.hosts == {"b": replace(B, beat=int(LOST_S))}
    one.write(replace(A, beat=1))  # it was only stopped
    meeting.look(two, LOST_S + 1)
    assert list(two.here) == ["a", "b"]
    meeting.look(one, LOST_S + 1)
    assert one.leads
    assert one.hosts == {"a": replace(A, beat=1), "b": replace(B, beat=int(LOST_S))}
    one.remove("a")
    meeting.look(two, LOST_S + 1)
    assert list(two.here) == ["b"]


def test_the_members_of_the_newest_generation_lead_before_those_that_wait(meeting: Meeting) -> None:
    members = {host.name: meeting.member(host.name) for host in (A, B, C)}
    for host in (A, B, C):
        members[host.name].write(host)
    members["c"].propose(HostWorld(0, ("c", "b"), 2))
    leads = {}
    for name, member in members.items():
        meeting.look(member, 0.0)
        leads[name] = member.leads
    assert leads == {"a": False, "b": False, "c": True}


def test_a_host_drops_its_snapshots_and_those_of_its_peer() -> None:
    with SharedMemory(2, peers=True) as memory:
        slots = [Slot(descriptor) for of_rank in memory.snapshots for descriptor in of_rank]
        assert len(slots) == 2 * 4
        for slot in slots:
            text = b"{}"
            slot.close(SlotHeader(3, 0, len(text), 1, 1, 1, sum64(text)), text)
            assert slot.head().step == 3
        memory.drop_snapshots()
        assert all(slot.head().step < 0 for slot in slots)


@pytest.mark.parametrize("others", ["go on", "end", "leave", "stay"])
def test_a_host_that_has_left_knows_whether_the_others_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, others: str
) -> None:
    monkeypatch.setattr(membership, "GOES_ON_S", 0.4)
    a, b = (FolderMembership(tmp_path, name) for name in "ab")
    a.propose(WORLD)
    b.write(B)
    left = at(A, "leaving", Outcome(75, "stopped by SIGTERM", stopped=True))
    following = HostWorld(WORLD.number + 1, ("b",), 1, "127.0.0.1", 1)
    after = {
        "go on": lambda: b.propose(following),
        "end": lambda: b.propose(HostWorld(WORLD.number + 1, end=Outcome())),
        "leave": lambda: b.remove("b"),
        "stay": lambda: None,
    }
    other = threading.Timer(0.1, after[others])
    other.start()
    assert hosts_going_on(a, left) == (1 if others == "go on" else 0)
    other.join()
