"""The command line of a run that was found."""

from __future__ import annotations

import shlex
from typing import Any

from meshwright.planner.search.request import PlanRequest
from meshwright.spec import Layout, RunSpec
from meshwright.spec.hf.config_read import has_weights
from meshwright.spec.schema import known_keys

_OF_PIPELINES = ("schedule", "virtual", "stages")
"""Keys of the layout without effect unless there is a pipeline."""


def train_command(spec: RunSpec, request: PlanRequest) -> str:
    """The `meshwright train` of a run that a request has led to, with all keys of its layout that matter.

    Raises `UserError`.
    """
    words = ["meshwright", "train", *model_words(spec, request)]
    keys = {key: text for key, text in request.overrides if not key.startswith(("layout.", "recompute."))}
    if not request.run_file:
        keys = {key: text for key, text in keys.items() if known_keys()[key].default != text}
    keys.setdefault("precision.compute", spec.precision.compute)
    keys |= {"data.seq_len": str(spec.data.seq_len), "train.batch_tokens": str(spec.train.batch_tokens)}
    keys |= _layout_keys(spec.layout, request.given_in("layout"))
    keys["recompute.policy"] = spec.recompute.policy
    return shlex.join([*words, *(word for key, text in keys.items() for word in (f"--{key}", text))])


def model_words(spec: RunSpec, request: PlanRequest) -> list[str]:
    """The words that name the model. Raises `UserError`."""
    if source := request.run_file:
        return [source]
    if spec.model.preset is not None:
        return ["--model.preset", spec.model.preset]
    folder = str(spec.model.hf)
    return ["--from" if has_weights(folder) else "--model.hf", folder]


def _layout_keys(layout: Layout, given: dict[str, Any]) -> dict[str, str]:
    """Dotted keys of a layout that differ from the usual ones, or from those that a run file may give."""
    usual, found = Layout().model_dump(), layout.model_dump()
    idle = () if layout.pp > 1 else _OF_PIPELINES
    shown = {
        name: value
        for name, value in found.items()
        if name in given or (value != usual[name] and name not in idle)
    }
    return {f"layout.{name}": _text(value) for name, value in shown.items()}


def _text(value: Any) -> str:
    """A value as its flag takes it."""
    if value is None:
        return "none"
    if isinstance(value, bool):
        return str(value).lower()
    return ",".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
