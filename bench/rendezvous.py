"""Processor seconds for many hosts to agree on a start and on the loss of one, in a folder and in a store.

Hosts are faked: each is a `Membership` that gives its signs of life and looks as often as a launcher does,
leads where it is its turn (`decide`), and has no ranks. The first is a process of its own, which holds the
store; all others are threads of another.

    python bench/rendezvous.py --hosts 512 --seconds 20
    python bench/rendezvous.py --hosts 32 --seconds 20 --folder
    python bench/rendezvous.py --hosts 512 --round

Prints one JSON object: seconds from the first host to the moment when all have seen the start of all, then
from a loss (of the last host, and of the first, which holds the store) to the start without it, and processor
seconds of the first host and of all others, and at rest those of a second, with the looks in it. `latest` is
the longest time by which a look came too late: above `LOST_S` the machine does not keep up. With `--round`
each host of a folder looks once, and processor seconds of such a round are told, of which there are four a
second.
"""

from __future__ import annotations

import argparse
import heapq
import json
import multiprocessing
import resource
import socket
import threading
import time
from contextlib import suppress
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from meshwright.comm.authentication import shared_secret
from meshwright.comm.store_client import StoreLostError
from meshwright.launch.elastic import BEAT_S, LOOK_S
from meshwright.launch.membership import NOBODY, Host, HostWorld, Membership, decide
from meshwright.launch.membership_folder import FolderMembership
from meshwright.launch.membership_store import StoreMembership
from meshwright.rank.failure import Outcome

LIMIT_S = 300.0
HOSTS_OF_A_THREAD = 8


class FakeHost:
    """A host of `count` without ranks, which says that they run."""

    def __init__(self, members: Membership, count: int) -> None:
        self.members, self.count = members, count
        self.host = Host(members.name, "127.0.0.1", "lo", 1)
        self._said_at = 0.0

    def look(self, now: float) -> None:
        """Do what a launcher does four times a second."""
        if now >= self._said_at + BEAT_S:
            self._said_at = now
            self.say()
        with suppress(StoreLostError):  # the next look tries again, as a launcher's
            self.members.look(now)
            world = self.members.world
            if world is not None and self.host.name in world.hosts and world.number > self.host.generation:
                self.say(state="running", generation=world.number, steps=1)
            if self.members.leads:
                self._lead(world)

    def say(self, **fields: Any) -> None:
        self.host = replace(self.host, beat=self.host.beat + 1, **fields)
        self.members.write(self.host)

    def _lead(self, world: HostWorld | None) -> None:
        hosts = self.members.hosts
        if world is None and len(hosts) < self.count:
            return
        decision = decide(world or NOBODY, hosts, range(self.count - 2, self.count + 1), _again)
        if decision is None or decision.stop:
            return
        number = 0 if world is None else world.number + 1
        self.members.propose(HostWorld(number, decision.hosts, 1, "127.0.0.1", 1))
        for name in () if world is None else set(world.hosts) - set(decision.hosts):
            self.members.remove(name)


def _again(_: Host) -> Outcome | None:
    return None


def membership(folder: Path, number: int, rendezvous: str | None) -> Membership:
    """The membership of host `number`; the first one's name comes first."""
    name = f"host{number:05d}"
    if rendezvous is None:
        return FolderMembership(folder, name)
    return StoreMembership(folder, name, "127.0.0.1", rendezvous, shared_secret(folder / "secret"))


class Driver(threading.Thread):
    """Lets some hosts look in time, one after the other."""

    def __init__(self, hosts: list[FakeHost]) -> None:
        super().__init__(daemon=True)
        self.hosts = hosts
        self.latest, self.looks = 0.0, 0
        self.over = threading.Event()

    def run(self) -> None:
        now = time.monotonic()
        due = [(now + LOOK_S * place / len(self.hosts), place) for place in range(len(self.hosts))]
        while due and not self.over.is_set():
            at, place = heapq.heappop(due)
            if (ahead := at - time.monotonic()) > 0:
                time.sleep(ahead)
            if place < len(self.hosts):  # it is not lost
                self.latest, self.looks = max(self.latest, -ahead), self.looks + 1
                self.hosts[place].look(time.monotonic())
                heapq.heappush(due, (max(at + LOOK_S, time.monotonic()), place))


