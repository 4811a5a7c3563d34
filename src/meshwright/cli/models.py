"""The verbs that use trained models: generate, export, import, checkpoint ls, checkpoint verify."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

from meshwright import api
from meshwright.api import generation
from meshwright.api.generation import Generation, OnText
from meshwright.api.options import choice, completed
from meshwright.api.prompt_files import Row, check_out, read_prompts, write_rows
from meshwright.cli import output as show
from meshwright.cli.ending import stopped_without_reader
from meshwright.cli.parser import JSON, Argument, Call, Flag, verb
from meshwright.rank.env import worker
from meshwright.spec import UserError
from meshwright.spec.layout import GENERATION_KEYS
from meshwright.spec.load import Overrides

DTYPES = ("float32", "bfloat16", "float16", "q8_0")
_EXIT = "/exit"
"""A line that ends a conversation."""
_RUN = Argument("RUN", "the folder of a run")
_CHECKPOINTS = Argument("DIR", "the folder of a run, or of its checkpoints")


@verb(
    "generate",
    Argument("RUN", "the folder of a run, or of an HF model", keys=True, listed=GENERATION_KEYS),
    Flag("prompt", "the text to continue", "TEXT", str),
    Flag("prompts", 'texts to continue, a JSON object such as {"prompt": "Once"} on each line', "FILE", Path),
    Flag("chat", "answer by the model's chat template: a conversation, or the chats of --prompts"),
    Flag("system", "with --chat, the system message of chats that have none", "TEXT", str),
    Flag("out", "write the continuations to FILE, a JSON object a line, instead of stdout", "FILE", Path),
    api.generate,
    JSON,
)
def generate(call: Call) -> None:
    """Continue prompts with a trained model, as ranks that this command starts, or as one of a torchrun."""
    run, flags, place = Path(call.words[0]), dict(call.flags), worker()
    prompt, file, out = flags.pop("prompt"), flags.pop("prompts"), flags.pop("out")
    chat, system = flags.pop("chat"), flags.pop("system")
    given = sum(each is not None for each in (prompt, file))
    if given > 1 or not (given or chat):
        raise UserError("--prompt: is the text to continue, and --prompts a file of texts; give one of them")
    if file is None and out is not None:
        raise UserError("--out: takes the continuations of --prompts; remove it, or give --prompts")
    if system is not None and not chat:
        raise UserError("--system: is the system message of a chat; give --chat with it, or remove it")
    if out is not None:
        check_out(out, file)
    how = completed(Generation, flags)
    if not given:
        _converse(call, run, how, system)
        return
    streams = prompt is not None and not call.json
    on_text = _tell if streams else None
    if chat:
        found = _answers(run, prompt, file, how, call.overrides, on_text, system)
    else:
        rows = read_prompts(file) if file is not None else [{"prompt": prompt}]
        found = generation.continue_prompts(run, rows, how, call.overrides, on_text)
    if place is not None and place.rank:
        return
    if out is None:
        print("" if streams else "\n".join(json.dumps(row) for row in found), flush=True)
        return
    write_rows(out, found)
    show.result(call, {"prompts": len(found), "out": str(out)})


def _answers(
    run: Path,
    prompt: str | None,
    file: Path | None,
    how: Generation,
    layout: Overrides,
    on_text: OnText | None,
    system: str | None,
) -> list[Row]:
    """Return the answers to the chats of a file, or to a question."""
    from meshwright.api.chats import answer_chats, chat_of, read_chats

    row = {"prompt": prompt}
    chats = [(row, chat_of(row, "--prompt"))] if file is None else read_chats(file)
    return answer_chats(run, chats, how, layout, on_text, system)


def _converse(call: Call, run: Path, how: Generation, system: str | None) -> None:
    """Answer the lines of standard input one after the other, until it ends or a line is /exit."""
    from meshwright.api.chats import open_chat

    if call.overrides or worker() is not None:
        raise UserError(
            "--chat: a conversation is held on one device; remove the keys of the layout, or give chats as a "
            "file with --prompts"
        )
    with open_chat(run, how, system) as chat:
        for question in _questions():
            chat.answer(question, None if call.json else _tell)
            if not call.json:
                print(flush=True)
        if call.json:
            print(json.dumps({"messages": chat.messages}), flush=True)


def _questions() -> Iterator[str]:
    """Yield the lines of standard input that are not blank; a person is asked for each."""
    sign = "> " if sys.stdin.isatty() else ""
    while True:
        try:
            line = input(sign)
        except EOFError:
            return
        if line.strip() == _EXIT:
            return
        if line.strip():
            yield line


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
