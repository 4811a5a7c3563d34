"""Runs of `meshwright train` that know nothing of one another and share out the cores: what a machine gives.

    python independent_runs.py RUNS FOLDER --KEY VALUE ...

The keys are those of each run, which has a seed of its own, and writes into a folder of its own in FOLDER.
One JSON object a line:

    {"seconds", "loss"} for each step of the first run, from the one on by which all have ended a step, and at
    the end {"held": [...], "note"}

`seconds` is how long the whole batch takes at the speed of all runs together: the harmonic mean of their
latest steps. Steps are not paired by their numbers: the faster run would be in another step than the slower
one when all are stopped for another program.
"""

from __future__ import annotations

import json
import os
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from program import appended, descendants


def start(cores: list[int], out: Path, keys: list[str], seed: int) -> subprocess.Popen[bytes]:
    """A run on some cores."""
    return subprocess.Popen(
        [sys.executable, "-m", "meshwright", "train", *keys, "--train.seed", str(seed), "--out", str(out)],
        stdout=subprocess.DEVNULL,
        preexec_fn=lambda: os.sched_setaffinity(0, cores),
    )


def step_rows(run: subprocess.Popen[bytes], out: Path) -> Iterator[dict[str, Any]]:
    """The metrics of a run's steps, each when it has ended."""
    rows = map(json.loads, appended(out / "metrics.jsonl", run))
    return (row for row in rows if "loss" in row)


def report(runs: list[subprocess.Popen[bytes]], outs: list[Path]) -> None:
    """Print a line for each step of the first run, until one of the runs has failed."""
    latest: dict[int, dict[str, Any]] = {}

    def follow(number: int) -> None:
        for row in step_rows(runs[number], outs[number]):
            latest[number] = row

    for number in range(1, len(runs)):
        threading.Thread(target=follow, args=(number,), daemon=True).start()
    for row in step_rows(runs[0], outs[0]):
        latest[0] = row
        rows = list(latest.values())
        if len(rows) == len(runs):
            seconds = statistics.harmonic_mean([each["seconds"] for each in rows])
            loss = statistics.mean([each["loss"] for each in rows])
            print(json.dumps({"seconds": seconds, "loss": loss}), flush=True)
        if any(run.poll() for run in runs):
            return


def main() -> None:
    count, folder, keys = int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:]
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < count:
        sys.exit(f"Error: {count} runs cannot share out {len(cores)} cores")
    outs = [folder / f"run-{number}" for number in range(count)]
    runs: list[subprocess.Popen[bytes]] = []
    try:
        for number, out in enumerate(outs):
            runs.append(start(cores[number::count], out, keys, number))
        report(runs, outs)
        while None in (states := [run.poll() for run in runs]) and not any(states):
            time.sleep(0.01)
        if any(states):
            sys.exit(f"Error: meshwright train has ended with status {next(filter(None, states))}")
    finally:
        for run in runs:
            for pid in list(descendants(run.pid)) if run.poll() is None else []:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
    held = [json.loads((out / "result.json").read_text(encoding="utf-8"))["memory"] for out in outs]
    print(json.dumps({"held": held, "note": ""}), flush=True)


if __name__ == "__main__":
    main()
