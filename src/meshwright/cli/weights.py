"""The verbs that make new weights of trained ones: average, merge."""

from __future__ import annotations

from math import inf
from pathlib import Path

from meshwright.cli import output as show
from meshwright.cli.parser import (
    JSON,
    Argument,
    Call,
    Flag,
    choice,
    folder_name,
    fraction,
    number,
    several,
    verb,
    whole,
)

METHODS = {
    "linear": "the weighted mean",
    "slerp": "two models, along the arc between them",
    "ties": "the largest changes to --base that agree in sign",
    "dare_ties": "changes to --base of which a random share is dropped",
    "task_arithmetic": "--base plus the sum of the changes to it",
}
_OUT = Flag("out", "folder of the run to make", "DIR", folder_name, required=True)


@verb(
    "average",
    Argument("RUN", "the folder of a run"),
    _OUT,
    Flag("last", "average the newest K checkpoints", "K", whole(1)),
    Flag("steps", "average the checkpoints of these steps: 100,200,300", "STEPS", several(whole(0))),
    Flag(
        "weights", "of each checkpoint: those of the step, or their moving average", "trained|ema",
        choice("trained", "ema"), default="trained",
    ),
    JSON,
)  # fmt: skip
def average(call: Call) -> None:
    """Make a run whose weights are the mean of a run's checkpoints."""
    from meshwright import api

    flags = dict(call.flags)
    out = flags.pop("out")
    steps = api.average(Path(call.words[0]), out, **flags)
    listed = ", ".join(map(str, steps))
    show.result(call, {"folder": str(out), "steps": steps}, lambda _: print(f"wrote {out}: steps {listed}"))


@verb(
    "merge",
    Argument("RUN", "the folder of a run, or of an HF model", repeated=True),
    _OUT,
    Flag(
        "method", "how weights are merged", "METHOD", choice(*METHODS), required=True,
        values=lambda: METHODS,
    ),
    Flag(
        "weight", "a number for each model: 0.7,0.3; by default all are alike", "W,...",
        several(number(-inf, inf)),
    ),
    Flag("base", "the model that the others were trained from", "RUN", folder_name),
    Flag("density", "share of the changes to the base that is kept", "D", fraction),
    Flag("seed", "seed of the draws of dare_ties; default 0", "N", whole(0)),
    JSON,
)  # fmt: skip
def merge(call: Call) -> None:
    """Make a run whose weights are those of several models, merged."""
    from meshwright import api

    flags = dict(call.flags)
    out, weights = flags.pop("out"), flags.pop("weight")
    api.merge([Path(word) for word in call.words], out, weights=weights, **flags)
    show.result(call, {"folder": str(out)}, lambda _: print(f"wrote {out}"))
