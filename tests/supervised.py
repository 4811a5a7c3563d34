"""Runs of two real ranks under the supervisor of this process, with faults at given places."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import small
from meshwright import api
from meshwright.comm.heartbeat import PHASES, Beat
from meshwright.launch import restarts, supervisor
from meshwright.launch.start import Start
from meshwright.runs.record import read_run
from meshwright.spec import RunSpec

STEPS = 40
TESTS = Path(__file__).parent


def spec_of(corpus: Path, **flags: object) -> RunSpec:
    base = {
        "model.vocab_size": 300,
        "data.corpus": corpus,
        "data.tokenizer": "byte",
        "data.seq_len": 16,
        "data.val_fraction": 0.1,
        "data.cache": corpus.parent / "tokens",
        "train.batch_tokens": 8 * 16,
        "train.steps": STEPS,
        "train.eval_every": 16,
        "train.eval_tokens": 512,
        "layout.dp": 2,
        "checkpoint.every": 4,
        "recovery.max_restarts": 100,
    }
    return small.spec_of(base, **flags)


def environment(**plan: Any) -> dict[str, str]:
    """The environment of ranks that run the program `planted` with a plan, if any."""
    path = os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")])
    return {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "PLANTED": json.dumps(plan)}


@dataclass(frozen=True)
class Fault:
    """A signal to a rank, so many seconds after it has got to a phase of a step.

    With `zygote`, the process that it was forked from gets the signal in its place.
    """

    rank: int
    phase: str = "forward"
    step: int = 0
    delay: float = 0.0
    number: int = signal.SIGKILL
    zygote: bool = False


class Faults(threading.Thread):
    """Signals a rank of each generation; `sent` has the time of each signal, and the end of the ranks' pids.

    A fault whose place never comes, as the run ends before it, is left out.
    """

    def __init__(self, faults: Sequence[Fault]) -> None:
        super().__init__(daemon=True)
        self.faults, self.sent = faults, list[float]()
        self.pids: set[int] = set()
        self.start_of_ranks: Start | None = None
        self.over = False

    def watch(self, made: Start) -> None:
        self.start_of_ranks = made

    def run(self) -> None:
        for number, fault in enumerate(self.faults):
            if not self._wait(partial(self._there, number, fault)):
                return
            time.sleep(fault.delay)
            rank = self.start_of_ranks._ranks[fault.rank]  # type: ignore[union-attr]
            if rank.end is None and rank.pid is not None:
                self.sent.append(time.time())
                os.kill(parent(rank.pid) if fault.zygote else rank.pid, fault.number)

    def _there(self, number: int, fault: Fault) -> bool:
        made = self.start_of_ranks
        if made is None or made.number < number or made._ranks[fault.rank].pid is None:
            return False
        self.pids.update(rank.pid for rank in made._ranks if rank.pid is not None)
        beat = Beat.of(made._memory.beats, fault.rank)
        order = PHASES.index(fault.phase)
        return beat.step > fault.step or (beat.step == fault.step and PHASES.index(beat.phase) >= order)

    def _wait(self, until: Callable[[], bool]) -> bool:
        while not self.over:
            if until():
                return True
            time.sleep(0.001)
        return False


def train(
    spec: RunSpec, out: Path, faults: Sequence[Fault] = (), resume: str | None = None, **plan: Any
) -> tuple[dict[str, Any], Faults]:
    """Run the spec, and return the result and the faults; a second zygote is only started after a fault.

    Pauses before restarts are left out.
    """
    thread = Faults(faults)

    class Watched(Start):
        def run(self, *arguments: Any) -> Any:
            thread.watch(self)
            return super().run(*arguments)

    ranks = partial(supervisor.run_ranks, module="planted")
    with (
        patch.dict(os.environ, environment(**plan)),
        patch.object(supervisor, "run_ranks", ranks),
        patch.object(supervisor, "Start", Watched),
        patch.object(restarts, "BACK_OFF_S", (0.0,)),
    ):
        thread.start()
        try:
            return api.train(spec, out=out, resume=resume, quiet=True), thread
        finally:
            thread.over = True
            thread.join()


def events(out: Path, *kinds: str) -> list[dict[str, Any]]:
    """The supervisor's events of a run, and others of these kinds."""
    wanted = ("failure", "hang", "slow", *kinds)
    return [event for event in read_run(out).events if event["kind"] in wanted]


def check_as_if_unfaulted(out: Path, result: dict[str, Any], whole: dict[str, Any]) -> None:
    """The run has ended like the unfaulted one, and has each row of metrics once, in order."""
    for key in ("parameters_sha256", "samples_sha256", "final_loss", "val_loss", "steps"):
        assert result[key] == whole[key], key
    rows = read_run(out).metrics
    assert [row["step"] for row in rows if "loss" in row] == list(range(1, whole["steps"] + 1))
    assert [row["step"] for row in rows if "val_loss" in row] == [16, 32, 40]


def parent(pid: int) -> int:
    """Return the pid of a process's parent."""
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def alive(pid: int) -> bool:
    """True if the process runs: neither gone nor a zombie."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"
