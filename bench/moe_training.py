"""`moe-small` and `small`, of as many active parameters, trained on the same tokens and drawn together.

    python bench/moe_training.py runs/moe runs/dense --plot docs/moe-small.svg

Trains what is not there yet: 300 steps of 4,096 tokens of the default corpus in bf16, with the same seed and
learning rate, on two processes each, `moe-small` with its experts over both. Prints one JSON object: the loss
of each (the mean of the last 20 steps, and held out), and the load of the fullest and of the emptiest expert,
the means of the last 20 steps and at the last step, 1 being even. Draws the curves as an SVG.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from meshwright.report.chart import Scale, fit, moving_mean, path, tick_labels
from meshwright.runs.record import Row, read_metrics

SHARED = (
    "--layout.dp 2 --precision.compute bf16 --train.steps 300 --train.batch_tokens 4096 --data.seq_len 256 "
    "--train.lr 1e-3 --train.eval_every 100"
)
LAST = 20
COLOURS = ("#1f6feb", "#d9480f")


def train(out: Path, flags: str) -> None:
    if not (out / "result.json").is_file():
        command = [sys.executable, "-m", "meshwright", "train", *flags.split(), *SHARED.split()]
        subprocess.run([*command, "--out", str(out)], check=True)


def steps_of(out: Path) -> list[Row]:
    return [row for row in read_metrics(out) if "loss" in row]


def of_last(rows: Sequence[Row], key: str) -> float:
    return statistics.mean(row[key] for row in rows[-LAST:])


def figures(moe: Path, dense: Path) -> dict[str, object]:
    sparse, plain = steps_of(moe), steps_of(dense)
    held_out = {
        name: json.loads((out / "result.json").read_text())["val_bits_per_byte"]
        for name, out in (("moe-small", moe), ("small", dense))
    }
    return {
        "steps": len(sparse),
        "tokens": sparse[-1]["tokens"],
        "loss": {"moe-small": of_last(sparse, "loss"), "small": of_last(plain, "loss")},
        "held_out_bits_per_byte": held_out,
        "load_max": [of_last(sparse, "load_max"), sparse[-1]["load_max"]],
        "load_min": [of_last(sparse, "load_min"), sparse[-1]["load_min"]],
    }


def panel(left: int, title: str, curves: dict[str, list[float | None]], marks: Sequence[float] = ()) -> str:
    """A plot 400 wide of curves over the steps; `marks` are lines across."""
    values = [value for curve in curves.values() for value in curve if value is not None]
    count = len(next(iter(curves.values())))
    x, y = Scale(0, count), fit([*values, *marks], False, False)
    inside = f'<g transform="translate({left + 50},40) scale(0.34,0.66)">'
    lines = "".join(
        f'<path d="{path(range(1, count + 1), curve, x, y)}" fill="none" stroke="{colour}" stroke-width="2" '
        f'vector-effect="non-scaling-stroke"/>'
        for colour, curve in zip(COLOURS, curves.values(), strict=True)
    )
    grid = "".join(
        f'<path d="M0 {300 * (1 - y.at(m)):.1f}H1000" stroke="#ccc" vector-effect="non-scaling-stroke"/>'
        for m in y.ticks(5)
    )
    ticks = y.ticks(5)
    labels = "".join(
        f'<text x="{left + 44}" y="{44 + 198 * (1 - y.at(m)):.0f}" text-anchor="end">{label}</text>'
        for m, label in zip(ticks, tick_labels(ticks), strict=True)
    )
    below = "".join(
        f'<text x="{left + 50 + 340 * x.at(step):.0f}" y="256" text-anchor="middle">{step}</text>'
        for step in range(0, count + 1, 100)
    )
    legend = "".join(
        f'<text x="{left + 60 + 150 * i}" y="278" fill="{colour}">{name}</text>'
        for i, (name, colour) in enumerate(zip(curves, COLOURS, strict=True))
    )
    heading = f'<text x="{left + 50}" y="26" font-weight="bold">{title}</text>'
    return f"{heading}{inside}{grid}{lines}</g>{labels}{below}{legend}"


def drawing(moe: Path, dense: Path) -> str:
    sparse, plain = steps_of(moe), steps_of(dense)
    losses = {
        "moe-small": moving_mean([row["loss"] for row in sparse], 9),
        "small": moving_mean([row["loss"] for row in plain], 9),
    }
    first = len(sparse) // 10  # the beginning would flatten the rest
    late = {name: [None] * first + curve[first:] for name, curve in losses.items()}
    loads: dict[str, list[float | None]] = {
        "fullest expert": [row["load_max"] for row in sparse],
        "emptiest expert": [row["load_min"] for row in sparse],
    }
    panels = panel(0, "Training loss (nats per token)", late) + panel(
        410, "Load of an expert (1 = even)", loads, [0]
    )
    return (
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 820 290" '
        'font-family="sans-serif" font-size="12">'
        f'<rect width="820" height="290" fill="white"/>{panels}</svg>\n'
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("moe", type=Path, help="the run of moe-small")
    parser.add_argument("dense", type=Path, help="the run of small")
    parser.add_argument("--plot", type=Path)
    options = parser.parse_args()
    train(options.moe, "--model.preset moe-small --layout.ep 2")
    train(options.dense, "--model.preset small")
    print(json.dumps(figures(options.moe, options.dense)))
    if options.plot:
        options.plot.write_text(drawing(options.moe, options.dense), encoding="utf-8")


if __name__ == "__main__":
    main()
