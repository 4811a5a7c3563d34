"""The mean of the weights of a run's checkpoints (Izmailov et al. 2018; Kaddour 2022: the latest k)."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from meshwright.checkpoint.directory import candidates, published
from meshwright.checkpoint.disk import parse_step_name
from meshwright.checkpoint.weights import whole_part
from meshwright.spec import UserError, load
from meshwright.spec.hf.special_tokens import side_files
from meshwright.weights.load import check_new, write_run
from meshwright.weights.saved_weights import SavedWeights


def average_run(
    run: Path,
    out: Path,
    last: int | None,
    steps: Sequence[int] | None,
    ema: bool = False,
    given_up: Collection[int] = (),
) -> list[int]:
    """Make the run's folder `out` with the mean of checkpoints of `run`, and return their steps in order.

    These are the newest `last`, without those `given_up`, or those of `steps`; one of the two is given. Their
    layouts may differ. Weights become float32, or float64 in a run of that precision; routers' biases are
    averaged, too. `ema` takes each checkpoint's moving average of the weights. Memory holds of one parameter
    a checkpoint's values and the sum. Raises `UserError`.
    """
    check_new(out)
    spec = load(run)
    chosen = chosen_steps(spec.checkpoint.folder(run), last, steps, given_up)
    opened = [SavedWeights(run, step, ema) for step in chosen]
    parts = (whole_part(name, _mean(each.read(name) for each in opened)) for name in opened[0].shapes)
    data = spec.data.model_dump(mode="json")
    origin = {"average": {"run": str(run), "steps": chosen, "weights": "ema" if ema else "trained"}}
    beside = side_files(run, "average")
    write_run(out, spec.model, parts, data, beside, run, origin, opened[0].exact)
    return chosen


def chosen_steps(
    folder: Path, last: int | None, steps: Sequence[int] | None, given_up: Collection[int] = ()
) -> list[int]:
    """Return the steps of a folder's checkpoints to average, in order.

    The newest `last` are without those `given_up`, and up to the one that LATEST names, as later ones were,
    too. Raises `UserError` naming the steps that there are.
    """
    there = list(published(folder))
    if not there:
        raise UserError(f"RUN: {folder} holds no checkpoint; train it first")
    known = ", ".join(map(str, there))
    if steps is not None:
        for step in steps:
            if step not in there:
                raise UserError(f"--steps: {folder} has no checkpoint of step {step}; it has {known}")
            if list(steps).count(step) > 1:
                raise UserError(f"--steps: {step} is given twice; give each step once")
        return sorted(steps)
    newest = parse_step_name(candidates(folder, None)[0].name)
    until = [step for step in there if step not in given_up and (newest is None or step <= newest[0])]
    if last is None or last > len(until):
        raise UserError(
            f"--last: {last} is more than the {len(until)} checkpoints of {folder} (steps "
            f"{', '.join(map(str, until))}); give at most {len(until)}, or train with a larger "
            "--checkpoint.keep"
        )
    return until[-last:]


def _mean(values: Iterable[Tensor]) -> Tensor:
    """Return the mean in float64, summed in the order given."""
    total, count = torch.tensor(0.0, dtype=torch.float64), 0
    for value in values:
        total, count = total + value.double(), count + 1
    return total / count
