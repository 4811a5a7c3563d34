"""The verb that evaluates trained models: evaluate."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from meshwright.cli import output as show
from meshwright.cli.parser import JSON, Argument, Call, Flag, choice, several, tokens, verb, whole
from meshwright.spec.layout import GENERATION_KEYS


def _named_path(text: str) -> tuple[str, str]:
    name, equals, path = text.partition("=")
    if not (name and equals and path):
        raise ValueError("a name and a path are needed, as in wiki=wiki.jsonl")
    return name, path


def _steps(text: str) -> str | tuple[int, ...]:
    return text if text == "all" else several(whole(0))(text)


@verb(
    "evaluate",
    Argument("RUN", "the folder of a run, or of an HF model", keys=True, listed=GENERATION_KEYS),
    Flag("data", "a text besides the run's held-out one, a file or a folder", "NAME=PATH", _named_path,
         repeated=True),
    Flag("only-data", "leave out the run's held-out text"),
    Flag("step", "checkpoints of a run: 100, 100,200 or all; default the newest", "STEPS", _steps),
    Flag("weights", "those of the last step, or their moving average", "trained|ema",
         choice("trained", "ema"), default="trained"),
    Flag("tokens", "most tokens of a text; default all, of the held-out one train.eval_tokens", "N",
         tokens()),
    Flag("seq-len", "tokens of a window; default those of the run's samples", "N", whole(1)),
    Flag("tasks", "tasks of lm-eval with local data: a YAML file or a folder, then names of tasks in it",
         "PATH[,NAME]", several(str)),
    Flag("limit", "examples of each task; default all", "N", whole(1)),
    Flag("batch", "most texts that are continued at a time on a data rank", "N", whole(1), default=16),
    Flag("special-tokens", "those that a text or a request spells: read as tokens, or as text; default read "
         "for tasks, and the run's data.special_tokens for texts", "read|text", choice("read", "text")),
    Flag("out", "write the result to FILE as JSON, too", "FILE", Path),
    JSON,
)  # fmt: skip
def evaluate(call: Call) -> None:
    """Evaluate a model, as ranks that this command starts, or as one of a torchrun."""
    from meshwright.api.evaluation import Evaluation, evaluate_run
    from meshwright.api.prompt_files import check_out, write_text

    flags = dict(call.flags)
    out = flags.pop("out")
    steps, data, tasks = flags.pop("step"), tuple(flags.pop("data") or ()), flags.pop("tasks") or ()
    if out is not None:
        check_out(out)
    how = Evaluation(steps=steps, data=data, tasks=tasks, **flags)
    found = evaluate_run(Path(call.words[0]), how, call.overrides)
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


def _bits(domains: Mapping[str, Any]) -> dict[str, Any]:
    return {name: values["bits_per_byte"] for name, values in domains.items()}


def _stderr_of(metric: str) -> str:
    name, space, filtered = metric.partition(" ")
    return f"{name}_stderr{space}{filtered}"
