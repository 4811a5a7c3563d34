"""The verb init: ask what somebody has, wants and trains on, and write a run file for it."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from meshwright import api
from meshwright.api.run_files.new_run_file import WANTS
from meshwright.cli import output as show
from meshwright.cli.parser import JSON, Argument, Call, verb
from meshwright.spec import UserError

_QUESTIONS = {
    "have": (
        "What do you have? Text (a file, a folder, a URL, or stdlib), a model (a folder, or org/name of the "
        "hub) or a run; two with a space between them"
    ),
    "want": f"What do you want? {', '.join(WANTS)}; return for what suits",
    "on": "Where does it run? here, or the name of a cluster and a number of GPUs, as: h100-sxm 8",
}
"""The questions by the flag that answers them."""


@verb(
    "init",
    Argument("FILE", "the run file to write; default run.toml", required=False, keys=True),
    api.init,
    JSON,
)
def init(call: Call) -> None:
    """Write a run file; a terminal is asked for what no flag says."""
    flags = dict(call.flags)
    if not flags["have"] and not call.json and sys.stdin.isatty() and sys.stdout.isatty():
        flags |= _asked(flags)
    out = call.path() or Path("run.toml")
    found = api.init(**{**flags, "have": flags["have"] or ()}, out=out, overrides=call.overrides)
    show.result(call, found, _show)


def _asked(flags: Mapping[str, Any]) -> dict[str, Any]:
    """Return the answers to the questions whose flags are not given. Raises `UserError`."""
    answers: dict[str, Any] = {"have": _answer("have").split()}
    if flags["want"] is None:
        answers["want"] = _answer("want") or None
        if answers["want"] not in (None, *WANTS):
            raise UserError(f"--want: {answers['want']!r} is not one of {', '.join(WANTS)}")
    if flags["on"] == "here" and flags["gpus"] is None and answers.get("want") != "serve":
        name, _, number = _answer("on").partition(" ")
        answers["on"] = name or "here"
        if number.strip():
            if not number.strip().isdecimal():
                raise UserError(
                    f"--gpus: {number.strip()!r} is not a number of GPUs; give one, as: h100-sxm 8"
                )
            answers["gpus"] = int(number)
    return answers


def _answer(name: str) -> str:
    """Ask a question and return the answer without spaces around it; '' at the end of the input."""
    show.line(_QUESTIONS[name])
    try:
        return input("> ").strip()
    except EOFError:
        return ""


def _show(result: Mapping[str, Any]) -> None:
    for sentence in (*result["found"], *result["told"]):
        show.line(sentence)
    if result["file"] is not None:
        print(f"wrote {result['file']}")
    print()
    for command, words in result["commands"]:
        print(f"# {words}\n{command}")
