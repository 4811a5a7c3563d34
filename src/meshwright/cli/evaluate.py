"""The verb that evaluates trained models: evaluate."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from meshwright import api
from meshwright.api.evaluation import Evaluation, evaluate_run
from meshwright.api.options import completed
from meshwright.api.prompt_files import check_out, write_text
from meshwright.cli import output as show
from meshwright.cli.parser import JSON, Argument, Call, Flag, verb
from meshwright.spec.layout import GENERATION_KEYS


@verb(
    "evaluate",
    Argument("RUN", "the folder of a run, or of an HF model", keys=True, listed=GENERATION_KEYS),
    api.evaluate,
    Flag("out", "write the result to FILE as JSON, too", "FILE", Path),
    JSON,
)
def evaluate(call: Call) -> None:
    """Evaluate a model, as ranks that this command starts, or as one of a torchrun."""
    flags = dict(call.flags)
    out = flags.pop("out")
    if out is not None:
        check_out(out)
    found = evaluate_run(Path(call.words[0]), completed(Evaluation, flags), call.overrides)
    if found is None:
        return
    if out is not None:
        write_text(out, json.dumps(found) + "\n")
    show.result(call, found, _tables, [out])


def _tables(found: Mapping[str, Any]) -> None:
    """Print a table of domains, or of checkpoints, and one of tasks."""
    rows = found["checkpoints"]
    if len(rows) == 1 and rows[0]["domains"]:
        step, domains = rows[0]["step"], rows[0]["domains"]
        show.table([{"step": step, "domain": name, **values} for name, values in domains.items()])
    elif any(row["domains"] for row in rows):
        print("bits per byte")
        show.table([{"step": row["step"], **_bits(row["domains"])} for row in rows])
    tasks = [
        {"step": row["step"], "task": task, "metric": metric, "value": value,
         "stderr": values.get(_stderr_of(metric))}
        for row in rows
        for task, values in row.get("tasks", {}).items()
        for metric, value in values.items()
        if metric != "examples" and "_stderr" not in metric
    ]  # fmt: skip
    show.table(tasks)
    if not tasks and not any(row["domains"] for row in rows):
        show.line(
            "no text was evaluated: the run holds none out, since data.val_fraction is 0 or its text is one "
            "document; give one as --data NAME=FILE"
        )


def _bits(domains: Mapping[str, Any]) -> dict[str, Any]:
    return {name: values["bits_per_byte"] for name, values in domains.items()}


def _stderr_of(metric: str) -> str:
    name, space, filtered = metric.partition(" ")
    return f"{name}_stderr{space}{filtered}"
