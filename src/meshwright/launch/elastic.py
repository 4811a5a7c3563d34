"""Supervision of one of several hosts, which may leave and join while the run goes on.

Every host runs the same command on a folder that all of them have, and meets the others there or in a store
(`membership.py`). A host that is lost costs the others a start of their ranks from memory or disk; for one
that joins they save, and start with it.
"""

from __future__ import annotations

import signal
import time
import warnings
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from meshwright.comm.authentication import shared_secret
from meshwright.comm.store_endpoint import endpoint_of
from meshwright.comm.store_server import StoreServer
from meshwright.launch.health_probe import HealthProbe, HealthVerdict
from meshwright.launch.membership import (
    ENDED,
    FAILS_OFTEN,
    LOST_S,
    NOBODY,
    Decision,
    Host,
    HostWorld,
    Membership,
    State,
    decide,
    hosts_going_on,
)
from meshwright.launch.membership_folder import FolderMembership
from meshwright.launch.membership_store import StoreMembership
from meshwright.launch.restarts import RestartPolicy
from meshwright.launch.start import End, HostPlace, Job, Start, Tell, stopped_by
from meshwright.launch.supervisor import stop_requests
from meshwright.launch.zygote import Zygote, ZygoteLostError
from meshwright.rank.failure import Outcome
from meshwright.rank.scratch import scratch_folder
from meshwright.rank.shared_memory import SharedMemory
from meshwright.spec.errors import UnhealthyHostError
from meshwright.units import counted

SECRET_FILE = "secret"
"""File of the common folder with the secret of the run's stores, for this user alone."""
LOOK_S, BEAT_S = 0.25, 1.0
"""Time between looks at the other hosts, and between signs of life."""
GATHER_S = 10.0
"""A first start waits so long for more hosts than it needs."""
LEASE_S = 10.0
"""A lost host's lease of the run's folder passes to another after so long."""
PATIENCE_S = 600.0
"""A host that no generation comes about with gives up after this time."""
PATIENT_S = LOST_S + 1.0
"""The leader waits so long for the cause of a failure that may be an echo, such as the loss of a host."""
SILENT_S = LOST_S + 2.0
"""A host that waits for others longer than this, in which a lost one is noticed, says so."""
MOST_NAMED = 16
"""Hosts that such a sentence names."""


@dataclass(frozen=True)
class ElasticJob:
    """A job of any number of hosts.

    `of` returns the job of a generation, given whether it is the first and its number of hosts, of which
    `sizes` lists those that can run it. `tell` gets the events of the run; `folder` is common to all hosts,
    which meet there, or with `rendezvous` in a store at that HOST:PORT.
    """

    folder: Path
    sizes: Sequence[int]
    of: Callable[[bool, int], Job]
    tell: Tell
    rendezvous: str | None = None

    def membership(self, host: Host, secret: bytes) -> Membership:
        """The membership of `host`; all hosts share `secret`."""
        if self.rendezvous is None:
            return FolderMembership(self.folder, host.name)
        return StoreMembership(self.folder, host.name, host.address, self.rendezvous, secret)


