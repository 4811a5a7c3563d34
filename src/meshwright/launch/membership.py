"""Which hosts a run has: what they agree on, and what the one that leads makes of it.

Hosts meet in the run's folder (`membership_folder.py`), or, where they are many, in a store on one of them
(`membership_store.py`). Either way a host lives as long as its counter moves, by the clock of the one that
looks. The first living host of the newest generation, which is a start of the ranks, leads: it proposes the
next one when a host is lost, wants to join, or has ranks that failed (`decide`). Only one of several
proposals of a number is made, and it never changes; all hosts follow the newest.

    hosts/failures-<address>     how often a host has failed, wherever the hosts meet
"""

from __future__ import annotations

import json
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Literal, TypeVar

from pydantic.dataclasses import dataclass

from meshwright import atomic
from meshwright.rank.failure import KINDS, Outcome
from meshwright.spec.errors import ECHOES
from meshwright.spec.records import Integer, Record, read

R = TypeVar("R", bound=Record)

LOST_S = 5.0
"""A host whose counter has not moved for so long is lost."""

FAILS_OFTEN = 3
"""A host that has failed so often is chosen last."""

State = Literal["ready", "running", "done", "failed", "unhealthy", "stopped", "leaving"]
ENDED = ("done", "stopped", "leaving")
"""States of a host whose ranks have ended in order: at the last step, for hosts that join, by a signal."""


@dataclass(frozen=True)
class Host(Record):
    """A supervisor's word on its host: `ranks` processes, reached at `address`, where `port` is free.

    `name` is the host's address and the supervisor's process. `state` is that of the ranks of `generation`,
    which have completed `steps`; `outcome` is how they ended. `probed` are the seconds of the newest health
    probe, if the host has passed it.
    """

    name: str
    address: str
    interface: str
    ranks: Integer
    port: Integer = 0
    beat: Integer = 0
    generation: int = -1
    state: State = "ready"
    steps: Integer = 0
    outcome: Outcome = Outcome()
    probed: float | None = None


@dataclass(frozen=True)
class HostWorld(Record):
    """Generation `number`: `hosts` in order of ranks, with `ranks` each and a store on the first.

    An `end` is that of the run, and there are no hosts. `origin` is the number of the run's first generation,
    as the folder may have those of earlier runs. Hosts `probe` their health before a start after a failure.
    """

    number: Integer
    hosts: tuple[str, ...] = ()
    ranks: Integer = 0
    address: str = ""
    port: Integer = 0
    origin: Integer = 0
    end: Outcome | None = None
    probe: bool = False


NOBODY = HostWorld(0)
"""Stands for the world before the first generation."""


def encode(record: Host | HostWorld) -> str:
    """A record as hosts tell it to each other."""
    return json.dumps(asdict(record))


def decode(kind: type[R], text: str | bytes, where: str) -> R:
    """The record in a text of `encode`. Raises `UserError`, starting with `where`."""
    return read(kind, json.loads(text), where)


class Membership(ABC):
    """The hosts of one run and what they agree on, as one of them, called `name`, sees it.

    Methods raise `OSError` where the place in which the hosts meet cannot be used, which may pass.
    """

    place: str
    """Where the hosts meet, for messages."""

    def __init__(self, folder: Path, name: str) -> None:
        """`folder` is common to all hosts, also to those that meet elsewhere."""
        self.folder, self.name = folder, name
        self.here: tuple[str, ...] = ()
        """Names of the hosts that live, in order."""
        self.hosts: dict[str, Host] = {}
        """Their words on themselves; only a host that leads is sure to have them."""
        self.world: HostWorld | None = None
        self.missed = -1
        """The newest generation that this host was not part of."""
        self._failures: tuple[int, dict[str, int]] = -1, {}
        """How often hosts have failed, as read when a generation was the newest."""

    @abstractmethod
    def write(self, host: Host) -> None:
        """Replace what is said of this host."""

    @abstractmethod
    def remove(self, name: str) -> None:
        """Remove what is said of a host that leaves, or is lost."""

    @abstractmethod
    def propose(self, world: HostWorld) -> None:
        """Make `world` the newest generation, unless another host has proposed that number before."""

    @abstractmethod
    def look(self, now: float) -> None:
        """Read the newest generation and what the hosts say; `now` is this process's clock."""

    @abstractmethod
    def close(self) -> None:
        """Take part no longer."""

    @property
    def leads(self) -> bool:
        """True if this host proposes the next generation."""
        members = self.world.hosts if self.world is not None else ()
        return next((name for name in (*members, *self.here) if name in self.here), None) == self.name

    def failures(self, name: str) -> int:
        """Return how often a host has failed in this run's folder, whichever launcher was on it.

        The folder is read once in each generation, by the host that leads.
        """
        number = self.world.number if self.world is not None else 0
        if self._failures[0] != number:
            found = {}
            for file in self.folder.glob(f"{_FAILURES}*"):
                with suppress(FileNotFoundError):
                    found[file.name] = int(file.read_text(encoding="utf-8"))
            self._failures = number, found
        return self._failures[1].get(_failures_of(name), 0)

    def count_failure(self, name: str) -> None:
        """Add a failure to those of a host; the leader calls this."""
        count, file = self.failures(name) + 1, _failures_of(name)
        atomic.write(self.folder / file, str(count))
        self._failures[1][file] = count

    def _follow(self, world: HostWorld) -> None:
        """Take a newer generation for the newest one."""
        self.world = world
        if self.name not in world.hosts:
            self.missed = world.number


