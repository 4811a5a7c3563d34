"""A rank that trains nothing: it takes steps with the others, and at some does what it is told.

`python -m deeds FOLDER STEPS PLAN`: the plan is JSON, {"generation/rank/step": deed}, with * for any.
"""

from __future__ import annotations

import json
import mmap
import os
import signal
import sys
import time
from pathlib import Path

from meshwright.comm.heartbeat import BYTES, Beat, Heartbeat
from meshwright.rank.env import Supervision
from meshwright.spec import UserError
from meshwright.spec.errors import STOP_SIGNALS, DataError, NumericalError, StorageError


def main() -> None:
    folder, steps, plan = Path(sys.argv[1]), int(sys.argv[2]), json.loads(sys.argv[3])
    supervision, rank = Supervision.given(), int(os.environ["RANK"])
    assert supervision is not None
    ranks = int(os.environ["WORLD_SIZE"])
    memory = memoryview(mmap.mmap(supervision.heartbeats, ranks * BYTES))
    heartbeat = Heartbeat(memory[rank * BYTES :])

    def meet() -> None:
        heartbeat.start()
        own = place(rank)
        while any(place(number) < own for number in range(ranks)):
            time.sleep(0.001)

    def place(number: int) -> tuple[bool, int, int]:
        beat = Beat.of(memory, number)
        return beat.phase != "start", beat.step, beat.started

    with open(folder / "starts", "a") as file:
        file.write(f"{supervision.generation} {rank} {os.getpid()} {time.monotonic()}\n")
    for step in range(steps + 1):
        if step:
            heartbeat.phase("data", step - 1)
        for where, deed in plan.items():
            wanted = zip(where.split("/"), (supervision.generation, rank, step), strict=True)
            if all(each in ("*", str(found)) for each, found in wanted):
                do(deed, step)
        meet()


def do(deed: str, step: int) -> None:
    kinds = {"mistake": UserError, "storage": StorageError, "data": DataError, "numbers": NumericalError}
    if deed in kinds:
        raise kinds[deed](f"the {deed} of step {step}")
    if deed == "raise":
        raise ValueError(f"an error at step {step}")
    if deed == "exit":
        os._exit(7)
    if deed == "kill":
        print("a warning", file=sys.stderr, flush=True)
        os.kill(os.getpid(), 9)
    if deed == "kill the zygote":
        os.kill(os.getppid(), 9)
    if deed == "stop the zygote":
        os.kill(os.getppid(), signal.SIGSTOP)
        return
    if deed == "ignore SIGTERM":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        return
    if deed == "hold signals":
        signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
        return
    if deed == "save slowly":
        signal.sigwait(STOP_SIGNALS)
        time.sleep(2)
        Path(sys.argv[1], "saved").touch()
        os._exit(0)
    time.sleep(60)


if __name__ == "__main__":
    main()
