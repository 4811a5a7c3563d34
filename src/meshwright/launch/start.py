"""One start of all ranks of this host, watched until all have ended; its number is the generation."""

from __future__ import annotations

import json
import os
import signal
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from meshwright.chaos.faults import FaultPlan
from meshwright.comm.heartbeat import Beat
from meshwright.launch.hang import Hang, HangWatch
from meshwright.launch.slow import SlowWatch
from meshwright.launch.zygote import Ended, RankProcess, Started, Zygote, ZygoteLostError
from meshwright.profile.cgroup import oom_kills
from meshwright.rank.env import LOOPBACK, SUPERVISOR, Supervision
from meshwright.rank.failure import Outcome, RankEnd, last_words, outcome
from meshwright.rank.flight_recorder import DUMP, BadDumpError, ask_for_dump, dump_of, first_uncompleted
from meshwright.rank.processes import kill_session, send_signal
from meshwright.rank.rendezvous import SECRET, STORE
from meshwright.rank.shared_memory import SharedMemory
from meshwright.spec import RunSpec
from meshwright.spec.sections import RecoverySpec
from meshwright.train.signals import ECHO_SECONDS, OTHER_ECHO_SECONDS

POLL_S = 0.05
ECHO_S = 0.5
"""Ranks get so long to record their errors after the first has ended with one."""
STACKS_S, DUMP_S = 1.0, 0.1
"""Ranks of a run that hangs get so long to write their stacks, and so long once all have begun."""
RECORDED_S = 5.0
"""Ranks get so long for dumps of NCCL's flight recorder, which looks once a second whether one is wanted."""
AT_ONCE_S = 1.0
"""Ranks that a later signal ends at once have so long; one that is stopped or stuck does not heed it."""
ZYGOTE_STOPPED_S = 3.0
"""A zygote that is stopped for so long is made to go on."""
KILLED_S = 30.0
"""Ranks that have been killed must be reported to have ended by then, or the zygote is lost."""

Tell = Callable[[str, dict[str, Any]], None]
"""Called with the kind and the fields of an event."""


@dataclass(frozen=True)
class ProbedRun:
    """The run, and its folder, that a host's health is probed for."""

    spec: RunSpec
    folder: Path


@dataclass(frozen=True)
class Job:
    """Work of ranks: `python -m module argv...`, as `nproc` processes of this host."""

    argv: Sequence[str]
    nproc: int
    module: str = "meshwright.launch.call"
    preload: Sequence[str] = ()
    """Modules that the ranks need, imported once for all of them."""
    recovery: RecoverySpec = field(default_factory=RecoverySpec)
    stages: int = 1
    """Ranks are so many equal parts, each of which does its own work, as the stages of a pipeline."""
    faults: FaultPlan | None = None
    """Faults that shall hit the ranks."""
    health: ProbedRun | None = None
    """The run that the host is probed for before its ranks are started again; None leaves it out."""


@dataclass(frozen=True)
class HostPlace:
    """This host's ranks in their world: the number of the first, and the world's store with its secret.

    `store` is the endpoint of a `StoreServer`; None in a world of one rank, which has its store to itself.
    `world_size` None is that of the job; `interface` is the one that ranks listen on.
    """

    store: str | None
    secret: bytes = field(default=b"", repr=False)
    first_rank: int = 0
    world_size: int | None = None
    interface: str = LOOPBACK
    lease_seconds: float = 60.0
    """Time after which a holder of the run's lease without a sign of life has lost it."""


@dataclass(frozen=True)
class End:
    """The end of a start: the outcome, the steps completed, and the hang that it was ended for, if any.

    `steps` are those of the rank that was furthest; ranks in a hang may go on until they are killed.
    `noticed` is when the first failure or the hang was noticed (`time.monotonic`); `stacks` are those of all
    ranks in a hang, and `dumps` files of NCCL's flight recorder.
    """

    outcome: Outcome
    steps: int
    noticed: float
    hang: Hang | None = None
    stacks: str = ""
    dumps: Sequence[Path] = ()

    @property
    def step(self) -> int:
        """Steps completed by the ranks that hang, as their sentence says, or by the furthest rank."""
        return self.steps if self.hang is None else self.hang.step


@dataclass
class _Started:
    folder: Path
    pid: int | None = None
    end: RankEnd | None = None
    killed: bool = False


def stopped_by(number: int) -> Outcome:
    """Return the outcome of a run that a signal has ended, and that has saved nothing for it."""
    name = signal.Signals(number).name
    sentence = (
        f"stopped by {name}, and nothing was saved for it; start it again, with --resume auto if it has a "
        f"checkpoint"
    )
    return Outcome(128 + number, sentence, stopped=True)


