"""Synchronous and asynchronous data parallelism on two hosts with a slow link: loss by tokens, time, traffic.

    sudo python bench/asynchronous.py [--mbit 100] [--steps 320] [--warm 200] [--cases all] [--slow 0]
                                      [--out FILE.jsonl] [--plot docs/asynchronous.svg] [-- KEYS]

Two network namespaces with half of the cores and one replica each, joined by a link of `--mbit` Mb/s (veth
and a token bucket filter), train the run of `--run` (examples/first.toml) from the same initial weights on
the same tokens, once for each algorithm. The first `--warm` of `--steps` steps are synchronous, and their
checkpoint is where all algorithms begin, as DiLoCo's authors begin with a model that is trained already. With
`--slow 1` the second host's core is shared with another
program, so that it computes at half the speed. KEYS are dotted flags of `meshwright train`, for all runs.

One JSON object a line: the algorithm, its steps, the held-out loss at the end, seconds of its steps, tokens a
second, megabytes that the link carried, and how often a part came how many exchanges late. With `--plot`
curves of the held-out loss are drawn from the file `--out`, whose earlier rows stay.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from meshwright.report.chart import Scale, fit, path, tick_labels
from namespaces import Hosts, two_hosts

FIRST = Path(__file__).resolve().parents[1] / "examples" / "first.toml"
ISLANDS = {"layout.dp": 1, "layout.replicate": 2}
FEW = {"outer.lr": 0.8, "outer.momentum": 0.3}
"""For few exchanges: DiLoCo's momentum of 0.9 takes tens of them to come to its speed."""
STALE = {**ISLANDS, "layout.zero": 0}
CASES: dict[str, dict[str, object]] = {
    "synchronous": {"layout.dp": 2},
    "local SGD, 10": {**ISLANDS, "outer.every": 10, "outer.lr": 1.0, "outer.momentum": 0.0},
    "DiLoCo, 20": {**ISLANDS, "outer.every": 20, **FEW},
    "DiLoCo, 20, momentum 0.9": {**ISLANDS, "outer.every": 20},
    "streaming, 20": {**ISLANDS, "outer.every": 20, "outer.fragments": 4, "outer.delay": 2, **FEW},
    "DiLoCo, 20, int4": {**ISLANDS, "outer.every": 20, "outer.format": "int4", **FEW},
    "SparseLoCo, 20": {
        **ISLANDS, "outer.every": 20, "outer.top_k": 0.03, "outer.format": "int4", "outer.momentum": 0.0,
        "outer.lr": 1.0,
    },
    "stale by 1": {**STALE, "outer.staleness": 1},
    "stale by 4": {**STALE, "outer.staleness": 4},
    "stale by 4, lr / 4": {**STALE, "outer.staleness": 4, "outer.staleness_lr": "inverse"},
    "stale by 16": {**STALE, "outer.staleness": 16},
    "free-running, 10": {
        **ISLANDS, "outer.every": 10, "outer.quorum": 1, "outer.momentum": 0.0, "outer.lr": 0.5,
    },
    "free-running, 10, lr / late": {
        **ISLANDS, "outer.every": 10, "outer.quorum": 1, "outer.momentum": 0.0, "outer.lr": 0.5,
        "outer.staleness_lr": "inverse",
    },
}  # fmt: skip
"""Dotted keys of each algorithm."""
COLOURS = ("#111", "#1f6feb", "#d9480f", "#2b8a3e", "#862e9c", "#c2255c", "#0b7285", "#e67700", "#5f3dc4")
_FAR = 1.25
"""Losses that are more times the least are out of a plot."""
Curve = list[tuple[int, float, float]]
"""(tokens, seconds, held-out loss) of each validation."""


def flags(keys: dict[str, object]) -> list[str]:
    return [word for key, value in keys.items() for word in (f"--{key}", str(value))]


def run_of(options: argparse.Namespace, keys: dict[str, object]) -> list[str]:
    """Words of a command that trains the run with these keys."""
    common = {
        "train.steps": options.steps, "train.batch_tokens": options.batch_tokens, "train.log_every": 1,
        "train.decay_fraction": 0.2, "train.eval_every": options.eval_every, "train.eval_tokens": 16384,
    }  # fmt: skip
    return ["train", str(options.run), *flags(keys), *flags(common), *options.keys, "--quiet"]


