"""Loss curves of one run in bf16 and in recipes of low precision: a folder with a run for each, and a page.

    python bench/low_precision.py --out curves [--run bench/low_precision.toml] [--steps 1000]
        [--recipes bf16,fp8,fp8-rowwise,fp8-blockwise,mxfp8,nvfp4] [--train.batch_tokens 1024 ...]

Runs have the same initial weights and samples. One that has ended is not repeated, so an interrupted bench
goes on. Writes `curves.html`, and prints one JSON object: for each recipe the final loss, as the mean over
the last 5% of the steps (one step's depends on its samples), the last validation loss, and both beside
bf16's.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

from jinja2 import Environment
from markupsafe import Markup

from meshwright import api, report
from meshwright.report.chart import Chart, Series, moving_mean
from meshwright.runs.record import read_run, write_atomically
from meshwright.spec import load

RECIPES = "bf16,fp8,fp8-rowwise,fp8-blockwise,mxfp8,nvfp4"
PAGE = """<!doctype html><html lang="en"><meta charset="utf-8"><title>Loss in low precision</title>
<style>{{ style }}</style><main><h1>Loss in low precision</h1><p>{{ about }}</p>{{ chart }}
<table><tr><th>recipe</th><th>final loss</th><th>to bf16</th><th>validation</th><th>to bf16</th></tr>
{% for name, row in rows.items() %}<tr><td>{{ name }}</td><td>{{ "%.4f" | format(row.loss) }}</td>
<td>{{ "%+.2f%%" | format(row.loss_off) }}</td><td>{{ "%.4f" | format(row.val_loss) }}</td>
<td>{{ "%+.2f%%" | format(row.val_off) }}</td></tr>{% endfor %}</table></main></html>"""


def losses(out: Path, run: Path, keys: list[tuple[str, str]]) -> tuple[list[float], float]:
    """The loss of each step of a run, and its last validation loss."""
    if not (out / "result.json").is_file():
        api.train(load(run, keys), out=out, quiet=True)
    found = read_run(out)
    assert found.result is not None, f"{out} has not ended"
    rows = [row for row in found.metrics if "loss" in row]
    return [row["loss"] for row in rows], float(found.result["val_loss"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--run", type=Path, default=Path("bench/low_precision.toml"))
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--recipes", default=RECIPES)
    options, rest = parser.parse_known_args()
    given = [(key.removeprefix("--"), value) for key, value in zip(rest[::2], rest[1::2], strict=True)]
    keys = [("train.steps", str(options.steps)), ("train.eval_every", "0"), ("train.log_every", "1"), *given]
    curves: dict[str, list[float]] = {}
    found: dict[str, dict[str, Any]] = {}
    for recipe in options.recipes.split(","):
        curve, val_loss = losses(options.out / recipe, options.run, [*keys, ("precision.compute", recipe)])
        curves[recipe] = curve
        last = statistics.fmean(curve[-max(1, len(curve) // 20) :])
        base = found.get("bf16", {"loss": last, "val_loss": val_loss})
        off = {
            "loss_off": 100 * (last / base["loss"] - 1),
            "val_off": 100 * (val_loss / base["val_loss"] - 1),
        }
        found[recipe] = {"loss": last, "val_loss": val_loss, **off}
    steps = list(range(1, options.steps + 1))
    smooth = [
        Series(recipe, steps, moving_mean(curve, max(1, len(curve) // 50)), colour)
        for colour, (recipe, curve) in enumerate(curves.items())
    ]
    chart = Chart("loss", "Loss, mean of 2% of the steps (nats a token)", smooth, wide=True)
    about = f"{options.run.name}, {options.steps} steps, {' '.join(rest)}"
    style = Markup((Path(report.__file__).parent / "templates" / "page.css").read_text(encoding="utf-8"))
    page = Environment(autoescape=True).from_string(PAGE)
    write_atomically(
        options.out / "curves.html", page.render(style=style, about=about, chart=chart.html(), rows=found)
    )
    print(json.dumps({"run": str(options.run), "steps": options.steps, "found": found}))


if __name__ == "__main__":
    main()
