"""The verb init: ask what somebody has, wants and trains on, and write a run file for it."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from meshwright import api
from meshwright.api.run_files.holdings import holdings
from meshwright.api.run_files.new_run_file import WANTS, check_new_file
from meshwright.api.run_files.places import HERE, place
from meshwright.cli import output as show
from meshwright.cli.parser import JSON, Argument, Call, verb
from meshwright.spec import UserError

T = TypeVar("T")
_QUESTIONS = {
    "have": (
        "What do you have? Text (a file, a folder, a URL, or stdlib), a model (a folder, or org/name of the "
        "hub) or a run; two with a space between them, names with spaces in quotation marks"
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
    flags, out = dict(call.flags), call.path() or Path("run.toml")
    if not flags["have"] and not call.json and sys.stdin.isatty() and sys.stdout.isatty():
        check_new_file(out)
        flags |= _asked(flags)
    found = api.init(**{**flags, "have": flags["have"] or ()}, out=out, overrides=call.overrides)
    show.result(call, found, _show)


def _asked(flags: Mapping[str, Any]) -> dict[str, Any]:
    """Return the answers to the questions whose flags are not given. Raises `UserError` where input ends."""
    answers: dict[str, Any] = {"have": _answer("have", _names)}
    if flags["want"] is None:
        answers["want"] = _answer("want", _want)
    if flags["on"] == HERE and flags["gpus"] is None and answers.get("want") != "serve":
        answers |= _answer("on", _place)
    return answers


def _answer(name: str, read: Callable[[str], T]) -> T:
    """Ask a question until `read` takes the answer, and return what it makes of it."""
    show.line(_QUESTIONS[name])
    while True:
        try:
            return read(input("> ").strip())
        except UserError as error:
            show.line(str(error))
        except EOFError:
            raise UserError(f"--{name}: is not answered, as the input has ended; give it as a flag") from None


def _names(answer: str) -> Sequence[str]:
    try:
        names = shlex.split(answer)
    except ValueError:
        raise UserError(f"--have: {answer} has a quotation mark without its pair") from None
    if not names:
        raise UserError("--have: nothing is given; give a text, a model or a run")
    holdings(names)
    return names


def _want(answer: str) -> str | None:
    if answer and answer not in WANTS:
        raise UserError(f"--want: {answer!r} is not one of {', '.join(WANTS)}")
    return answer or None


def _place(answer: str) -> dict[str, Any]:
    name, _, number = answer.partition(" ")
    number = number.strip()
    if number and not (number.isdecimal() and int(number)):
        raise UserError(f"--gpus: {number!r} is not a number of GPUs; give one, as: h100-sxm 8")
    on, gpus = name or HERE, int(number) if number else None
    place(on, gpus)
    return {"on": on, "gpus": gpus}


def _show(result: Mapping[str, Any]) -> None:
    for sentence in (*result["found"], *result["told"]):
        show.line(sentence)
    if result["file"] is not None:
        print(f"wrote {result['file']}")
    print()
    for command, words in result["commands"]:
        print(f"# {words}\n{command}")
