"""A generation: one start of all ranks of this host, watched until all have ended."""

from __future__ import annotations

import json
import os
import signal
import socket
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from meshwright.launch.env import SUPERVISOR, Supervision
from meshwright.launch.failure import Outcome, RankEnd, last_words, outcome
from meshwright.parallel.heartbeat import Beat
from meshwright.recover.faults import Plan
from meshwright.recover.hang import Hang, HangWatch
from meshwright.recover.processes import kill_session, send_signal
from meshwright.recover.shared_memory import SharedMemory
from meshwright.recover.zygote import Ended, RankProcess, Started, Zygote

if TYPE_CHECKING:
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

HOST = "127.0.0.1"
POLL_S = 0.05
ECHO_S = 0.5
"""Ranks get so long to record their errors after the first has ended with one."""
GRACE_S = 30.0
"""Ranks get so long to save and end after a signal."""
STACKS_S = 1.0
"""Ranks of a run that hangs get so long to write their stacks."""


@dataclass(frozen=True)
class Job:
    """Work of ranks: `python -m module argv...`, as `nproc` processes of this host."""

    argv: Sequence[str]
    nproc: int
    module: str = "meshwright"
    preload: Sequence[str] = ()
    """Modules that the ranks need, imported once for all of them."""
    faults: Plan | None = None
    """Faults that shall hit the ranks."""


@dataclass(frozen=True)
class End:
    """A generation's end: the outcome, the steps completed, and the hang that it was ended for, if any.

    `noticed` is when the first failure or the hang was noticed (`time.monotonic`); `stacks` are those of all
    ranks in a hang.
    """

    outcome: Outcome
    steps: int
    noticed: float
    hang: Hang | None = None
    stacks: str = ""


@dataclass
class _Rank:
    folder: Path
    pid: int | None = None
    end: RankEnd | None = None
    killed: bool = False


def stopped_by(number: int) -> Outcome:
    """Return the outcome of a run that a signal has ended, and that has saved nothing for it."""
    return Outcome(128 + number, f"stopped by {signal.Signals(number).name}", stopped=True)


class Generation:
    """Ranks that start, run and end together; `number` counts their starts from 0."""

    def __init__(self, number: int, job: Job, memory: SharedMemory, began: float, folder: Path) -> None:
        self.number, self.job, self._memory = number, job, memory
        faults = job.faults.given if job.faults is not None else {}
        self._supervision = Supervision(number, began, memory.heartbeats, memory.snapshots, **faults)
        self._ranks = [_Rank(folder / f"rank-{rank}") for rank in range(job.nproc)]
        self._watch: HangWatch | None = None
        self._noticed: float | None = None
        self._kill_at = float("inf")
        self._hang: Hang | None = None

    def run(self, zygote: Zygote, asked: Sequence[int]) -> End:
        """Start the ranks, and return when all have ended. Raises `ZygoteLostError`.

        Signals that are appended to `asked` meanwhile are handed to the ranks, which then have `GRACE_S`; one
        that comes before all ranks run returns at once, and the ranks end with the zygote.
        """
        self._memory.beats[:] = bytes(len(self._memory.beats))
        store = _loopback_store()
        for number, rank in enumerate(self._ranks):
            rank.folder.mkdir(parents=True)
            zygote.fork(self._process(number, store.port))
        handed_on = 0
        while any(rank.end is None for rank in self._ranks):
            for report in zygote.receive(POLL_S):
                self._note(report)
            now = time.monotonic()
            if asked and any(rank.pid is None for rank in self._ranks):
                break
            for number in asked[handed_on:]:
                self._hand_on(number, now)
            handed_on = len(asked)
            if self._kill_at == float("inf"):
                self._look_for_hang(now)
            if now >= self._kill_at:
                self._kill()
        return self._ended(asked)

    def _process(self, number: int, port: int) -> RankProcess:
        folder = self._ranks[number].folder
        environment = {
            **os.environ,
            "RANK": str(number),
            "WORLD_SIZE": str(self.job.nproc),
            "LOCAL_RANK": str(number),
            "LOCAL_WORLD_SIZE": str(self.job.nproc),
            "MASTER_ADDR": HOST,
            "MASTER_PORT": str(port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",  # the supervisor holds the store, and rank 0 joins it
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
        self._kill_at = min(self._kill_at, now + GRACE_S)

    def _look_for_hang(self, now: float) -> None:
        living = {n: rank.pid for n, rank in enumerate(self._ranks) if rank.pid is not None and not rank.end}
        if len(living) < len(self._ranks):
            return
        self._watch = self._watch or HangWatch(living, self._memory.beats, now)
        self._hang = self._watch.look(now)
        if self._hang is None:
            return
        self._noticed = now
        for pid in living.values():  # a stopped process writes its stacks as it goes on
            send_signal(pid, signal.SIGUSR2)
            send_signal(pid, signal.SIGCONT)
        self._kill_at = now + STACKS_S

    def _kill(self) -> None:
        for rank in self._ranks:
            if rank.end is None and rank.pid is not None and not rank.killed:
                rank.killed = True
                kill_session(rank.pid)

    def _ended(self, asked: Sequence[int]) -> End:
        """Return the end, now that every rank has ended or a signal came before all had started."""
        ends = {number: rank.end for number, rank in enumerate(self._ranks) if rank.end is not None}
        steps = max(Beat.of(self._memory.beats, number).step for number in range(len(self._ranks)))
        noticed = self._noticed or time.monotonic()
        if self._hang is not None:
            found = Outcome(1, self._hang.sentence)
            return End(found, steps, noticed, self._hang, self._stacks())
        if len(ends) == len(self._ranks) and all(end.code == 0 for end in ends.values()):
            return End(Outcome(), steps, noticed)
        if asked:
            words = last_words(rank.folder / "error.json" for rank in self._ranks)
            return End(
                stopped_by(asked[-1]) if words is None else Outcome(*words, stopped=True), steps, noticed
            )
        return End(outcome(ends, len(ends)), steps, noticed)

    def _stacks(self) -> str:
        """Return the stacks that the ranks have written, each under its rank."""
        files = [rank.folder / "stacks.txt" for rank in self._ranks]
        written = [file.read_text(encoding="utf-8", errors="replace") for file in files]
        return "\n".join(f"rank {number}:\n{text}" for number, text in enumerate(written))


def _loopback_store() -> TCPStore:
    """Return the store of a generation.

    torch's own store listens on every interface. Here the listening socket is bound first, to 127.0.0.1 and a
    port of the system's choice, and then given to the store.
    """
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    with socket.create_server((HOST, 0)) as listener:
        port, descriptor = listener.getsockname()[1], listener.detach()
    return TCPStore(
        HOST,
        port,
        is_master=True,
        timeout=timedelta(minutes=5),
        wait_for_workers=False,
        master_listen_fd=descriptor,
    )
