"""Supervision of the ranks of this host: start them, watch them, end with them, and start them again.

A run has one start of all ranks after the other (`start.py`). Each has a store and a secret of its own, since
addresses of dead ranks in an old one would make the next hang, and its ranks are forked from a process that
has imported everything (`zygote.py`). When a rank fails or hangs, all are killed: what they need to go on is
in a snapshot or in a checkpoint, and a collective that lost a rank cannot be interrupted on every backend.

This takes the place of torch's elastic agent, which starts a new interpreter for each rank, keeps one store
for all its restarts, and notices a hang by the time limit of a collective only.
"""

from __future__ import annotations

import signal
import socket
import threading
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from meshwright.chaos.faults import FaultPlan
from meshwright.comm.store_server import StoreServer
from meshwright.launch.health_probe import HealthProbe
from meshwright.launch.restarts import RestartPolicy
from meshwright.launch.start import End, HostPlace, Job, ProbedRun, Start, Tell, stopped_by
from meshwright.launch.zygote import Zygote, ZygoteLostError
from meshwright.rank.failure import Outcome
from meshwright.rank.scratch import scratch_folder
from meshwright.rank.shared_memory import SharedMemory
from meshwright.spec import UserError
from meshwright.spec.errors import STOP_SIGNALS
from meshwright.spec.sections import RecoverySpec


@dataclass(frozen=True)
class Restarts:
    """How failed ranks are started again, and who hears of failures.

    `argv` is what restarted ranks run; `recovery.max_restarts` says how often. `tell` is called with each
    `failure` and `hang`, while no rank runs, and with `slow` and `zygote_stopped`, while they run. The first
    two have the fields `noticed`, when that was (`time.monotonic`), and `furthest`, the most steps that a
    rank completed. The `dumps` of a hang are files that last as long as the call.
    """

    argv: Sequence[str]
    tell: Tell


def run_ranks(
    argv: Sequence[str],
    nproc: int,
    *,
    module: str = Job.module,
    preload: Sequence[str] = (),
    restarts: Restarts | None = None,
    recovery: RecoverySpec | None = None,
    stages: int = 1,
    faults: FaultPlan | None = None,
    health: ProbedRun | None = None,
) -> Outcome:
    """Run `python -m module argv...` as `nproc` ranks, and return how they ended.

    Rank 0 has the terminal; the output of the others goes to files in a temporary folder. The outcome is that
    of the first failure (128 + the signal for a rank that a signal ended), or with `restarts` of the last
    one. SIGINT, SIGTERM, SIGHUP, SIGUSR1 and SIGQUIT are handed to the ranks. `faults` hit the ranks. This
    host's `health` is probed before they are started again.
    """
    if nproc < 1:
        raise UserError(f"--nproc: {nproc} is not a number of processes; give 1 or more")
    job = Job(argv, nproc, module, preload, recovery or RecoverySpec(), stages, faults, health)
    return Supervisor(job, restarts).run()


