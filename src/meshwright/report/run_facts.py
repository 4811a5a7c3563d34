"""Facts of a run's record beside its curves, for its page and for comparisons."""

from __future__ import annotations

import shlex
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from meshwright.report import format as fmt
from meshwright.report.curves import axes, rows_with
from meshwright.runs.record import RecordedRun, Row
from meshwright.spec.differences import differences, flat
from meshwright.spec.hf.chat_template_files import chat_template_files
from meshwright.spec.presets import PRESETS
from meshwright.spec.toml import usual

MOST_RANKS = 64
"""Ranks that the page has a row of: a page is for reading, result.json for searching."""
FIGURES: Mapping[str, tuple[str, Callable[[Any], str]]] = {
    "steps": ("Steps", fmt.count),
    "final_loss": ("Training loss", fmt.fixed),
    "val_loss": ("Validation loss", fmt.fixed),
    "val_bits_per_byte": ("Held-out text, bits a byte", fmt.fixed),
    "tokens": ("Tokens", fmt.short),
    "tokens_per_second": ("Throughput, tokens/s", fmt.count),
    "mfu": ("MFU", fmt.percent),
    "mfu_datasheet": ("MFU of the datasheet", fmt.percent),
    "causal_mfu_datasheet": ("MFU of the datasheet, causal", fmt.percent),
    "peak_memory_bytes": ("Peak memory of a rank", fmt.size),
    "seconds": ("Time", fmt.duration),
}
"""Key -> title and format of the figures that runs are compared by."""


def figures(run: RecordedRun) -> dict[str, Any]:
    """Return the figures of `FIGURES` that a run has, and of one without a result those of its rows."""
    train = rows_with(run, "loss")
    tokens = train[-1].get("tokens") if train else None
    found = {"tokens": tokens, **result_so_far(run)}
    return {key: found.get(key) for key in FIGURES}


def result_so_far(run: RecordedRun) -> dict[str, Any]:
    """Return the result; for a run without one, the figures that follow from its rows.

    The seconds are those of all starts of the run, of which a result has those of the last.
    """
    time = axes(run).get("time", [0.0])[-1]
    if run.result is not None:
        return {**run.result, "seconds": max(run.result.get("seconds") or 0.0, time)}
    train, evaluations = rows_with(run, "loss"), rows_with(run, "val_loss")
    result: dict[str, Any] = {"steps": train[-1]["step"] if train else 0}
    for key in ("tokens_per_second", "mfu", "mfu_datasheet", "causal_mfu_datasheet"):
        values = [row[key] for row in train if fmt.is_number(row.get(key))]
        result[key] = statistics.median(values) if values else None
    if train:
        result["final_loss"], result["seconds"] = train[-1]["loss"], time or None
        memory = [row["memory_bytes"] for row in train if fmt.is_number(row.get("memory_bytes"))]
        result["peak_memory_bytes"] = max(memory, default=None)
    if evaluations:
        result |= {key: evaluations[-1].get(key) for key in ("val_loss", "val_bits_per_byte")}
    return result


def about(run: RecordedRun) -> list[str]:
    """Return phrases on a run: the program with its commit, the model's size and the start."""
    info = run.info
    commit = f" ({_commit(info['commit'])})" if info.get("commit") else ""
    phrases = [
        f"Meshwright {info['version']}{commit}" if "version" in info else "",
        f"{fmt.short(info['parameters'])} parameters" if "parameters" in info else "",
        f"started {str(info['started'])[:16].replace('T', ' ')} UTC" if "started" in info else "",
    ]
    return [phrase for phrase in phrases if phrase]


def _commit(text: Any) -> str:
    return f"commit {str(text).removesuffix('-dirty')}" + " and changes" * str(text).endswith("-dirty")


def machine(run: RecordedRun) -> str:
    """Return the machine of a run in words: its devices, ranks and hosts, and the release of torch."""
    info = run.info
    found = info.get("machine")
    ranks = info.get("world_size")
    words = [f"on {info['device']}"] if "device" in info else []
    if isinstance(found, dict):
        cores = f"{found.get('processor')}, {_many(found.get('cores'), 'core')}"
        words = [str(found["gpu"])] if found.get("gpu") else []
        words += [cores if not found.get("gpu") else f"host: {cores}"]
        hosts = found.get("hosts")
        words += [f"{_many(hosts, 'host')}: {found.get('host')}" + " and others" * (hosts != 1)]
    words += [_many(ranks, "rank")] if ranks is not None else []
    words += [f"torch {info['torch']}"] if "torch" in info else []
    attention = info.get("attention")
    if isinstance(attention, dict) and attention.get("plain") != "cpu":
        words += [f"attention: {attention.get('words')}"]
    return "  ·  ".join(words)


