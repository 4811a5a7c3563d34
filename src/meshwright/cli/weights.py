"""The verbs that make new weights of trained ones: average, merge."""

from __future__ import annotations

from math import inf
from pathlib import Path

from meshwright import api
from meshwright.api.options import number, several
from meshwright.cli import output as show
from meshwright.cli.parser import JSON, Argument, Call, Flag, verb


@verb("average", Argument("RUN", "the folder of a run"), api.average, JSON)
def average(call: Call) -> None:
    """Make a run whose weights are the mean of a run's checkpoints."""
    flags = dict(call.flags)
    out = flags.pop("out")
    steps = api.average(Path(call.words[0]), out, **flags)
    listed = ", ".join(map(str, steps))
    show.result(call, {"folder": str(out), "steps": steps}, lambda _: print(f"wrote {out}: steps {listed}"))


@verb(
    "merge",
    Argument("RUN", "the folder of a run, or of an HF model", repeated=True),
    api.merge,
    Flag(
        "weight",
        "a number for each model: 0.7,0.3; by default all are alike",
        "W,...",
        several(number(-inf, inf)),
    ),
    JSON,
)
def merge(call: Call) -> None:
    """Make a run whose weights are those of several models, merged."""
    flags = dict(call.flags)
    out, weights = flags.pop("out"), flags.pop("weight")
    api.merge([Path(word) for word in call.words], out, weights=weights, **flags)
    show.result(call, {"folder": str(out)}, lambda _: print(f"wrote {out}"))
