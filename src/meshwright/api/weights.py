"""Functions that make new weights of trained ones: the mean of checkpoints, and merged models."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from meshwright.api.models import WEIGHTS, as_run, existing
from meshwright.api.options import NewRun, Option, Weights, choice, folder_name, fraction, several, whole
from meshwright.rank.scratch import scratch_folder
from meshwright.spec import UserError
from meshwright.spec.errors import did_you_mean

METHODS = {
    "linear": "the weighted mean",
    "slerp": "two models, along the arc between them",
    "ties": "the largest changes to --base that agree in sign",
    "dare_ties": "changes to --base of which a random share is dropped",
    "task_arithmetic": "--base plus the sum of the changes to it",
}
"""Ways to merge models."""


def average(
    run: Path,
    out: NewRun,
    *,
    last: Annotated[int | None, Option("average the newest K checkpoints", "K", whole(1))] = None,
    steps: Annotated[Sequence[int] | None, Option(
        "average the checkpoints of these steps: 100,200,300", "STEPS", several(whole(0)))] = None,
    weights: Weights = "trained",
) -> list[int]:  # fmt: skip
    """Make the run's folder `out` with the mean of checkpoints of `run`; return their steps, in order.

    Give `last`, a number of newest checkpoints (but for those that a later start undid), or `steps`.
    `weights` 'ema' takes each checkpoint's moving average of the weights (`train.ema`). Raises `UserError`.
    """
    run = existing(run, "the folder of a run")
    if (last is None) == (steps is None):
        raise UserError("--last: is how many checkpoints to average, and --steps which; give one of them")
    if last is not None and last < 1:
        raise UserError(f"--last: {last} averages nothing; give 1 or more")
    if steps is not None and not steps:
        raise UserError("--steps: names no step; give some, such as 100,200")
    if weights not in WEIGHTS:
        raise UserError(f"--weights: {weights!r} is not one of {', '.join(WEIGHTS)}")
    from meshwright.runs.record import given_up
    from meshwright.weights.average import average_run

    return average_run(run, Path(out), last, steps, weights == "ema", given_up(run))


def merge(
    models: Sequence[Path],
    out: NewRun,
    *,
    method: Annotated[str, Option(
        "how weights are merged", "METHOD", choice(*METHODS), values=lambda: METHODS)],
    weights: Sequence[float] | None = None,
    base: Annotated[Path | None, Option(
        "the model that the others were trained from", "RUN", folder_name)] = None,
    density: Annotated[float | None, Option(
        "share of the changes to the base that is kept", "D", fraction)] = None,
    seed: Annotated[int | None, Option("seed of the draws of dare_ties; default 0", "N", whole(0))] = None,
) -> None:  # fmt: skip
    """Make the run's folder `out` with the merged weights of models: folders of runs, or HF folders.

    `method` is 'linear', 'slerp', 'ties', 'dare_ties' or 'task_arithmetic', `weights` a number for each model
    (by default equal shares, and 1 each for task arithmetic). The last three methods merge changes of `base`;
    TIES and DARE keep the share `density` of them, and `seed` is that of DARE's draws. Raises `UserError`.
    """
    from meshwright.weights.load import check_new
    from meshwright.weights.merge import Merge, merge_runs

    models, out = [existing(model, "a run or an HF model") for model in models], Path(out)
    if method not in METHODS:
        hint = did_you_mean(method, METHODS)
        raise UserError(f"--method: '{method}' is not one of {', '.join(METHODS)}{hint}")
    even = 1.0 if method == "task_arithmetic" else 1 / max(len(models), 1)
    given = tuple(weights) if weights is not None else (even,) * len(models)
    if not all(map(math.isfinite, given)):
        raise UserError(f"--weight: {','.join(map(str, given))} is not valid; give finite numbers")
    if density is not None and not 0 < density <= 1:
        raise UserError(f"--density: {density} is not valid; give a share above 0 and at most 1")
    how = Merge(method, given, density, seed)
    how.check(len(models), base is not None)
    check_new(out)
    below = [existing(base, "a run or an HF model")] if base is not None else []
    with scratch_folder() as scratch:
        runs = [as_run(model, scratch / str(number)) for number, model in enumerate([*models, *below])]
        merge_runs(runs[: len(models)], list(map(str, models)), runs[-1] if below else None, how, out)
