"""The spec of an engine: of a run file, or of a pretrained model and keys."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from meshwright.api.engine_arguments import checked_path
from meshwright.api.source import keys_of_source
from meshwright.rank.env import fit_layout, resolve, worker
from meshwright.spec import RunSpec, UserError
from meshwright.spec.load import from_tree, read_tree
from meshwright.spec.sections import DataSpec

MOST_TOKENS = 8192
"""Tokens of a microbatch, where no key says how large one is."""


def spec_from(given: RunSpec | Path | str) -> RunSpec:
    """Return a spec, or that of a run file or run's folder; a layout without axes takes the world's ranks."""
    if isinstance(given, RunSpec):
        return given
    return resolve(read_tree(checked_path("Engine", given)), (), _ranks(), str(given))


def pretrained_spec(model: Path | str, keys: Mapping[str, Any], caller: str = "from_pretrained") -> RunSpec:
    """Return the spec of a run from a model with `keys`, whose names have dots or double underscores.

    The batch of a run file, which an engine does not read, is as large as its rules ask. Raises `UserError`,
    which names the `caller`.
    """
    given = {name.replace("__", "."): _text(value) for name, value in keys.items()}
    if not isinstance(model, str):  # a name on a hub is no path
        model = checked_path(caller, model)
    overrides = [*keys_of_source(str(model), given, caller), *given.items()]
    ranks = _ranks()
    if "train.batch_tokens" not in given:
        length = _size(given, "data.seq_len", DataSpec().seq_len)
        rows = _size(given, "layout.micro_batch", max(1, MOST_TOKENS // length))
        overrides.append(("train.batch_tokens", str(length * rows * ranks)))
    return from_tree({}, fit_layout({}, overrides, ranks), ranks=ranks)


def check_runnable(spec: RunSpec) -> None:
    """Raise `UserError` for a run whose steps need more than a batch and its loss."""
    for table, deed in spec.tables_of_steps.items():
        raise UserError(
            f"{table}: with it a step {deed}, and an engine's steps apply the gradients of a caller's batch "
            f"and loss_fn alone; remove the table"
        )
    if spec.train.cuda_graphs:
        raise UserError(
            "train.cuda_graphs: true does not go with an engine, whose caller gives batches of any shape and "
            "adds up their gradients; give train.cuda_graphs = false"
        )
    if spec.train.epochs is not None:
        raise UserError(
            f"train.epochs: {spec.train.epochs:g} cannot be counted, as an engine reads no corpus; give the "
            "steps of your loop as train.steps"
        )


def _ranks() -> int:
    place = worker()
    return place.world_size if place else 1


def _size(given: Mapping[str, str], key: str, default: int) -> int:
    """The number that a key was given, or the default, also for text that the key's own rule refuses."""
    text = given.get(key, "")
    return int(text) if text.isdecimal() and 0 < len(text) < 10 and int(text) else default


def _text(value: Any) -> str:
    """The text of a value, as a flag has it."""
    if value is None or isinstance(value, str):
        return value or "none"
    return json.dumps(value) if isinstance(value, bool | int | float | list | tuple | dict) else str(value)
