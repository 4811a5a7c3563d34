"""The store in which hosts meet: who holds it, and what its loss costs."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from meshwright.comm.authentication import new_secret
from meshwright.comm.store_client import StoreClient, StoreLostError
from meshwright.comm.store_server import Table
from meshwright.launch.membership import LOST_S, Host, HostWorld, encode
from meshwright.launch.membership_store import StoreMembership
from meshwright.launch.store_holder import GENERATION, HOST, VERSION, VIEW, HostCensus
from meshwright.launch.store_terms import StoreTerms
from meshwright.rank.failure import Outcome
from meshwright.rank.host_rendezvous import address_here, parse_rendezvous
from meshwright.rank.network import own_address
from meshwright.spec import UserError

LIMIT_S = 20.0
HOSTS = {name: Host(name, "127.0.0.1", "lo", 1) for name in "abc"}
WORLD = HostWorld(0, ("a", "b", "c"), 1)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return int(free.getsockname()[1])


class Meeting:
    """Hosts of one run, of which `a` and whoever comes first at the rendezvous's port hold the store."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.port, self.secret = folder, free_port(), new_secret()
        self.members: dict[str, StoreMembership] = {}

    def come(self, name: str, at: str = "127.0.0.1") -> StoreMembership:
        made = StoreMembership(self.folder, name, "127.0.0.1", f"{at}:{self.port}", self.secret)
        self.members[name] = made
        return made

    def everybody(self) -> None:
        """All three hosts see each other, and the first generation."""
        for name in HOSTS:
            self.come(name).look(0.0)
            self.members[name].write(HOSTS[name])
        self.members["a"].propose(WORLD)
        until(lambda: all(self.sees(name, tuple(HOSTS)) for name in HOSTS))
        assert self.members["c"].world == WORLD

    def sees(self, name: str, hosts: tuple[str, ...]) -> bool:
        self.members[name].look(0.0)
        return self.members[name].here == hosts

    def kill_the_first(self) -> None:
        """End the host `a` as a loss of power does: its store is gone, and nothing tells that."""
        holder = self.members.pop("a")._holder
        assert holder is not None
        holder._over.set()
        holder._thread.join()
        holder._server.close()


@pytest.fixture
def meeting(tmp_path: Path) -> Iterator[Meeting]:
    made = Meeting(tmp_path)
    yield made
    for members in made.members.values():
        members.remove(members.name)
    for members in made.members.values():
        members.close()


def until(holds: Callable[[], bool]) -> None:
    limit = time.monotonic() + LIMIT_S
    while not holds():
        assert time.monotonic() < limit
        time.sleep(0.02)


def lost(members: StoreMembership, now: float) -> bool:
    """True if a look finds no store."""
    try:
        members.look(now)
    except StoreLostError:
        return True
    return False


def test_the_host_that_is_named_holds_the_store_and_others_wait_for_it(meeting: Meeting) -> None:
    other = meeting.come("b", at="192.0.2.1")  # of documentation, and so of no host (RFC 5737)
    for second in (0.0, 1.0, 3 * LOST_S):
        with pytest.raises(StoreLostError, match="nobody has begun it"):
            other.look(second)
    meeting.come("a").look(0.0)
    other.look(4 * LOST_S)
    assert other.place == f"the store at 127.0.0.1:{meeting.port}"
    assert meeting.members["a"]._holder is not None and other._holder is None


def test_of_a_lost_store_another_host_holds_the_next_and_nobody_is_taken_for_lost(meeting: Meeting) -> None:
    meeting.everybody()
    meeting.kill_the_first()
    b, c = meeting.members["b"], meeting.members["c"]
    c.write(replace(HOSTS["c"], beat=1))  # it is told to the next store
    for now in (10.0, 10.0, 12.0, 9.9 + LOST_S):
        assert lost(b, now)
        assert b._holder is None
    b.look(10.5 + LOST_S)
    assert b._holder is not None
    time.sleep(1.0)  # of the census's own clock: c has not come
    b.look(11.0 + LOST_S)
    assert b.here == () and not b.leads
    c.look(10.0 + LOST_S)
    until(lambda: meeting.sees("b", ("b", "c")))
    assert b.leads and b.hosts["c"].beat == 1
    c.look(11.0 + LOST_S)
    assert b.world == c.world == WORLD
    b.propose(HostWorld(1, ("b", "c"), 1))
    until(lambda: meeting.sees("c", ("b", "c")) and c.world == HostWorld(1, ("b", "c"), 1))
    assert c.missed == -1


def test_a_host_whose_store_another_has_replaced_closes_it(meeting: Meeting) -> None:
    meeting.everybody()
    a, b = meeting.members["a"], meeting.members["b"]
    first = a._holder
    assert first is not None
    first._over.set()  # it sleeps
    first._thread.join()
    StoreTerms(meeting.folder).begin(1, replace(StoreTerms(meeting.folder).term(0), endpoint="127.0.0.1:1"))
    with pytest.raises(StoreLostError):  # as it wakes
        a.propose(HostWorld(1, ("a",), 1))
    assert a.world == WORLD
    assert not first._tick(time.monotonic())
    first._server.close()
    for now in (1.0, 1.0, 2.0):
        assert lost(a, now) and lost(b, now)
    b.look(2.0 + LOST_S)
    assert b._holder is not None and b._holder.number == 2
    b.propose(HostWorld(1, ("b", "c"), 1))
    a._follow(HostWorld(1, ("a",), 1))  # had it been faster
    a.look(5.0 + LOST_S)
    assert a._term == 2
    assert a.world == b.world == HostWorld(1, ("b", "c"), 1)