class Supervisor:
    """Runs a job's ranks until they have succeeded, or shall not be started again."""

    def __init__(self, job: Job, restarts: Restarts | None = None) -> None:
        self.job, self.restarts = job, restarts
        self.generation = 0
        self._zygote: Zygote | None = None
        self._step_times: Sequence[float] = ()
        self._policy = RestartPolicy(job.recovery.max_restarts)
        self._probe = HealthProbe(socket.gethostname())

    def run(self) -> Outcome:
        """Start the ranks until they succeed or shall not be started again, and return its outcome."""
        began = time.monotonic()
        with (
            stop_requests() as asked,
            scratch_folder() as folder,
            SharedMemory(self.job.nproc) as memory,
            ExitStack() as stack,
        ):
            stack.callback(self._close_zygote)
            while True:
                end = self._run_once(memory, began, folder / f"generation-{self.generation}", asked)
                final = self._final(end, asked)
                if final is not None:
                    return final
                _sleep(self._policy.pause, asked)
                self.generation += 1
                unhealthy = self._unhealthy(memory, folder / f"probe-{self.generation}", asked)
                if asked:
                    return stopped_by(asked[-1])
                if unhealthy is not None:
                    return unhealthy
                assert self.restarts is not None
                self.job = replace(self.job, argv=self.restarts.argv)

    def _run_once(self, memory: SharedMemory, began: float, folder: Path, asked: Sequence[int]) -> End:
        """Start the ranks once, with a new zygote where there is none."""
        tell = self.restarts.tell if self.restarts is not None else None
        zygote = self._own_zygote(memory)
        folder.mkdir()
        known, place, store = self._step_times, HostPlace(None), None
        if self.job.nproc > 1:
            store = StoreServer(folder)
            place = HostPlace(store.endpoint, store.secret)
        start = Start(self.generation, self.job, place, memory, began, folder, tell, known)
        try:
            return start.run(zygote, asked)
        except ZygoteLostError as error:
            self._close_zygote()
            found = stopped_by(asked[-1]) if asked else Outcome(1, str(error))
            return End(found, start.steps, time.monotonic())
        finally:
            self._step_times = start.step_times
            if store is not None:
                store.close()

    def _unhealthy(self, memory: SharedMemory, folder: Path, asked: Sequence[int]) -> Outcome | None:
        """Probe this host before ranks are started again; the run's outcome if it fails."""
        if self.job.health is None or asked or self._probe.recent is not None:
            return None
        for attempt in ("first", "second"):  # what ended a zygote may not have to do with the host
            try:
                verdict = self._probe.run(self.job, self._own_zygote(memory), memory, folder / attempt, asked)
                break
            except ZygoteLostError as error:
                self._close_zygote()
                verdict = self._probe.lost(error)
        if verdict is None:
            return None
        assert self.restarts is not None
        fields: dict[str, Any] = {"generation": self.generation, "seconds": verdict.seconds}
        if not verdict.sentence:
            self.restarts.tell("healthy", {**fields, "hosts": 1})
            return None
        self.restarts.tell("unhealthy", {**fields, "host": self._probe.name, "message": verdict.sentence})
        return verdict.outcome

    def _own_zygote(self, memory: SharedMemory) -> Zygote:
        faults = [self.job.faults.hits.descriptor] if self.job.faults is not None else []
        self._zygote = self._zygote or Zygote(self.job.preload, memory.descriptors + faults)
        return self._zygote

    def _close_zygote(self) -> None:
        if self._zygote is not None:
            self._zygote.close()
            self._zygote = None

    def _final(self, end: End, asked: Sequence[int]) -> Outcome | None:
        """Return the outcome of the whole run, or None if the ranks shall be started again."""
        found, restarts = end.outcome, self.restarts
        if restarts is None or not found.recordable(end.steps):
            return found
        fields: dict[str, Any] = {"generation": self.generation, "step": end.step, "message": found.sentence}
        fields |= {"noticed": end.noticed, "furthest": end.steps}
        if end.hang is None:
            restarts.tell("failure", fields)
        else:
            hang = {"ranks": end.hang.ranks, "seconds": end.hang.seconds, "stacks": end.stacks}
            hang |= {"dumps": end.dumps}
            restarts.tell("hang", fields | hang)
        # Not by a signal, nor because of a hang or a lost zygote: likely an error of the program itself.
        by_itself = found.code < 128 and end.hang is None and self._zygote is not None
        final = self._policy.judge(found, end.steps, by_itself) if not asked else found
        if final is None:
            warnings.warn(f"{found.sentence}; the ranks are started again", stacklevel=2)
        return final


def _sleep(seconds: float, asked: Sequence[int]) -> None:
    """Sleep, but not beyond a signal."""
    until = time.monotonic() + seconds
    while time.monotonic() < until and not asked:
        time.sleep(0.05)


@contextmanager
def stop_requests() -> Iterator[list[int]]:
    """Note the signals that ask for an end in the list that it yields, as long as the context lasts.

    Signals that this process ignores stay ignored. Python delivers signals to the main thread alone, so in
    any other thread the context changes nothing.
    """
    asked: list[int] = []
    before: dict[signal.Signals, Any] = {}
    if threading.current_thread() is threading.main_thread():
        for number in (*STOP_SIGNALS, signal.SIGQUIT):
            if signal.getsignal(number) is not signal.SIG_IGN:
                before[number] = signal.signal(number, lambda number, _frame: asked.append(number))
    try:
        yield asked
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