def warm_up(options: argparse.Namespace, folder: Path) -> None:
    """Train the steps that all algorithms share, on this host alone."""
    words = run_of(options, {"layout.dp": 2, "train.stop_at": options.warm})
    command = [sys.executable, "-m", "meshwright", *words, "--out", str(folder)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


def train(name: str, hosts: Hosts, options: argparse.Namespace, warm: Path, folder: Path) -> dict[str, Any]:
    """Train by an algorithm from the checkpoint of the run `warm`; returns its row."""
    words, out = run_of(options, CASES[name]), folder / "run"
    places = [out]
    if "outer.quorum" in CASES[name]:
        places = [out / f"island.{island}" for island in range(len(hosts.before))]
    if options.warm:
        words += ["--resume", "auto"]
        for place in places:
            shutil.copytree(warm / "checkpoints", place / "checkpoints")
            shutil.copy(warm / "run.json", place / "run.json")
    before = carried(hosts)
    if "outer.quorum" in CASES[name]:
        started = [
            subprocess.Popen(
                [
                    *(*before_it, sys.executable, "-m", "meshwright", *words, "--out", str(out)),
                    *("--outer.island", str(island), "--address", f"10.77.0.{island + 1}"),
                ],
                stdout=subprocess.DEVNULL,
            )
            for island, before_it in enumerate(hosts.before)
        ]
        codes = [process.wait() for process in started]
        if any(codes):
            raise SystemExit(f"islands ended with {codes}")
    else:
        hosts.torchrun(["-m", "meshwright", *words, "--out", str(out)], len(hosts.before))
    sent = carried(hosts) - before
    rows = [[json.loads(line) for line in (each / "metrics.jsonl").open(encoding="utf-8")] for each in places]
    results = [json.loads((each / "result.json").read_text(encoding="utf-8")) for each in places]
    curve = curve_of(rows, options.warm * options.batch_tokens)
    tokens, seconds, loss = curve[-1]
    late: dict[str, int] = {}
    for result in results:
        for key, count in result.get("lateness", {}).items():
            late[key] = late.get(key, 0) + count
    return {
        "case": name, "slow": options.slow, "mbit": options.mbit, "steps": options.steps, "tokens": tokens,
        "val_loss": round(loss, 4), "seconds": round(seconds, 1),
        "tokens_per_second": round((tokens - options.warm * options.batch_tokens) / seconds),
        "megabytes": round(sent / 1e6, 1), "lateness": late, "curve": curve,
    }  # fmt: skip


def curve_of(rows: Sequence[Sequence[dict[str, Any]]], before: int) -> Curve:
    """The held-out losses of the first host's run, with the tokens that all had trained on by then, after
    `before` tokens that they share."""
    clocks = [clock_of(own) for own in rows]
    found: Curve = []
    for row in rows[0]:
        if "val_loss" not in row or row["step"] not in clocks[0]:
            continue
        seconds = clocks[0][row["step"]][0]
        seen = (max((own for at, own in clock.values() if at <= seconds), default=0) for clock in clocks)
        found.append((before + sum(seen), seconds, row["val_loss"]))
    if len(rows) > 1:  # the model is that of the island that ended last
        ends = [max(clock.values()) for clock in clocks]
        last = ends.index(max(ends))
        loss = next(row["val_loss"] for row in reversed(rows[last]) if "val_loss" in row)
        found[-1] = (before + sum(own for _, own in ends), ends[last][0], loss)
    return found


def clock_of(rows: Sequence[dict[str, Any]]) -> dict[int, tuple[float, int]]:
    """Step -> (seconds, tokens) since a run went on, after each of its steps."""
    found: dict[int, tuple[float, int]] = {}
    seconds, tokens = 0.0, 0
    for row in rows:
        if "loss" in row:
            seconds += row["seconds"]
            tokens += round(row["tokens"] / row["step"])
            found[row["step"]] = seconds, tokens
    return found


def carried(hosts: Hosts) -> int:
    """Bytes that both ends of the link have sent so far."""
    total = 0
    for name in hosts.interface:
        command = ["ip", "netns", "exec", name, "cat", f"/sys/class/net/{name}/statistics/tx_bytes"]
        total += int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    return total


@contextmanager
def half_speed(hosts: Hosts, slow: bool) -> Iterator[None]:
    """Let another program take half of the second host's core, where it is `slow`."""
    spin = None
    if slow:
        spin = subprocess.Popen([*hosts.before[1], sys.executable, "-c", "while True: pass"])
    try:
        yield
    finally:
        if spin is not None:
            spin.kill()
            spin.wait()


def drawing(rows: Sequence[dict[str, Any]]) -> str:
    """Three plots of held-out losses: by tokens, by seconds, by megabytes on the link."""
    panels, legend = "", ""
    for place, (title, unit) in enumerate(
        (("by tokens", 1e-3), ("by time", 1.0), ("by traffic, logarithmic", 1.0))
    ):
        panels += panel(40 + 420 * place, f"Held-out loss {title}", rows, place, unit)
    for place, row in enumerate(rows):
        x, y = 60 + 310 * (place % 4), 330 + 18 * (place // 4)
        colour = COLOURS[place % len(COLOURS)]
        dash = ' stroke-dasharray="5 3"' if place >= len(COLOURS) else ""
        legend += f'<path d="M{x} {y}h24" stroke="{colour}" stroke-width="2"{dash}/>'
        legend += f'<text x="{x + 30}" y="{y + 4}">{row["case"]}</text>'
    height = 350 + 18 * (len(rows) // 4)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 1290 {height}" font-family="sans-serif" '
        f'font-size="12"><rect width="1290" height="{height}" fill="white"/>{panels}{legend}</svg>\n'
    )


def panel(left: int, title: str, rows: Sequence[dict[str, Any]], axis: int, unit: float) -> str:
    """One plot, 370 wide and 240 high."""

    def across(row: dict[str, Any], point: Sequence[float]) -> float:
        if axis == 2:  # traffic grows with the steps
            return math.log10(max(1e-3, row["megabytes"] * point[0] / row["tokens"]))
        return point[axis] * unit

    points = [[(across(row, each), each[2]) for each in row["curve"]] for row in rows]
    every = [pair for curve in points for pair in curve]
    x = Scale(min(x for x, _ in every), max(x for x, _ in every))
    near = [loss for _, loss in every if loss < _FAR * min(loss for _, loss in every)]
    y = fit(near, False, False)
    lines = ""
    for place, curve in enumerate(points):
        dash = ' stroke-dasharray="5 3"' if place >= len(COLOURS) else ""
        drawn = path([a for a, _ in curve], [b for _, b in curve], x, y)
        lines += (
            f'<path d="{drawn}" fill="none" stroke="{COLOURS[place % len(COLOURS)]}" stroke-width="2"{dash} '
            f'vector-effect="non-scaling-stroke"/>'
        )
    inside = (
        f'<svg x="{left}" y="50" width="370" height="240" viewBox="0 0 1000 300" preserveAspectRatio="none">'
        f"{lines}</svg>"
    )
    ticks = y.ticks(5)
    labels = "".join(
        f'<text x="{left - 6}" y="{54 + 240 * (1 - y.at(m)):.0f}" text-anchor="end">{label}</text>'
        for m, label in zip(ticks, tick_labels(ticks), strict=True)
    )
    marks = x.ticks(4)
    names = [f"{10**m:.0f} MB" for m in marks] if axis == 2 else tick_labels(marks)
    units = {0: " k tokens", 1: " s", 2: ""}[axis]
    labels += "".join(
        f'<text x="{left + 370 * x.at(m):.0f}" y="308" text-anchor="middle">{name}{units}</text>'
        for m, name in zip(marks, names, strict=True)
    )
    return f'<text x="{left}" y="30" font-weight="bold">{title}</text>{inside}{labels}'


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--run", type=Path, default=FIRST)
    parser.add_argument("--mbit", type=float, default=100.0)
    parser.add_argument("--steps", type=int, default=320)
    parser.add_argument("--warm", type=int, default=200)
    parser.add_argument("--batch-tokens", type=int, default=4096)
    parser.add_argument("--eval-every", type=int, default=20)
    parser.add_argument("--cases", default="all", help="names, separated by semicolons")
    parser.add_argument("--slow", type=int, choices=(0, 1), default=0)
    parser.add_argument("--out", type=Path, default=Path("asynchronous.jsonl"))
    parser.add_argument("--plot", type=Path)
    parser.add_argument("keys", nargs="*", help="dotted flags, after --")
    options = parser.parse_args()
    asked = list(CASES) if options.cases == "all" else [name for name in options.cases.split(";") if name]
    if asked:
        with ExitStack() as stack:
            hosts = stack.enter_context(two_hosts(options.mbit / 1000))
            stack.enter_context(half_speed(hosts, bool(options.slow)))
            warm = Path(stack.enter_context(TemporaryDirectory())) / "warm"
            if options.warm:
                warm_up(options, warm)
            for name in asked:
                with TemporaryDirectory() as folder:
                    row = train(name, hosts, options, warm, Path(folder))
                with options.out.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(row) + "\n")
                print(json.dumps({key: value for key, value in row.items() if key != "curve"}), flush=True)
    if options.plot:
        rows = [json.loads(line) for line in options.out.open(encoding="utf-8")]
        options.plot.write_text(drawing(rows), encoding="utf-8")


if __name__ == "__main__":
    main()