def test_a_host_that_leaves_in_order_hands_the_store_over_at_once(meeting: Meeting) -> None:
    meeting.everybody()
    a = meeting.members.pop("a")
    a.remove("a")
    a.close()
    b = meeting.members["b"]
    assert lost(b, 10.0)
    b.look(11.0)
    assert b._holder is not None
    assert meeting.members["c"].world == WORLD


def test_all_see_the_end_of_the_run_also_who_comes_too_late(meeting: Meeting) -> None:
    meeting.everybody()
    a, b, c = (meeting.members.pop(name) for name in HOSTS)
    end = HostWorld(1, end=Outcome(1, "no luck"))
    a.propose(end)
    until(lambda: not lost(b, 1.0) and b.world == end)
    for members in (a, b, c):
        members.remove(members.name)
    began = time.monotonic()
    a.close()
    assert time.monotonic() - began < LOST_S / 2  # nobody is left to wait for
    assert c.world == WORLD
    assert lost(c, 2.0)
    c.look(3.0)
    assert c.world == end and c._holder is None
    b.close()
    c.close()
    again = meeting.come("d")  # of the next run in this folder, which counts on
    again.look(0.0)
    again.write(HOSTS["a"])
    until(lambda: meeting.sees("d", ("d",)))
    assert again.world == end and again.leads


def test_a_host_whose_ranks_run_asks_no_more_than_its_signs_of_life_do(
    meeting: Meeting, monkeypatch: pytest.MonkeyPatch
) -> None:
    meeting.everybody()
    a, b = meeting.members["a"], meeting.members["b"]
    b.write(replace(HOSTS["b"], state="running", generation=0))
    b.look(0.0)
    asked: list[bytes] = []
    monkeypatch.setattr(StoreClient, "exchange", lambda _, parts, __=0.0: asked.append(parts[0]))
    for second in range(4):
        b.look(float(second))
    assert asked == [] and b.here == tuple(HOSTS)
    monkeypatch.undo()
    assert a._client is not None
    client, version = a._client, a._client.peek([VERSION])
    a.propose(HostWorld(1, ("a", "c"), 1))
    until(lambda: client.peek([VERSION]) != version)
    b.write(replace(HOSTS["b"], state="running", generation=0, beat=1))
    b.look(4.0)
    assert b.world is not None and b.world.number == 1 and b.missed == 1


def test_a_generation_that_no_store_remembers_may_have_been_without_this_host(meeting: Meeting) -> None:
    meeting.everybody()
    a, b = meeting.members["a"], meeting.members["b"]
    newest = replace(WORLD, number=2)
    a.propose(newest)
    until(lambda: not lost(b, 0.0) and b.world == newest)
    assert b.missed == 1


def test_a_port_of_another_program_is_told(meeting: Meeting) -> None:
    first = meeting.come("a")
    told = pytest.raises(StoreLostError, match=rf"127.0.0.1:{meeting.port} cannot be listened at: Addr")
    with socket.create_server(("127.0.0.1", meeting.port)), told:
        first.look(0.0)
    first.look(1.0)
    assert first._holder is not None


def test_a_census_tells_of_nobody_before_all_have_had_the_time_to_come() -> None:
    table = Table()
    table.values[f"{GENERATION}0".encode()] = encode(WORLD).encode()
    census = HostCensus(0.0, lost="a")
    table.values[f"{HOST}b".encode()] = b"1"
    for now in (0.0, 2.0, 4.0):
        census.look(table, now)
        assert VIEW.encode() not in table.values
    census.look(table, LOST_S)
    assert json.loads(table.values[VIEW.encode()]) == {"here": [], "newest": 0}
    table.values[f"{HOST}b".encode()] = b"2"
    table.values[f"{HOST}c".encode()] = b"1"
    census.look(table, LOST_S + 1)
    assert json.loads(table.values[VIEW.encode()])["here"] == ["b", "c"]


def test_a_time_in_which_the_holder_slept_costs_no_host_its_life() -> None:
    table, census = Table(), HostCensus(0.0)
    for name in HOSTS:
        table.values[f"{HOST}{name}".encode()] = b"1"
    for now in (0.0, 1.0, 100.0, 102.0, 103.5):
        census.look(table, now)
        assert json.loads(table.values[VIEW.encode()])["here"] == [*HOSTS]
    table.values[f"{HOST}b".encode()] = b"2"
    census.look(table, 105.0)
    assert json.loads(table.values[VIEW.encode()])["here"] == ["b"]


@pytest.mark.parametrize("given", ["node1", "node1:", ":29400", "node1:0", "node1:65536", "[::1]:80", "a:b"])
def test_a_rendezvous_is_a_host_and_a_port(given: str) -> None:
    assert parse_rendezvous("node1:29400") == ("node1", 29400)
    with pytest.raises(UserError, match=r"^--rendezvous: '.*' is not HOST:PORT; give "):
        parse_rendezvous(given)


def test_a_host_knows_its_own_names() -> None:
    own, _ = own_address("127.0.0.1")
    assert address_here("127.0.0.1", "10.0.0.1") == own == address_here("localhost", own)
    assert address_here("192.0.2.1", "10.0.0.1") is None
    assert address_here("no-such-host.invalid", "10.0.0.1") is None


def test_a_name_that_means_loopback_on_its_own_host_is_the_address_of_the_host(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.1.1", 0))]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_: found)
    assert address_here("node1", "10.0.0.1") == "10.0.0.1"