class Start:
    """Ranks that start, run and end together; `number` counts their starts from 0.

    `step_times` are the seconds of steps that an earlier start has seen.
    """

    def __init__(
        self,
        number: int,
        job: Job,
        place: HostPlace,
        memory: SharedMemory,
        began: float,
        folder: Path,
        tell: Tell | None = None,
        step_times: Sequence[float] = (),
    ) -> None:
        self.number, self.job, self.place, self._memory, self._tell = number, job, place, memory, tell
        faults = job.faults.given if job.faults is not None else {}
        shared = memory.heartbeats, memory.snapshots
        self._recorder = folder / "flight-recorder"
        self._recording: list[int] = []
        """Ranks that were asked for a dump of the flight recorder."""
        self._supervision = Supervision(
            number, began, *shared, place.lease_seconds, str(self._recorder), **faults
        )
        self._ranks = [_Started(folder / f"rank-{rank}") for rank in range(job.nproc)]
        self._watch: HangWatch | None = None
        self._slow: SlowWatch | None = None
        self._step_times = tuple(step_times)
        self._noticed: float | None = None
        self._kill_at = float("inf")
        self._asked_at: float | None = None
        """When the first signal was handed on."""
        self._hang: Hang | None = None
        self._oom_kills = oom_kills()

    def run(
        self, zygote: Zygote, asked: Sequence[int], interrupted: Callable[[], bool] = lambda: False
    ) -> End:
        """Start the ranks, and return when all have ended. Raises `ZygoteLostError`.

        Signals that are appended to `asked` meanwhile are handed to the ranks, which then have
        `recovery.grace_seconds`, or after a later one that is no echo `AT_ONCE_S`; one that comes before all
        ranks run returns at once, and the ranks end with the zygote. The ranks are killed when `interrupted`,
        called many times a second, returns True.
        """
        self._memory.beats[:] = bytes(len(self._memory.beats))
        for number, rank in enumerate(self._ranks):
            rank.folder.mkdir(parents=True)
            zygote.fork(self._process(number))
        handed_on = 0
        while any(rank.end is None for rank in self._ranks):
            for report in zygote.receive(POLL_S):
                self._note(report)
            now = time.monotonic()
            self._wake(zygote, now)
            if asked and any(rank.pid is None for rank in self._ranks):
                break
            for number in asked[handed_on:]:
                self._hand_on(number, now)
            handed_on = len(asked)
            if interrupted():
                self._kill_at = now
            if self._kill_at == float("inf"):
                self._look(now)
            elif self._hang is not None and self._told():  # stopped ranks go on until they are killed
                self._kill_at = min(self._kill_at, now + DUMP_S)
            if now >= self._kill_at:
                self._kill()
            if now >= self._kill_at + KILLED_S:
                raise ZygoteLostError("the process that forks ranks does not tell their ends")
        return self._ended(asked)

    @property
    def step_times(self) -> tuple[float, ...]:
        """Seconds of the steps that this start or an earlier one has seen, for the next start."""
        return self._step_times if self._watch is None else self._watch.step_times

    @property
    def steps(self) -> int:
        """Steps that the rank which is furthest has completed."""
        return max(Beat.of(self._memory.beats, number).step for number in range(len(self._ranks)))

    def _process(self, number: int) -> RankProcess:
        folder, place = self._ranks[number].folder, self.place
        environment = {
            **os.environ,
            "RANK": str(place.first_rank + number),
            "WORLD_SIZE": str(place.world_size or self.job.nproc),
            "LOCAL_RANK": str(number),
            "LOCAL_WORLD_SIZE": str(self.job.nproc),
            **({} if place.store is None else {STORE: place.store, SECRET: place.secret.hex()}),
            "GLOO_SOCKET_IFNAME": place.interface,
            "NCCL_SOCKET_IFNAME": os.environ.get("NCCL_SOCKET_IFNAME", place.interface),
            "TORCHELASTIC_RESTART_COUNT": str(self.number),
            "TORCHELASTIC_ERROR_FILE": str(folder / "error.json"),
            SUPERVISOR: json.dumps(asdict(self._supervision)),
        }
        stacks, logs = str(folder / "stacks.txt"), None if number == 0 else str(folder)
        return RankProcess(number, self.job.module, tuple(self.job.argv), environment, stacks, logs)

    def _note(self, report: Started | Ended) -> None:
        """Take down that a rank runs or has ended; the first failure ends the others, too."""
        rank = self._ranks[report.number]
        if isinstance(report, Started):
            rank.pid = report.pid
            return
        log = None if report.number == 0 else rank.folder / "stderr.log"
        rank.end = RankEnd(report.code, time.time(), rank.folder / "error.json", log, rank.killed)
        if self._watch is not None:
            self._watch.ended(report.number)
        if report.code != 0 and not rank.killed:
            now = time.monotonic()
            self._noticed = self._noticed or now
            # A signal leaves no words to wait for; an error of one rank may be an echo of another's.
            self._kill_at = min(self._kill_at, now if report.code < 0 else now + ECHO_S)

    def _hand_on(self, number: int, now: float) -> None:
        """Send a signal to all ranks."""
        for rank in self._ranks:
            if rank.end is None and rank.pid is not None:
                send_signal(rank.pid, number)
        if self._asked_at is None:
            self._asked_at = now
        meant = now >= self._asked_at + ECHO_SECONDS.get(signal.Signals(number), OTHER_ECHO_SECONDS)
        self._kill_at = min(self._kill_at, now + (AT_ONCE_S if meant else self.job.recovery.grace_seconds))

    def _wake(self, zygote: Zygote, now: float) -> None:
        """Let a zygote that has been stopped go on, and tell it: without it no rank's end is known."""
        seconds = zygote.stopped_seconds(now)
        if seconds < ZYGOTE_STOPPED_S:
            return
        sentence = f"the process that forks ranks was stopped for {seconds:.1f} s, and goes on (SIGCONT)"
        warnings.warn(sentence, stacklevel=2)
        if self._tell is not None:
            self._tell("zygote_stopped", {"generation": self.number, "message": sentence})
        zygote.wake()

    def _look(self, now: float) -> None:
        """Look for ranks that hang or are slow, once all have started."""
        living = {n: rank.pid for n, rank in enumerate(self._ranks) if rank.pid is not None and not rank.end}
        if self._watch is None or self._slow is None:
            if len(living) < len(self._ranks):
                return
            beats, stuck = self._memory.beats, self.job.recovery.hang_seconds
            known, first = self._step_times, self.place.first_rank
            self._watch = HangWatch(living, beats, now, first, stuck_seconds=stuck, step_times=known)
            peers = (self.place.world_size or len(living)) // self.job.stages
            self._slow = SlowWatch(beats, len(living), now, peers, first, list(living.values()))
        for slow in self._slow.look(now):
            if self._tell is not None:
                self._tell("slow", {"generation": self.number, **asdict(slow), "message": slow.sentence})
        self._hang = self._watch.look(now)
        if self._hang is None:
            return
        self._noticed = now
        for pid in living.values():  # a stopped process writes its stacks as it goes on
            send_signal(pid, signal.SIGUSR2)
            send_signal(pid, signal.SIGCONT)
        first = self.place.first_rank
        self._recording = [
            first + number for number in living if ask_for_dump(self._recorder, first + number)
        ]
        self._kill_at = now + (RECORDED_S if self._recording else STACKS_S)

    def _kill(self) -> None:
        for rank in self._ranks:
            if rank.end is None and rank.pid is not None and not rank.killed:
                rank.killed = True
                kill_session(rank.pid)

    def _ended(self, asked: Sequence[int]) -> End:
        """Return the end, now that every rank has ended or a signal came before all had started."""
        ends = {number: rank.end for number, rank in enumerate(self._ranks) if rank.end is not None}
        steps = self.steps
        noticed = self._noticed or time.monotonic()
        if self._hang is not None:
            dumps = [dump_of(self._recorder, rank) for rank in self._recording]
            dumps = [dump for dump in dumps if dump.exists()]
            recorded = {int(dump.name.removeprefix(DUMP)): _recorded(dump) for dump in dumps}
            told = [f"rank {rank}: {words}" for rank, words in recorded.items() if rank in self._hang.ranks]
            hang = self._hang.with_clause(f"NCCL's flight recorder of {told[0]}" if told else "")
            lines = [f"NCCL's flight recorder of rank {rank}: {words}\n" for rank, words in recorded.items()]
            return End(
                Outcome(1, hang.sentence), steps, noticed, hang, "".join([*lines, self._stacks()]), dumps
            )
        if len(ends) == len(self._ranks) and all(end.code == 0 for end in ends.values()):
            return End(Outcome(), steps, noticed)
        if asked:
            words = last_words(rank.folder / "error.json" for rank in self._ranks)
            return End(
                stopped_by(asked[-1]) if words is None else Outcome(*words, stopped=True), steps, noticed
            )
        before, now = self._oom_kills, oom_kills()
        out_of_memory = None if before is None or now is None else now > before
        named = {self.place.first_rank + number: end for number, end in ends.items()}
        size = self.place.world_size or len(self._ranks)
        return End(outcome(named, size, out_of_memory), steps, noticed)

    def _told(self) -> bool:
        """True if all ranks have begun to write their stacks, and those that were asked their dumps."""
        files = [rank.folder / "stacks.txt" for rank in self._ranks if rank.end is None]
        files += [dump_of(self._recorder, rank) for rank in self._recording]
        return all(file.exists() and file.stat().st_size for file in files)

    def _stacks(self) -> str:
        """Return the stacks that the ranks have written, each under its rank."""
        found = []
        for number, rank in enumerate(self._ranks):
            file = rank.folder / "stacks.txt"  # made by the rank when it starts
            text = file.read_text(encoding="utf-8", errors="replace") if file.exists() else ""
            found.append(f"rank {number}:\n{text or 'it has written none'}\n")
        return "\n".join(found)


def _recorded(dump: Path) -> str:
    """A dump of NCCL's flight recorder in words."""
    try:
        found = first_uncompleted(dump)
    except BadDumpError as error:
        return str(error)
    return "all collectives are completed" if found is None else str(found)
