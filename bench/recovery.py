"""Time of a step with snapshots, votes and supervision, over that without, in runs that take turns.

    python bench/recovery.py [--preset small] [--tokens 8192] [--steps 12] [--rounds 3]

Both sides are `meshwright train` with two ranks: "on" as it comes, with an interval of snapshots of its own
choice, "off" with `recovery.snapshot_every`, `vote_every` and `max_restarts` 0. One JSON object with the mean
time from step to step of each run, but for the first, in which "on" measures what a snapshot costs, the ratio
of each pair of runs, and that of the sums. A machine that does other work at the same time shows ratios of
single pairs from 0.98 to 1.10. A vote costs its time once in 100 steps: see bench/guard.py.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory

OFF = ["--recovery.snapshot_every", "0", "--recovery.vote_every", "0", "--recovery.max_restarts", "0"]
TRIAL = 7
"""Steps at the start that are left out."""


def run(words: list[str], steps: int) -> float:
    """Mean seconds between the rows of steps in the metrics, of so many steps after the trial."""
    seen: dict[int, float] = {}
    with TemporaryDirectory() as folder:
        out = Path(folder) / "run"
        command = [sys.executable, "-m", "meshwright", "train", "--out", str(out), "--quiet", *words]
        process = subprocess.Popen([*command, "--train.steps", str(steps + TRIAL)])
        while process.poll() is None:
            time.sleep(0.005)
            if (out / "metrics.jsonl").exists():
                seen.setdefault((out / "metrics.jsonl").read_text().count('"loss"'), time.perf_counter())
    if process.returncode:
        raise SystemExit(process.returncode)
    return (seen[steps + TRIAL] - seen[TRIAL]) / steps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--preset", default="small")
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--rounds", type=int, default=3)
    flags = parser.parse_args()
    words = ["--model.preset", flags.preset, "--layout.dp", "2", "--data.corpus", "synthetic"]
    words += ["--data.seq_len", "512", "--train.batch_tokens", str(flags.tokens), "--train.log_every", "1"]
    words += ["--train.eval_tokens", "512"]
    times: dict[str, list[float]] = {"on": [], "off": []}
    for turn in range(flags.rounds):
        for name in ("on", "off") if turn % 2 else ("off", "on"):
            times[name].append(run(words + (OFF if name == "off" else []), flags.steps))
    pairs = [on / off for on, off in zip(times["on"], times["off"], strict=True)]
    print(json.dumps({**times, "pairs": pairs, "on_over_off": sum(times["on"]) / sum(times["off"])}))


if __name__ == "__main__":
    main()