class HostSupervisor:
    """Runs this host's part of a job; `host` says who it is."""

    def __init__(self, job: ElasticJob, host: Host) -> None:
        self.job, self.host = job, host
        self._policy = RestartPolicy(job.of(True, job.sizes[-1]).recovery.max_restarts)
        job.folder.mkdir(parents=True, exist_ok=True)
        self._secret = shared_secret(job.folder / SECRET_FILE)
        self.members = job.membership(host, self._secret)
        self._store = StoreServer(host.address, self._secret)
        """The store of the next generation, if this host is the first of it."""
        self._first = 0
        """Number of the first generation that this host can be part of."""
        self._came_at = self._looked_at = self._said_at = self._not_before = 0.0
        self._failed_at: float | None = None
        self._judged = -1
        """The newest generation whose failure was judged."""
        self._pending: Decision | None = None
        self._told_healthy = -1
        """The newest generation whose hosts were told to be healthy."""
        self._probe = HealthProbe(host.name)
        self._zygote: Zygote | None = None
        self._hosts: frozenset[str] = frozenset()
        self._step_times: Sequence[float] = ()
        """Hosts of the last start that this one was part of, and the times of its steps."""
        self._unseen = False
        """True while the place where hosts meet cannot be used."""

    def run(self) -> Outcome:
        """Take part until the run has ended, or a signal takes this host out of it; returns the outcome."""
        began = self._came_at = time.monotonic()
        with (
            stop_requests() as asked,
            scratch_folder() as folder,
            SharedMemory(self.host.ranks, peers=True) as memory,
            ExitStack() as stack,
        ):
            stack.callback(self._close_zygote)
            stack.callback(self.members.close)
            stack.callback(self.members.remove, self.host.name)
            stack.callback(lambda: self._store.close())
            if (outcome := self._arrive(asked)) is not None:
                return outcome
            while True:
                world = self._next_world(asked)
                if isinstance(world, Outcome):
                    return world
                end = self._run_once(world, memory, began, folder, asked)
                leaves = bool(asked) or end.outcome.leaves
                self._report(end, leaves)
                if leaves:  # the others see that this host leaves, before its word on itself is gone
                    time.sleep(3 * LOOK_S)
                    return self._left(end.outcome if end.outcome.stopped else stopped_by(asked[-1]))

    def _left(self, outcome: Outcome) -> Outcome:
        """The outcome of this host, which leaves the run: others may go on with it."""
        self.members.remove(self.host.name)
        if not (others := hosts_going_on(self.members, self.host)):
            return outcome
        why = outcome.sentence.partition(";")[0]
        goes_on = f"the run goes on with {counted(others, 'other hosts')}, and the same command joins it"
        sentence = f"{why}; {goes_on}"
        return replace(outcome, sentence=sentence, of_another_run=True)

    # Generations ------------------------------------------------------------------------------------

    def _arrive(self, asked: Sequence[int]) -> Outcome | None:
        """See for the first time what the hosts have agreed on; the outcome where that cannot be."""
        since = time.monotonic()
        while not asked:
            try:
                self.members.look(time.monotonic())
            except ConnectionError as error:  # the host that holds the store may come later
                self._cannot_look(error)
                if time.monotonic() > since + PATIENCE_S:
                    return Outcome(1, f"{self.members.place} was not there for {PATIENCE_S:g} s: {error}")
                time.sleep(LOOK_S)
                continue
            self._unseen = False
            self._first = self.members.world.number + 1 if self.members.world is not None else 0
            return None
        return stopped_by(asked[-1])

    def _next_world(self, asked: Sequence[int]) -> HostWorld | Outcome:
        """Wait for a generation that this host is part of, or for the run's outcome."""
        since, said = time.monotonic(), ""
        while not asked:
            self._look()
            if time.monotonic() > since + SILENT_S and (sentence := self._waits_for()) != said:
                warnings.warn(sentence, stacklevel=2)
                said = sentence
            world = self.members.world
            if world is not None and world.number >= self._first:
                if world.end is not None:
                    return world.end
                if self.host.name in world.hosts and world.number > self.host.generation:
                    return world
                if self.host.name not in world.hosts and self.host.state == "unhealthy":
                    return self.host.outcome
                if self.host.name not in world.hosts and self.host.state != "ready":
                    self._say("ready")  # it was taken for lost, and may join again
            if time.monotonic() > since + PATIENCE_S:
                return Outcome(1, f"no start of the ranks with this host came about in {PATIENCE_S:g} s")
            time.sleep(LOOK_S / 5)
        return stopped_by(asked[-1])

    def _waits_for(self) -> str:
        """Return a sentence on the hosts that are here, and those that a start of the ranks waits for."""
        others = (name for name in self.members.here if name != self.host.name)
        here = sorted((self.host.name, *others))  # also while the others have yet to hear of this one
        least, most = self.job.sizes[0], self.job.sizes[-1]
        sizes = str(most) if least == most else f"{least} to {most}"
        names = ", ".join([*here[:MOST_NAMED], *(["..."] if len(here) > MOST_NAMED else [])])
        so_far = f"{len(here)} of {sizes} hosts {'is' if len(here) == 1 else 'are'} here ({names})"
        if len(here) >= least:
            return f"{so_far}; this one waits up to {PATIENCE_S:g} s for a start with its ranks"
        more = least - len(here)
        return f"{so_far}; the run waits up to {PATIENCE_S:g} s for {more} more: start the same command there"

    def _run_once(
        self,
        world: HostWorld,
        memory: SharedMemory,
        began: float,
        folder: Path,
        asked: Sequence[int],
    ) -> End:
        """Run this host's ranks of a generation, as long as it is the newest one."""
        number = world.number - world.origin
        if self.members.missed > self.host.generation:  # the others may have gone on another way
            memory.drop_snapshots()
        index, kept = world.hosts.index(self.host.name), self._store
        if index == 0:  # the generation's store is this host's, which opens another for the next one
            self._store = StoreServer(self.host.address, self._secret)
        passed = self._probe.recent
        self._say(
            "running", generation=world.number, steps=0, port=self._store.port, outcome=Outcome(),
            probed=None if passed is None else passed.seconds,
        )  # fmt: skip
        ranks, store = self.host.ranks, endpoint_of(world.address, world.port)
        size = len(world.hosts) * ranks
        place = HostPlace(store, self._secret, index * ranks, size, self.host.interface, LEASE_S)
        job = self.job.of(number == 0, len(world.hosts))
        known = self._step_times if self._hosts.issuperset(world.hosts) else ()  # one that joins may compile
        own = folder / f"generation-{number}"
        start = Start(number, job, place, memory, began, own, self.job.tell, known)
        handed: list[int] = []
        done = 0

        def interrupted() -> bool:
            nonlocal done
            handed.extend(asked[done:])
            done = max(done, len(asked))
            self._look(start.steps)
            if self._pending is not None and self._pending.stop and not handed:
                handed.append(signal.SIGUSR1)  # the ranks save, and hosts that wait can join
                done = 1  # they save for the user's first signal, too; a second one would end them at once
            assert self.members.world is not None
            return self.members.world.number > world.number

        try:
            self._zygote = self._zygote or Zygote(job.preload, memory.descriptors)
            if world.probe and job.health is not None and self._probe.recent is None:
                files = folder / f"probe-{number}"
                verdict = self._probe.run(job, self._zygote, memory, files, handed, interrupted)
                if verdict is None or verdict.sentence:
                    return self._not_started(verdict)
                self._say("running", probed=verdict.seconds)
            return start.run(self._zygote, handed, interrupted)
        except ZygoteLostError as error:
            self._close_zygote()
            return End(Outcome(1, str(error)), start.steps, time.monotonic())
        finally:
            self._hosts, self._step_times = frozenset(world.hosts), start.step_times
            if kept is not self._store:
                kept.close()

    def _not_started(self, verdict: HealthVerdict | None) -> End:
        """The end of a start that this host does not make, as its probe has failed or was given up."""
        given_up = Outcome(1, "the health probe was given up")
        end = End(given_up if verdict is None else verdict.outcome, 0, time.monotonic())
        if verdict is not None:  # before the store goes, by which ranks of others may wait
            self._report(end, leaves=False)
        return end

    def _close_zygote(self) -> None:
        if self._zygote is not None:
            self._zygote.close()
            self._zygote = None

    def _report(self, end: End, leaves: bool) -> None:
        """Say how this host's ranks have ended."""
        found = end.outcome
        state: State = "failed"
        if leaves:
            state = "leaving"
        elif found.stopped:
            state = "stopped"
        elif found.code == 0:
            state = "done"
        elif found.code == UnhealthyHostError.code:
            state = "unhealthy"
        self._say(state, steps=end.step, outcome=replace(found, details=found.details[-4096:]))

    def _say(self, state: State, **fields: Any) -> None:
        self.host = replace(self.host, state=state, beat=self.host.beat + 1, **fields)
        self._said_at = time.monotonic()
        self.members.write(self.host)

    # Looking, and leading ---------------------------------------------------------------------------

    def _look(self, steps: int | None = None) -> None:
        """Give a sign of life, look at the other hosts, and lead if it is this host's turn."""
        now = time.monotonic()
        if now < self._looked_at + LOOK_S:
            return
        self._looked_at = now
        try:
            if now >= self._said_at + BEAT_S:
                told = {} if steps is None else {"steps": steps}
                self._say(self.host.state, port=self._store.port, **told)
            self.members.look(now)
            self._unseen = False
            newest = self.members.world
            number = newest.number + 1 if newest is not None else 0
            older = newest is None or newest.number < self._first  # it is another run's
            world = NOBODY if newest is None or older else newest
            self._pending = None
            if world.end is None and self.members.leads:
                self._lead(world, number, now)
        except OSError as error:  # it may pass; if it does not, the others take this host for lost
            self._cannot_look(error)

    def _cannot_look(self, error: OSError) -> None:
        if not self._unseen:
            warnings.warn(f"{self.members.place} cannot be used for now: {error}", stacklevel=3)
        self._unseen = True

    def _lead(self, world: HostWorld, number: int, now: float) -> None:
        """Propose the next generation, if one is due."""
        hosts = self.members.hosts
        first = world is NOBODY
        if now < self._not_before or (
            first and len(hosts) < self.job.sizes[-1] and now < self._came_at + GATHER_S
        ):
            return
        self._tell_of_healthy(world)
        failed = any(host.state == "failed" and host.generation == world.number for host in hosts.values())
        self._failed_at = (self._failed_at or now) if failed else None
        patient = self._failed_at is not None and now < self._failed_at + PATIENT_S
        decision = self._pending = decide(
            world, hosts, self.job.sizes, self._judge, patient, self.members.failures
        )
        if decision is None or decision.stop or now < self._not_before:
            return
        generation = world.number - world.origin
        for host in hosts.values():
            if host.state == "unhealthy" and host.generation == world.number:
                self._count_failure("unhealthy", generation, host.name, host.outcome.sentence)
        if decision.end is not None:
            self.members.propose(HostWorld(number, end=decision.end))
            return
        store, origin = hosts[decision.hosts[0]], number if first else world.origin
        ended = all(name in hosts and hosts[name].state in ENDED for name in world.hosts)
        self.members.propose(
            HostWorld(number, decision.hosts, store.ranks, store.address, store.port, origin, probe=not ended)
        )
        for name in sorted(set(world.hosts) - set(decision.hosts)):
            self._leave_out(name, generation)
        for name in sorted(set(decision.hosts) - set(world.hosts)) if not first else ():
            self.job.tell("host_joined", {"generation": number - origin, "host": name})

    def _leave_out(self, name: str, generation: int) -> None:
        """Tell of a host that is not in the next start, and remove it if it is lost."""
        host = self.members.hosts.get(name)
        if host is None:
            sentence = f"host {name} gave no sign of life for {LOST_S:g} s"
            self._count_failure("host_lost", generation, name, sentence)
            warnings.warn(f"{sentence}; the ranks are started again without it", stacklevel=2)
        elif host.state == "unhealthy":
            warnings.warn(f"{host.outcome.sentence}; the ranks are started again without it", stacklevel=2)
            return  # it has been told, and leaves when it sees the next start
        else:
            sentence = f"host {name} is left out of the next start"
            if (times := self.members.failures(name)) >= FAILS_OFTEN and host.state != "leaving":
                sentence += f", in which another one takes its place: it has failed {times} times"
            self.job.tell("host_lost", {"generation": generation, "host": name, "message": sentence})
        self.members.remove(name)

    def _count_failure(self, kind: str, generation: int, name: str, sentence: str) -> None:
        """Tell of a host's failure, and add it to those that choose hosts."""
        self.members.count_failure(name)
        self.job.tell(kind, {"generation": generation, "host": name, "message": sentence})

    def _tell_of_healthy(self, world: HostWorld) -> None:
        """Tell once that all hosts of a start after a failure have passed their probes."""
        members = [self.members.hosts.get(name) for name in world.hosts]
        if not world.probe or self._told_healthy >= world.number:
            return
        seconds = [
            host.probed
            for host in members
            if host is not None and host.generation == world.number and host.probed is not None
        ]
        if len(seconds) == len(members):
            self._told_healthy = world.number
            fields = {"generation": world.number - world.origin, "seconds": max(seconds)}
            self.job.tell("healthy", {**fields, "hosts": len(members)})

    def _judge(self, host: Host) -> Outcome | None:
        """Return the outcome of the run, where the failure of a host is its end; each is judged once."""
        found = host.outcome
        if host.generation <= self._judged:
            return None
        self._judged = host.generation
        if found.recordable(host.steps):
            assert self.members.world is not None
            generation = host.generation - self.members.world.origin
            fields = {"generation": generation, "step": host.steps, "message": found.sentence}
            self.job.tell("failure", {**fields, "host": host.name})
            self.members.count_failure(host.name)
        end = self._policy.judge(found, host.steps, by_itself=found.code < 128)
        if end is None:
            warnings.warn(f"{found.sentence}; the ranks are started again", stacklevel=2)
            self._not_before = time.monotonic() + self._policy.pause  # an end is proposed at once
        return end
