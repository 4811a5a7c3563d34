"""Functions that make new weights of trained ones: the mean of checkpoints, and merged models."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from meshwright.api.models import WEIGHTS, as_run, existing
from meshwright.rank.scratch import scratch_folder
from meshwright.spec import UserError
from meshwright.spec.errors import did_you_mean


def average(
    run: Path,
    out: Path,
    *,
    last: int | None = None,
    steps: Sequence[int] | None = None,
    weights: str = "trained",
) -> list[int]:
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
    out: Path,
    *,
    method: str,
    weights: Sequence[float] | None = None,
    base: Path | None = None,
    density: float | None = None,
    seed: int | None = None,
) -> None:
    """Make the run's folder `out` with the merged weights of models: folders of runs, or HF folders.

    `method` is 'linear', 'slerp', 'ties', 'dare_ties' or 'task_arithmetic', `weights` a number for each model
    (by default equal shares, and 1 each for task arithmetic). The last three methods merge changes of `base`;
    TIES and DARE keep the share `density` of them, and `seed` is that of DARE's draws. Raises `UserError`.
    """
    from meshwright.weights.load import check_new
    from meshwright.weights.merge import Merge, merge_runs
    from meshwright.weights.merge_methods import METHODS

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
