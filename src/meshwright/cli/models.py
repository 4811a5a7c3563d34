"""The verbs that use trained models: generate, export, import, checkpoint ls, checkpoint verify."""

from __future__ import annotations

import json
from pathlib import Path

from meshwright.cli import output as show
from meshwright.cli.ending import stopped_without_reader
from meshwright.cli.parser import (
    JSON,
    Argument,
    Call,
    Flag,
    choice,
    folder_name,
    fraction,
    number,
    verb,
    whole,
)
from meshwright.rank.env import worker
from meshwright.spec import UserError
from meshwright.spec.layout import GENERATION_KEYS

SPECIAL = ("read", "text", "rendered")
DTYPES = ("float32", "bfloat16", "float16", "q8_0")
_WEIGHTS = Flag(
    "weights", "those of the last step, or their moving average", "trained|ema", choice("trained", "ema"),
    default="trained",
)  # fmt: skip
_STEP = Flag("step", "which checkpoint of a run; default the newest", "STEP", whole(0))
_RUN = Argument("RUN", "the folder of a run")
_CHECKPOINTS = Argument("DIR", "the folder of a run, or of its checkpoints")


@verb(
    "generate",
    Argument("RUN", "the folder of a run, or of an HF model", keys=True, listed=GENERATION_KEYS),
    Flag("prompt", "the text to continue", "TEXT", str),
    Flag("prompts", 'texts to continue, a JSON object such as {"prompt": "Once"} on each line', "FILE", Path),
    Flag("out", "write the continuations to FILE, a JSON object a line, instead of stdout", "FILE", Path),
    Flag("max-new-tokens", "most tokens to generate", "N", whole(1), default=128),
    Flag("temperature", "0 takes the likeliest token", "T", number(0, float("inf")), default=0.0),
    Flag("top-k", "draw from the K likeliest tokens", "K", whole(1)),
    Flag("top-p", "draw from the likeliest tokens that add up to P", "P", fraction),
    Flag("seed", "seed of the draws", "N", whole(0), default=0),
    Flag("batch", "most prompts that are continued at a time on a data rank", "N", whole(1), default=16),
    Flag("lookup", "most tokens that a turn guesses from earlier text", "N", whole(0), default=0),
    Flag("cache-tokens", "most tokens whose keys and values are kept at a time", "N", whole(1)),
    Flag(
        "special-tokens",
        "special tokens that a prompt spells: read as tokens, or as text; rendered: and put none around it",
        "|".join(SPECIAL),
        choice(*SPECIAL),
        default=SPECIAL[0],
    ),
    _WEIGHTS,
    _STEP,
    JSON,
)
def generate(call: Call) -> None:
    """Continue prompts with a trained model, as ranks that this command starts, or as one of a torchrun."""
    from meshwright.api.generation import Generation, continue_prompts
    from meshwright.api.prompt_files import check_out, read_prompts, write_rows

    run, flags, place = Path(call.words[0]), dict(call.flags), worker()
    prompt, file, out = flags.pop("prompt"), flags.pop("prompts"), flags.pop("out")
    if (prompt is None) == (file is None):
        raise UserError("--prompt: is the text to continue, and --prompts a file of texts; give one of them")
    if prompt is not None and out is not None:
        raise UserError("--out: takes the continuations of --prompts; remove it, or give --prompts")
    how = Generation(**flags)
    rows = read_prompts(file) if file is not None else [{"prompt": prompt}]
    if out is not None:
        check_out(out, file)
    streams = prompt is not None and not call.json
    found = continue_prompts(run, rows, how, call.overrides, _tell if streams else None)
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
    Argument("TARGET", "a folder to write, new or empty, or a new file that ends in .gguf"),
    Flag(
        "dtype",
        "number format of the weights; q8_0 for GGUF",
        "|".join(DTYPES),
        choice(*DTYPES),
        default=DTYPES[0],
    ),
    _WEIGHTS,
    _STEP,
    JSON,
)
def export(call: Call) -> None:
    """Write a run's model as an HF folder or a GGUF file."""
    from meshwright import api

    run, target = map(Path, call.words)
    api.export(run, target, **call.flags)
    kind = "file" if target.suffix.lower() == ".gguf" else "folder"
    show.result(call, {kind: str(target)}, lambda _: print(f"wrote {target}"))


@verb(
    "import",
    Argument("FOLDER", "an HF folder with config.json and safetensors"),
    Flag("out", "folder of the run to make", "DIR", folder_name, required=True),
    JSON,
)
def import_hf(call: Call) -> None:
    """Make a run's folder from an HF model."""
    from meshwright import api

    out = call.flags["out"]
    api.import_hf(Path(call.words[0]), out)
    show.result(call, {"folder": str(out)}, lambda _: print(f"wrote {out}"))


@verb("checkpoint ls", _CHECKPOINTS, JSON)
def checkpoint_ls(call: Call) -> None:
    """List the checkpoints of a run."""
    from meshwright import api

    folder = Path(call.words[0])
    rows = api.checkpoint_list(folder)
    show.result(call, {"directory": str(folder), "checkpoints": rows}, lambda _: show.table(rows))
    if not rows and not call.json:
        print(f"no checkpoints in {folder}")


@verb(
    "checkpoint verify",
    _CHECKPOINTS,
    Flag("step", "which one; default the newest", "STEP", whole(0)),
    JSON,
)
def checkpoint_verify(call: Call) -> int:
    """Check all that a load checks, every hash first; if one differs, name the pieces, exit code 1."""
    from meshwright import api

    result = api.checkpoint_verify(Path(call.words[0]), call.flags["step"])
    problems = result["problems"]
    show.result(call, result)
    if not call.json:
        print(f"damaged: {len(problems)}" if problems else "every byte is as it was written")
    return show.problems(problems)
