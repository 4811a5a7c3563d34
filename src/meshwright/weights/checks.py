"""Checks of a checkpoint before it is read: its record, its tokenizer, and that its values are finite."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from meshwright.data.tokenizer import file_sha256
from meshwright.optim.ema import has_average
from meshwright.spec import RunSpec, UserError
from meshwright.spec.errors import NumericalError
from meshwright.spec.parameter_groups import run_parameters
from meshwright.train.state import check_fields, check_same_model


def average_names(spec: RunSpec) -> dict[str, str]:
    """Parameter -> its moving average in a checkpoint; what a run does not train has none but its value."""
    names = (p.name for unit in run_parameters(spec).values() for p in unit if p.trainable)
    return {name: f"ema/{name}" for name in names}


def check_state(run: Path, spec: RunSpec, state: dict[str, Any], average: bool) -> None:
    """Raise `UserError` unless a checkpoint of this state holds the weights that the run's record describes.

    A record has no hash, and a changed constant would compute other text; so would another tokenizer than the
    one that the checkpoint was trained with. `average` asks for a moving average of the weights.
    """
    folder = spec.checkpoint.folder(run)
    check_fields(state, folder)
    check_same_model(spec, state, str(run))
    if average and not has_average(state):
        raise UserError(
            f"--weights: 'ema' needs a moving average of the weights, which the checkpoint of step "
            f"{state['step']} in {folder} lacks; give 'trained', or train on with --train.ema 0.999"
        )
    file, trained_with = run / "tokenizer.json", state.get("tokenizer_sha256")
    if trained_with is not None and file.is_file() and file_sha256(file) != trained_with:
        raise UserError(
            f"{file}: is not the tokenizer that the checkpoint of step {state['step']} was trained with; put "
            "that one back"
        )


def check_finite(run: Path, state: dict[str, Any], name: str, values: Tensor) -> None:
    """Raise `NumericalError` if values of a parameter in a checkpoint of this state are not finite."""
    if not torch.isfinite(values).all():
        raise NumericalError(
            f"{run}: the parameter {name} has values that are not finite in the checkpoint of step "
            f"{state['step']}; go on from an earlier one with `meshwright train {run} --resume STEP`"
        )
