"""Runs of `meshwright train` that know nothing of one another and share out the cores: what a machine gives.

    python independent_runs.py RUNS FOLDER --KEY VALUE ...

The keys are those of each run, which writes into a folder of its own in FOLDER. One JSON object a line:

    {"seconds", "loss"} for each step of the first run, and at the end {"held": [...], "note"}

`seconds` is how long the whole batch takes at the speed of all runs together: the harmonic mean of their
latest steps. Steps are not paired by their numbers: the faster run would be in another step than the slower
one when all are stopped for another program.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from program import appended


def start(cores: list[int], out: Path, keys: list[str]) -> subprocess.Popen[bytes]:
    """A run on some cores."""
    return subprocess.Popen(
        [sys.executable, "-m", "meshwright", "train", *keys, "--out", str(out)],
        stdout=subprocess.DEVNULL,
        preexec_fn=lambda: os.sched_setaffinity(0, cores),
    )


def steps(run: subprocess.Popen[bytes], out: Path) -> Iterator[dict[str, Any]]:
    """The metrics of a run's steps, each when it has ended."""
    rows = map(json.loads, appended(out / "metrics.jsonl", run))
    return (row for row in rows if "loss" in row)


def follow(run: subprocess.Popen[bytes], out: Path, latest: dict[Path, dict[str, Any]]) -> None:
    """Keep the metrics of a run's latest step."""
    for row in steps(run, out):
        latest[out] = row


def main() -> None:
    count, folder, keys = int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:]
    cores = sorted(os.sched_getaffinity(0))
    outs = [folder / f"run-{number}" for number in range(count)]
    runs = [start(cores[number::count], out, keys) for number, out in enumerate(outs)]
    latest: dict[Path, dict[str, Any]] = {}
    for run, out in zip(runs[1:], outs[1:], strict=True):
        threading.Thread(target=follow, args=(run, out, latest), daemon=True).start()
    for row in steps(runs[0], outs[0]):
        latest[outs[0]] = row
        rows = list(latest.values())
        seconds = statistics.harmonic_mean([row["seconds"] for row in rows])
        loss = statistics.mean([row["loss"] for row in rows])
        print(json.dumps({"seconds": seconds, "loss": loss}), flush=True)
    for run in runs:
        if run.wait() != 0:
            sys.exit(f"Error: meshwright train has ended with status {run.returncode}")
    held = [json.loads((out / "result.json").read_text(encoding="utf-8"))["memory"] for out in outs]
    print(json.dumps({"held": held, "note": ""}), flush=True)


if __name__ == "__main__":
    main()