def worker(told: Connection, folder: Path, numbers: range, count: int, rendezvous: str | None) -> None:
    """Be some hosts, until told to end."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    told.send("ready")
    told.recv()
    hosts = [FakeHost(membership(folder, number, rendezvous), count) for number in numbers]
    drivers = [
        Driver(hosts[start : start + HOSTS_OF_A_THREAD]) for start in range(0, len(hosts), HOSTS_OF_A_THREAD)
    ]
    for driver in drivers:
        driver.start()
    while (word := told.recv()) != "end":
        if word == "lose":
            drivers[-1].hosts.pop()
            continue
        seen = [host.members.world for driver in drivers for host in driver.hosts]
        oldest = min((-1 if world is None else world.number for world in seen), default=-1)
        latest, looks = max(driver.latest for driver in drivers), sum(driver.looks for driver in drivers)
        told.send((time.process_time(), oldest, latest, looks))
    for driver in drivers:
        driver.over.set()
    for driver in drivers:
        driver.join()


class Bench:
    """The two processes, and what they have used."""

    def __init__(self, folder: Path, count: int, rendezvous: str | None) -> None:
        self.made: dict[str, tuple[Any, Connection]] = {}
        self.latest = 0.0
        context = multiprocessing.get_context("spawn")
        for name, numbers in (("first", range(1)), ("others", range(1, count))):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=worker, args=(theirs, folder, numbers, count, rendezvous), daemon=True
            )
            process.start()
            self.made[name] = process, ours
            ours.recv()
        for _, pipe in self.made.values():
            pipe.send("go")

    def ask(self) -> tuple[dict[str, float], int, int]:
        """Processor seconds of each process, the newest generation that all hosts have seen, and looks."""
        found = {}
        for name, (_, pipe) in self.made.items():
            pipe.send("ask")
            found[name] = pipe.recv()
        used, seen, latest, looks = zip(*found.values(), strict=True)
        self.latest = max(self.latest, *latest)
        return dict(zip(found, used, strict=True)), min(seen), sum(looks)

    def until(self, generation: int) -> dict[str, float]:
        """Wait until all have seen a generation; seconds, and processor seconds of each process."""
        began, (before, _, _) = time.monotonic(), self.ask()
        while True:
            used, seen, _ = self.ask()
            seconds = time.monotonic() - began
            if seen >= generation:
                spent = {f"{name}_cpu_s": used[name] - before[name] for name in used}
                return {"seconds": seconds, **spent}
            if seconds > LIMIT_S:
                raise SystemExit(f"no generation {generation} was seen by all within {LIMIT_S:.0f} s")
            time.sleep(0.05)

    def rest(self, seconds: float) -> dict[str, float]:
        """Processor seconds a second of each process, and looks a second, while nothing happens."""
        began, (before, _, first) = time.monotonic(), self.ask()
        time.sleep(seconds)
        (after, _, last), passed = self.ask(), time.monotonic() - began
        spent = {f"{name}_cpu": (after[name] - before[name]) / passed for name in after}
        return {**spent, "looks": (last - first) / passed}


def measure(folder: Path, count: int, seconds: float, rendezvous: str | None) -> dict[str, Any]:
    """Start, rest, and lose hosts."""
    bench = Bench(folder, count, rendezvous)
    found: dict[str, Any] = {"hosts": count, "start": bench.until(0)}
    found["rest"] = bench.rest(seconds)
    bench.made["others"][1].send("lose")
    found["lost_host"] = bench.until(1)
    if rendezvous is not None:
        process, _ = bench.made.pop("first")
        process.kill()
        process.join()
        found["lost_holder"] = bench.until(2)
    found["latest"] = bench.latest
    for process, pipe in bench.made.values():
        pipe.send("end")
        process.join()
    return found


def one_round(folder: Path, count: int) -> dict[str, float]:
    """Processor seconds of one look of each of so many hosts in a folder, and of their signs of life."""
    hosts = [FakeHost(membership(folder, number, None), count) for number in range(count)]
    began = time.process_time()
    for host in hosts:
        host.say()
    said = time.process_time()
    for host in hosts:
        host.members.look(0.0)
    looked = time.process_time()
    assert all(len(host.members.here) == count for host in hosts)
    return {"hosts": count, "signs_of_life_cpu_s": said - began, "looks_cpu_s": looked - said}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--hosts", type=int, default=512)
    parser.add_argument("--seconds", type=float, default=20.0, help="time at rest")
    parser.add_argument("--folder", action="store_true", help="meet in a folder")
    parser.add_argument("--round", action="store_true", help="one look of each host in a folder")
    flags = parser.parse_args()
    with TemporaryDirectory() as name:
        if flags.round:
            print(json.dumps(one_round(Path(name), flags.hosts)))
            return
        with socket.create_server(("127.0.0.1", 0)) as free:
            rendezvous = None if flags.folder else f"127.0.0.1:{free.getsockname()[1]}"
        print(json.dumps(measure(Path(name), flags.hosts, flags.seconds, rendezvous)))


if __name__ == "__main__":
    main()
