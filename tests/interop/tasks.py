"""Tasks of lm-eval on what the models of `models` learn: continuations, and likelihoods."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import yaml
from models import CAPITALS, PROMPTS

from meshwright import api

CONTINUATIONS = "continuations"
"""The task whose answers are texts."""
_CITIES = [*CAPITALS.values()]
TEXTS = [
    " ".join(f"{PROMPTS[n % 5]} {_CITIES[(n + turn) % 10]}." for n in range(10)) for turn in range(0, 10, 2)
]
"""Texts that are likely in part only, and longer than any window."""


def write_tasks(folder: Path, count: int) -> Path:
    """Write the tasks: `PROMPTS` go on by `count` greedy tokens, and by each capital; and `TEXTS`."""
    folder.mkdir(parents=True, exist_ok=True)
    pairs = [{"text": prompt, "next": f" {city}"} for prompt in PROMPTS for city in _CITIES]
    _write(folder, CONTINUATIONS, [{"text": prompt, "next": ""} for prompt in PROMPTS], {
        "output_type": "generate_until", "generation_kwargs": {"until": [], "max_gen_toks": count},
        "metric_list": [{"metric": "exact_match"}],
    })  # fmt: skip
    _write(folder, "capitals", pairs, {
        "output_type": "loglikelihood", "metric_list": [{"metric": "perplexity"}, {"metric": "acc"}],
    })  # fmt: skip
    _write(folder, "sentences", [{"text": "", "next": text} for text in TEXTS], {
        "output_type": "loglikelihood_rolling", "metric_list": [{"metric": "bits_per_byte"}],
    })  # fmt: skip
    return folder


def _write(folder: Path, name: str, rows: list[dict[str, str]], fields: Mapping[str, object]) -> None:
    data = folder / f"{name}.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    task = {
        "task": name, "dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(data.resolve())}},
        "test_split": "test", "doc_to_text": "{{text}}", "doc_to_target": "{{next}}", **fields,
    }  # fmt: skip
    (folder / f"{name}.yaml").write_text(yaml.safe_dump(task))


def scores_of(run: Path, tasks: Path) -> dict[str, float]:
    """Return the scores of the tasks of likelihoods, by `evaluate`: {"task metric": value}."""
    found = api.evaluate(run, tasks=str(tasks))["checkpoints"][0]["tasks"]
    return {
        f"{task} {metric}": float(value)
        for task, row in found.items()
        for metric, value in row.items()
        if task != CONTINUATIONS and metric != "examples" and not metric.endswith("stderr")
    }


def difference(ours: Mapping[str, float], theirs: Mapping[str, float]) -> float:
    """Return the largest relative difference of the scores that a client gives."""
    return max(abs(theirs[name] / ours[name] - 1) for name in theirs)
