"""Commands that use a run file or a model, each with what it does."""

from __future__ import annotations

import shlex
from pathlib import Path

from meshwright.api.run_files.holdings import Holding
from meshwright.api.run_files.places import HERE, Place
from meshwright.spec import RunSpec

Commands = list[tuple[str, str]]


def training(out: Path, where: Place, spec: RunSpec, chats: bool) -> Commands:
    """Return the commands that use a run file, each with what it does."""
    file = shlex.quote(str(out))
    run = shlex.quote(f"runs/{out.stem}")
    cluster = ""
    if where.name != HERE:
        tokens = spec.train.total_steps * spec.train.batch_tokens
        cluster = f" --cluster {shlex.quote(where.name)} --gpus {where.devices} --tokens {tokens}"
    commands = [(f"meshwright spec check {file}", "what would run, in one line")]
    if cluster:
        commands.append((f"meshwright plan {file}{cluster}", "the best layouts, with time, memory and money"))
    each = f" --nodes {where.hosts}" if where.hosts > 1 else ""
    doing = f"train, on each of {where.hosts} hosts, with an --out that all have" if each else "train"
    commands.append((f"meshwright train {file}{each} --out {run}", doing))
    if not chats:
        return [*commands, (f"meshwright generate {run} --prompt 'Once'", "afterwards: continue a text")]
    shown = (f"meshwright data show {file}", "samples as they are read, with what is trained on")
    return [
        *commands[:1], shown, *commands[1:],
        (f"meshwright generate {run} --chat --prompt 'Hello'", "afterwards: answer; a chat without --prompt"),
        (f"meshwright export {run} hf/{shlex.quote(out.stem)}", "for transformers and vLLM"),
    ]  # fmt: skip


def serving(model: Holding) -> Commands:
    """Return the commands that use a model."""
    name = shlex.quote(Path(model.source).name)
    source, run = shlex.quote(model.source), f"runs/{name}"
    made: Commands = []
    if not Path(model.source).exists():
        made = [
            (f"hf download {source} --local-dir hf/{name}", "the model's files, where there is a network")
        ]
        source = f"hf/{name}"
    is_folder = (Path(model.source) / "config.json").is_file() or bool(made)
    imported = (
        [] if model.kind == "run" else [(f"meshwright import {source} --out {run}", "a run of its weights")]
    )
    used = source if is_folder or model.kind == "run" else run
    exported = source if model.kind == "run" else run
    uses = [
        (f"meshwright generate {used} --prompt 'Once'", "continue a text"),
        (
            f"meshwright evaluate {used} --data text=FILE --only-data",
            "loss and perplexity of a text; --tasks for tasks",
        ),
    ]
    exports = [
        (
            f"meshwright export {exported} hf/{name}-export",
            f"for transformers and vLLM: vllm serve hf/{name}-export",
        ),
        (f"meshwright export {exported} {name}.gguf", f"for llama.cpp: llama-server -m {name}.gguf"),
    ]
    return [*made, *(uses if used == source else []), *imported, *(uses if used != source else []), *exports]