def _many(number: Any, noun: str) -> str:
    return f"{fmt.count(number)} {noun}" + "s" * (number != 1)


def changed_keys(run: RecordedRun) -> list[tuple[str, Any, Any]]:
    """Return (key, value, default) of the keys that differ from those of the preset and the program."""
    spec = run.info.get("spec")
    if not isinstance(spec, dict):
        return []
    model = spec.get("model")
    preset = model.get("preset") if isinstance(model, dict) else None
    pairs = differences(usual(preset if preset in PRESETS else None), spec)
    given = flat(spec)  # an older version may not have known a key
    return [(key, own, default) for key, (default, own) in pairs.items() if key in given]


def memory(result: dict[str, Any], peak: Any, device: Any) -> dict[str, float]:
    """Return bytes by component; the rest of the peak, which no component explains, is the last one.

    What the process held before the model was built is a component of its own.
    """
    parts = {
        name: size
        for name, size in (result.get("memory") or {}).items()
        if name != "peak" and fmt.is_number(size) and size > 0
    }
    rest = peak - sum(parts.values()) if fmt.is_number(peak) else 0
    before = next(
        (row.get("memory_before_bytes") for row in rank_rows(result) if row.get("peak_memory_bytes") == peak),
        None,
    )
    if parts and fmt.is_number(before) and 0 < before <= rest:
        name = "before the model: CUDA" if device == "cuda" else "before the model: Python, libraries, corpus"
        parts[name], rest = before, rest - before
    if parts and rest > 0.005 * sum(parts.values()):
        named = any("activation" in name for name in parts)
        parts["not attributed" if named else "activations and other"] = rest
    return parts


def rank_rows(result: Mapping[str, Any]) -> list[Row]:
    """Return the rows of a result's ranks."""
    rows = result.get("ranks")
    return [row for row in rows if isinstance(row, dict)] if isinstance(rows, list) else []


def next_commands(run: RecordedRun) -> list[tuple[str, str]]:
    """Return (what for, command) of what can be done with a run's folder, as far as it is there."""
    out, result = shlex.quote(str(run.out)), run.result
    saved = result is not None or any(event.get("kind") == "checkpoint" for event in run.events)
    commands: list[tuple[str, str]] = []
    if result is None:
        commands.append(("go on", f"meshwright train {out} --resume auto"))
    if saved and chat_template_files(run.out, "report"):
        commands.append(("talk to it", f"meshwright generate {out} --chat"))
    elif saved and (run.out / "tokenizer.json").is_file():
        prompt = shlex.quote(_prompt(result))
        commands.append(("write text", f"meshwright generate {out} --prompt {prompt}"))
    if saved and (result is None or fmt.is_number(result.get("val_bits_per_byte"))):
        commands.append(("measure it", f"meshwright evaluate {out}"))
    if saved:
        name = shlex.quote(run.out.resolve().name)
        commands.append(("use it elsewhere", f"meshwright export {out} exported/{name}"))
        if run.info.get("spec", {}).get("lora"):
            commands.append(("for PEFT", f"meshwright export {out} adapters/{name} --adapter"))
    if result is not None and fmt.is_number(result.get("steps")):
        steps = 2 * int(result["steps"])
        commands.append(("train longer", f"meshwright train {out} --resume auto --train.steps {steps}"))
    commands.append(("compare with another run", f"meshwright report {out} runs/OTHER"))
    return commands


def _prompt(result: Mapping[str, Any] | None) -> str:
    """Return the first line of the sample's prompt, or a few words where a shell makes it hard to read."""
    sample = (result or {}).get("sample")
    text = sample.get("prompt") if isinstance(sample, dict) else None
    lines = text.strip().splitlines() if isinstance(text, str) else []
    plain = bool(lines) and lines[0].isprintable() and not set(lines[0]) & set("\"'`\\$!")
    return lines[0][:40].strip() if plain else "Once upon a time"


def keys_apart(runs: Sequence[RecordedRun]) -> list[tuple[str, list[Any]]]:
    """Return (key, the value of each run) of the keys that are not the same in the specs of all runs."""
    specs = [run.info.get("spec") for run in runs]
    trees = [flat(spec) if isinstance(spec, dict) else {} for spec in specs]
    keys = sorted({key for tree in trees for key in differences(trees[0], tree)})
    return [(key, [tree.get(key) for tree in trees]) for key in keys]
