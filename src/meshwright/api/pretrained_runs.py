"""Runs that start from a trained model, made of keys and of rows in memory."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from meshwright.api.engine_spec import pretrained_spec
from meshwright.data.given_rows import write_rows
from meshwright.spec import RunSpec, UserError


def run_from(model: Path | str, dataset: Iterable[Mapping[str, Any]] | None = None, **keys: Any) -> RunSpec:
    """Return the run that starts from `model` and trains on `dataset`.

    `model` is what `--from` takes: an HF folder, a run, a checkpoint of another program, or org/name of the
    hub. `dataset` is a `datasets.Dataset` or another iterable of rows, which are written into `data.cache`
    once; without it, the key `data.corpus` says what is read. `keys` are those of a run file, with double
    underscores for dots: `train__lr=2e-4`. Without `train__batch_tokens` a batch is one microbatch of about
    8,192 tokens a rank. Raises `UserError`.
    """
    given = {name.replace("__", "."): value for name, value in keys.items()}
    if dataset is not None:
        for key in ("data.corpus", "data.mixture"):
            if key in given:
                raise UserError(f"{key}: {given[key]} is given together with a dataset; give one of them")
        given["data.corpus"] = str(write_rows(dataset, given.get("data.cache")))
    return pretrained_spec(model, given, "run_from")