_FAILURES = "failures-"


def _failures_of(name: str) -> str:
    """The file with the count of a host's failures, which is of its address."""
    address, _, process = name.rpartition("-")
    return _FAILURES + (address if process.isdecimal() else name)


@dataclass(frozen=True)
class Decision:
    """A leader's next act: a generation of `hosts`, the `end` of the run, or to `stop` ranks after a save."""

    hosts: tuple[str, ...] = ()
    end: Outcome | None = None
    stop: bool = False


def decide(
    world: HostWorld,
    hosts: Mapping[str, Host],
    sizes: Collection[int],
    final: Callable[[Host], Outcome | None],
    patient: bool = False,
    failures: Callable[[str], int] = lambda _: 0,
) -> Decision | None:
    """Return the leader's next act; None to wait.

    `hosts` are those that live, `sizes` the numbers of hosts that can run, and `final` returns the outcome of
    the run where a host's failure shall be its end. A `patient` leader waits for the cause of a failure that
    may be an echo. `failures` are those of a host, by which one of more than can run is left out.
    """
    members = [hosts[name] for name in world.hosts if name in hosts]
    reports = [host for host in members if host.generation == world.number]
    staying = [host.name for host in members if host.state not in ("leaving", "unhealthy")]
    others = hosts.keys() - set(world.hosts)
    joining = sorted(name for name in others if hosts[name].state == "ready")
    enough = max((size for size in sizes if size <= len(staying) + len(joining)), default=0)

    def following() -> Decision | None:  # after the newest failure has been counted
        return Decision(_chosen([*staying, *joining], enough, failures)) if enough else None

    if unhealthy := [host for host in reports if host.state == "unhealthy"]:
        return following() or Decision(end=unhealthy[0].outcome)
    if failed := [host for host in reports if host.state == "failed"]:
        cause = min(failed, key=_likely_echo)
        if _likely_echo(cause) == ECHO:
            if len(members) < len(world.hosts):  # the loss of a host brought it about
                return following()
            if patient and any(host.state == "running" for host in members):
                return None
        end = final(cause)
        return Decision(end=end) if end is not None else following()
    if len(members) < len(world.hosts) or not world.hosts:
        return following()
    if len(reports) == len(members) and all(host.state in ENDED for host in members):
        leaving = [host for host in members if host.state == "leaving"]
        if all(host.state == "done" for host in members):
            return Decision(end=Outcome())
        return following() or (Decision(end=leaving[0].outcome) if leaving else None)
    running = all(host.state == "running" and host.steps > 0 for host in members)
    return Decision(stop=True) if running and enough > len(members) else None


def _chosen(names: Sequence[str], count: int, failures: Callable[[str], int]) -> tuple[str, ...]:
    """Return the first `count` hosts in their order, where there are spares without those that fail often."""
    if count == len(names):
        return tuple(names)
    chosen = sorted(names, key=lambda name: failures(name) >= FAILS_OFTEN)[:count]
    return tuple(name for name in names if name in chosen)


ECHO = 3
"""The most that `_likely_echo` returns."""


def _likely_echo(host: Host) -> int:
    """Return how likely a host's failure was brought about by another's: 0 for surely not."""
    code, sentence = host.outcome.code, host.outcome.sentence
    if code in KINDS:
        return 0
    if any(words in sentence for words in ECHOES):
        return ECHO
    return 1 if code > 128 else 2


GOES_ON_S = 2.0
"""Time in which the other hosts begin without one that has left."""


def hosts_going_on(members: Membership, left: Host) -> int:
    """Number of hosts that go on without `left`, which is no member any more; 0 if the run has ended for all.

    That is known as soon as they make a generation without it.
    """
    until = time.monotonic() + GOES_ON_S
    with suppress(OSError):  # the place where hosts meet is away, or closed with this host
        while time.monotonic() < until:
            members.look(time.monotonic())
            world, others = members.world, set(members.here) - {left.name}
            if world is not None and world.number > left.generation and left.name not in world.hosts:
                return len(world.hosts) if world.end is None else 0
            if not others:
                return 0
            time.sleep(GOES_ON_S / 20)
    return 0
