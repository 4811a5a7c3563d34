"""The verbs that use trained models: generate, export, import, checkpoint ls, checkpoint verify."""

from __future__ import annotations

import json
from pathlib import Path

from meshwright import api
from meshwright.api import generation
from meshwright.api.generation import Generation
from meshwright.api.options import choice, completed
from meshwright.api.prompt_files import check_out, read_prompts, write_rows
from meshwright.cli import output as show
from meshwright.cli.ending import stopped_without_reader
from meshwright.cli.parser import JSON, Argument, Call, Flag, verb
from meshwright.rank.env import worker
from meshwright.spec import UserError
from meshwright.spec.layout import GENERATION_KEYS

DTYPES = ("float32", "bfloat16", "float16", "q8_0")
_RUN = Argument("RUN", "the folder of a run")
_CHECKPOINTS = Argument("DIR", "the folder of a run, or of its checkpoints")


@verb(
    "generate",
    Argument("RUN", "the folder of a run, or of an HF model", keys=True, listed=GENERATION_KEYS),
    Flag("prompt", "the text to continue", "TEXT", str),
    Flag("prompts", 'texts to continue, a JSON object such as {"prompt": "Once"} on each line', "FILE", Path),
    Flag("out", "write the continuations to FILE, a JSON object a line, instead of stdout", "FILE", Path),
    api.generate,
    JSON,
)
def generate(call: Call) -> None:
    """Continue prompts with a trained model, as ranks that this command starts, or as one of a torchrun."""
    run, flags, place = Path(call.words[0]), dict(call.flags), worker()
    prompt, file, out = flags.pop("prompt"), flags.pop("prompts"), flags.pop("out")
    if (prompt is None) == (file is None):
        raise UserError("--prompt: is the text to continue, and --prompts a file of texts; give one of them")
    if prompt is not None and out is not None:
        raise UserError("--out: takes the continuations of --prompts; remove it, or give --prompts")
    how = completed(Generation, flags)
    rows = read_prompts(file) if file is not None else [{"prompt": prompt}]
    if out is not None:
        check_out(out, file)
    streams = prompt is not None and not call.json
    found = generation.continue_prompts(run, rows, how, call.overrides, _tell if streams else None)
    if place is not None and place.rank:
        return
    if out is None:
        print("" if streams else "\n".join(json.dumps(row) for row in found), flush=True)
        return
    write_rows(out, found)
    show.result(call, {"prompts": len(rows), "out": str(out)})


def _tell(_number: int, text: str) -> None:
    with stopped_without_reader():
        show.prose(text, end="")


@verb(
    "export",
    _RUN,
    Argument("TARGET", "a folder to write, new or empty, a new file that ends in .gguf, or a URL of one"),
    Flag(
        "dtype",
        "number format of the weights, q8_0 for GGUF; default the one that they are stored in",
        "|".join(DTYPES),
        choice(*DTYPES),
    ),
    api.export,
    JSON,
)
def export(call: Call) -> None:
    """Write a run's model as an HF folder or a GGUF file."""
    run, target = call.words
    api.export(Path(run), target, **call.flags)
    kind = "file" if target.lower().endswith(".gguf") else "folder"
    show.result(call, {kind: target}, lambda _: print(f"wrote {target}"))


@verb(
    "import",
    Argument("SOURCE", "an HF folder, or a checkpoint of another program"),
    api.import_hf,
    JSON,
)
def import_hf(call: Call) -> None:
    """Make a run's folder from a trained model: HF, torch DCP, Megatron, DeepSpeed, litgpt, PEFT."""
    out = call.flags["out"]
    api.import_hf(Path(call.words[0]), **call.flags)
    show.result(call, {"folder": str(out)}, lambda _: print(f"wrote {out}"))


@verb("checkpoint ls", _CHECKPOINTS, JSON)
def checkpoint_ls(call: Call) -> None:
    """List the checkpoints of a run."""
    folder = Path(call.words[0])
    rows = api.checkpoint_list(folder)
    show.result(call, {"directory": str(folder), "checkpoints": rows}, lambda _: show.table(rows))
    if not rows and not call.json:
        print(f"no checkpoints in {folder}")


@verb("checkpoint verify", _CHECKPOINTS, api.checkpoint_verify, JSON)
def checkpoint_verify(call: Call) -> int:
    """Check all that a load checks, every hash first; if one differs, name the pieces, exit code 1."""
    result = api.checkpoint_verify(Path(call.words[0]), call.flags["step"])
    problems = result["problems"]
    show.result(call, result)
    if not call.json:
        print(f"damaged: {len(problems)}" if problems else "every byte is as it was written")
    return show.problems(problems)
