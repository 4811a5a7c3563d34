"""README.md of an exported HF folder: the model card that the Hugging Face hub shows.

Its front matter is YAML (huggingface.co/docs/hub/model-cards). JSON's strings are YAML's, too.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from meshwright.exchange.hub import hub_id
from meshwright.spec import RunSpec
from meshwright.spec.architecture import RANDOM
from meshwright.spec.toml import changes_to_toml
from meshwright.units import short


def model_card(
    spec: RunSpec,
    info: Mapping[str, Any],
    rows: list[dict[str, Any]],
    step: int,
    license: str,
    folder: str,
) -> str:
    """Return the card of a run's checkpoint of `step`, by its record.

    `info` is the content of run.json, `rows` are those of metrics.jsonl. The license is the user's to give;
    `folder` is the name of the exported one.
    """
    source = info.get("imported") or (spec.model.weights if spec.model.weights != RANDOM else None)
    fields: dict[str, Any] = {"license": license, "library_name": "transformers"}
    if (base := hub_id(source)) is not None:
        fields["base_model"] = base
    fields |= {"pipeline_tag": "text-generation", "tags": ["meshwright"]}
    front = "\n".join(f"{name}: {json.dumps(value)}" for name, value in fields.items())
    table = "\n".join(f"| {name} | {value} |" for name, value in _facts(spec, source, rows, step))
    return (
        f"---\n{front}\n---\n\n# A language model of family {spec.model.family}\n\n"
        f"| | |\n| --- | --- |\n{table}\n{_use(folder)}{_command(spec) if step else ''}"
    )


def _facts(
    spec: RunSpec, source: object, rows: list[dict[str, Any]], step: int
) -> Iterator[tuple[str, object]]:
    """Yield what is known of the run up to `step`."""
    model, data = spec.model, spec.data
    yield "parameters", f"{model.parameters:,}"
    if model.moe is not None:
        yield "parameters that a token takes", f"{model.active_parameters:,}"
    yield "layers, hidden size, heads", f"{model.layers}, {model.hidden}, {model.heads}"
    yield "vocabulary, longest sequence", f"{model.vocab_size:,}, {model.max_seq_len:,}"
    if source is not None:
        yield "initial weights", f"`{hub_id(source) or Path(str(source)).name}`"
    if not step:
        return
    done = [row for row in rows if row.get("step", 0) <= step]
    steps = [row for row in done if "loss" in row]
    yield "steps", f"{step:,}"
    if steps and isinstance(steps[-1].get("tokens"), int):
        yield "tokens", short(steps[-1]["tokens"])
    if steps and steps[-1].get("loss") is not None:
        yield f"training loss at step {steps[-1]['step']:,}", f"{steps[-1]['loss']:.4f}"
    for name, title in (("val_loss", "validation loss"), ("val_bits_per_byte", "validation bits per byte")):
        if found := [row for row in done if row.get(name) is not None]:
            yield f"{title} at step {found[-1]['step']:,}", f"{found[-1][name]:.4f}"
    sources = [*data.mixture] or [data.corpus]
    yield "data", ", ".join(f"`{each}`" for each in sources)


def _use(folder: str) -> str:
    return (
        "\n## Use\n\n```py\nfrom transformers import pipeline\n\n"
        f'generate = pipeline("text-generation", {json.dumps(folder)})\n'
        'print(generate("Once upon a time"))\n```\n\n'
        "The tokenizer puts the token before a text that the model was trained to read there.\n"
    )


def _command(spec: RunSpec) -> str:
    """How the run was made: a run file with the keys that are not the program's own."""
    lines = changes_to_toml(spec)
    return f"\n## Training\n\n```sh\nmeshwright train run.toml\n```\n\nrun.toml:\n\n```toml\n{lines}```\n"
