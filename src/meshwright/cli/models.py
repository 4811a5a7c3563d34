"""The verbs that use trained models: generate, export, import, checkpoint ls, checkpoint verify."""

from __future__ import annotations

import sys
from pathlib import Path

from meshwright.cli import output as show
from meshwright.cli.parser import JSON, Argument, Call, Flag, Verb, choice, folder_name, number, whole
from meshwright.spec import UserError
from meshwright.spec.load import one_line


def _folder(call: Call, place: int = 0) -> Path:
    path = call.path(place)
    assert path is not None  # a required word
    return path


def _existing(path: Path, what: str) -> Path:
    if not path.is_dir():
        raise UserError(f"{path}: does not exist, or is not a folder; give {what}")
    return path


def generate(call: Call) -> int:
    """Continue a prompt with a trained model."""
    run = _existing(_folder(call), "the folder of a run or of an HF model")
    from meshwright import api

    flags = {name.replace("-", "_"): value for name, value in call.flags.items()}
    as_json, prompt = flags.pop("json"), flags.pop("prompt")
    text = api.generate(run, prompt, **flags)
    show.as_json({"prompt": prompt, "text": text}) if as_json else print(text)
    return 0


def export(call: Call) -> int:
    """Write a run's model as an HF folder."""
    run, folder = _existing(_folder(call), "the folder of a run"), _folder(call, 1)
    from meshwright import api

    api.export(run, folder, call.flags["dtype"])
    return _wrote(call, folder)


def import_hf(call: Call) -> int:
    """Make a run's folder from an HF model."""
    folder = _existing(_folder(call), "an HF folder with config.json and safetensors")
    out = Path(call.flags["out"])
    from meshwright import api

    api.import_hf(folder, out)
    return _wrote(call, out)


def _wrote(call: Call, folder: Path) -> int:
    show.as_json({"folder": str(folder)}) if call.flags["json"] else print(f"wrote {folder}")
    return 0


def checkpoint_ls(call: Call) -> int:
    """List the checkpoints of a run."""
    folder = _existing(_folder(call), "the folder of a run, or of its checkpoints")
    from meshwright import api

    rows = api.checkpoint_list(folder)
    if call.flags["json"]:
        show.as_json({"directory": str(folder), "checkpoints": rows})
    elif rows:
        show.table(rows)
    else:
        print(f"no checkpoints in {folder}")
    return 0


def checkpoint_verify(call: Call) -> int:
    """Check every hash of a checkpoint; if one differs, name the pieces and return exit code 1."""
    folder = _existing(_folder(call), "the folder of a run, or of its checkpoints")
    from meshwright import api

    result = api.checkpoint_verify(folder, call.flags["step"])
    problems = result["problems"]
    show.result(call.flags["json"], result)
    if not call.flags["json"]:
        print(f"damaged: {len(problems)}" if problems else "every byte is as it was written")
    for problem in problems:
        print(f"meshwright: error: {one_line(problem)}", file=sys.stderr)
    return 1 if problems else 0


DTYPES = ("float32", "bfloat16", "float16")
_RUN = Argument("RUN", "the folder of a run")
_CHECKPOINTS = Argument("DIR", "the folder of a run, or of its checkpoints")

VERBS = (
    Verb(
        "generate",
        "continue a prompt with a trained model",
        generate,
        (Argument("RUN", "the folder of a run, or of an HF model"),),
        (
            Flag("prompt", "the text to continue", "TEXT", str, required=True),
            Flag("max-new-tokens", "most tokens to generate", "N", whole(1), default=128),
            Flag("temperature", "0 takes the likeliest token", "T", number(0, float("inf")), default=0.0),
            Flag("top-k", "draw from the K likeliest tokens", "K", whole(1)),
            Flag("top-p", "draw from the likeliest tokens that add up to P", "P", number(0, 1)),
            Flag("seed", "seed of the draws", "N", whole(0), default=0),
            JSON,
        ),
    ),
    Verb(
        "export",
        "write a run's model as an HF folder: config.json, safetensors, tokenizer",
        export,
        (_RUN, Argument("FOLDER", "the folder to write; it must not exist, or be empty")),
        (
            Flag(
                "dtype", "number format of the weights", "|".join(DTYPES), choice(*DTYPES), default=DTYPES[0]
            ),
            JSON,
        ),
    ),
    Verb(
        "import",
        "make a run's folder from an HF folder of a family of model.family",
        import_hf,
        (Argument("FOLDER", "an HF folder with config.json and safetensors"),),
        (Flag("out", "folder of the run to make", "DIR", folder_name, required=True), JSON),
    ),
    Verb("checkpoint ls", "list a run's checkpoints", checkpoint_ls, (_CHECKPOINTS,), (JSON,)),
    Verb(
        "checkpoint verify",
        "check every hash of a checkpoint",
        checkpoint_verify,
        (_CHECKPOINTS,),
        (Flag("step", "which one; default the newest", "STEP", whole(0)), JSON),
    ),
)
