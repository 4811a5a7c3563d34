"""Supervision of the ranks of this host: start them, watch them, end with them, and start them again.

A start of all ranks is a generation (`generation.py`). Each has a store of its own on a new port, since
addresses of dead ranks in an old one would make the next hang, and its ranks are forked from a process that
has imported everything (`zygote.py`). When a rank fails or hangs, all are killed: what they need to go on is
in a snapshot or in a checkpoint, and a collective that lost a rank cannot be interrupted on every backend.

This takes the place of torch's elastic agent, which starts a new interpreter for each rank, keeps one store
for all its restarts, and notices a hang by the time limit of a collective only.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from meshwright.launch.failure import KINDS, Outcome
from meshwright.launch.scratch import scratch_folder
from meshwright.recover.faults import Plan
from meshwright.recover.generation import End, Generation, Job, stopped_by
from meshwright.recover.shared_memory import SharedMemory
from meshwright.recover.zygote import Zygote, ZygoteLostError
from meshwright.spec import UserError
from meshwright.spec.errors import STOP_SIGNALS

CRASH_LOOP = 79
"""Exit code of a run that fails again and again without getting further."""
BACK_OFF_S = (0.0, 1.0, 5.0, 30.0)
"""Pauses before restarts that follow each other without progress; the last holds for all further ones."""


@dataclass(frozen=True)
class Restarts:
    """When and how failed ranks are started again.

    `most` restarts may follow each other without a step that was not done before; `argv` is what restarted
    ranks run. `tell` is called with (kind, fields) of each failure and hang, while no rank runs; their field
    `noticed` is when that was (`time.monotonic`).
    """

    most: int
    argv: Sequence[str]
    tell: Callable[[str, dict[str, Any]], None]


def run_ranks(
    argv: Sequence[str],
    nproc: int,
    *,
    module: str = "meshwright",
    preload: Sequence[str] = (),
    restarts: Restarts | None = None,
    faults: Plan | None = None,
) -> Outcome:
    """Run `python -m module argv...` as `nproc` ranks, and return how they ended.

    Rank 0 has the terminal; the output of the others goes to files in a temporary folder. The outcome is that
    of the first failure (128 + the signal for a rank that a signal ended), or with `restarts` of the last
    one. SIGINT, SIGTERM, SIGHUP, SIGUSR1 and SIGQUIT are handed to the ranks. `faults` hit the ranks.
    """
    if nproc < 1:
        raise UserError(f"--nproc: {nproc} is not a number of processes; give 1 or more")
    return Supervisor(Job(argv, nproc, module, preload, faults), restarts).run()


class Supervisor:
    """Runs a job's ranks until they have succeeded, or shall not be started again."""

    def __init__(self, job: Job, restarts: Restarts | None = None) -> None:
        self.job, self.restarts = job, restarts
        self.generation = 0
        self._zygote: Zygote | None = None
        self._furthest = -1
        self._fruitless = 0
        """Failures since the run last got further than before, that one included."""
        self._last = Outcome()

    def run(self) -> Outcome:
        """Run generations until one succeeds or shall be the last, and return its outcome."""
        began = time.monotonic()
        with (
            _signals() as asked,
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
                _sleep(BACK_OFF_S[min(self._fruitless, len(BACK_OFF_S)) - 1], asked)
                self.generation += 1
                assert self.restarts is not None
                self.job = replace(self.job, argv=self.restarts.argv)

    def _run_once(self, memory: SharedMemory, began: float, folder: Path, asked: Sequence[int]) -> End:
        """Run one generation, with a new zygote where there is none."""
        generation = Generation(self.generation, self.job, memory, began, folder)
        try:
            faults = [self.job.faults.hits.descriptor] if self.job.faults is not None else []
            self._zygote = self._zygote or Zygote(self.job.preload, memory.descriptors + faults)
            return generation.run(self._zygote, asked)
        except ZygoteLostError as error:
            self._zygote = None
            found = stopped_by(asked[-1]) if asked else Outcome(1, str(error))
            return End(found, 0, time.monotonic())

    def _close_zygote(self) -> None:
        if self._zygote is not None:
            self._zygote.close()

    def _final(self, end: End, asked: Sequence[int]) -> Outcome | None:
        """Return the outcome of the whole run, or None if the ranks shall be started again."""
        found, restarts = end.outcome, self.restarts
        if restarts is None or found.code == 0 or found.stopped or found.code in KINDS:
            return found
        fields: dict[str, Any] = {"generation": self.generation, "step": end.steps, "message": found.sentence}
        fields["noticed"] = end.noticed
        if end.hang is None:
            restarts.tell("failure", fields)
        else:
            restarts.tell("hang", {**fields, "ranks": end.hang.ranks, "stacks": end.stacks})
        repeated = bool(found.details) and found.sentence == self._last.sentence
        self._fruitless = 1 if end.steps > self._furthest else self._fruitless + 1
        self._furthest, self._last = max(self._furthest, end.steps), found
        if asked or (end.steps == 0 and found.details):  # an error of the program itself
            return found
        if self._fruitless <= restarts.most and not (repeated and self._fruitless > 1):
            return None
        times = "once" if self.generation == 1 else f"{self.generation} times"
        sentence = (
            f"{found.sentence}; the ranks were started again {times} and do not get beyond step {end.steps}"
        )
        return Outcome(CRASH_LOOP, sentence, found.details)


def _sleep(seconds: float, asked: Sequence[int]) -> None:
    """Sleep, but not beyond a signal."""
    until = time.monotonic() + seconds
    while time.monotonic() < until and not asked:
        time.sleep(0.05)


@contextmanager
def _signals() -> Iterator[list[int]]:
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
