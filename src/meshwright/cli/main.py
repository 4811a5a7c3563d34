"""The command line: find the verb, parse, call it; errors become a line and an exit code."""

from __future__ import annotations

import os
import signal
import sys
import warnings
from collections.abc import Sequence
from types import FrameType
from typing import NoReturn

from meshwright import __version__
from meshwright.cli import dryrun, explain, goodput, hardware, models, plan, runs, simulate, validate
from meshwright.cli import help as helps
from meshwright.cli import spec as specs
from meshwright.cli.parser import Verb, parse
from meshwright.launch.child import leave
from meshwright.launch.env import LAUNCHER
from meshwright.launch.failure import RanksFailed, exit_code, record
from meshwright.spec import UserError
from meshwright.spec.errors import Stopped, did_you_mean
from meshwright.spec.load import one_line

VERBS: tuple[Verb, ...] = (
    *runs.VERBS,
    *plan.VERBS,
    *simulate.VERBS,
    *explain.VERBS,
    *dryrun.VERBS,
    *goodput.VERBS,
    *validate.VERBS,
    *hardware.VERBS,
    *models.VERBS,
    *specs.VERBS,
)
_HELP = ("-h", "--help")


def run() -> None:
    """Run the console script: exit with the code of `main`, without a traceback for mistakes of the user.

    In a rank that `meshwright` launched, errors go to the launcher's wrapper, which shows each once.
    """
    warnings.formatwarning = lambda message, *_args, **_kwargs: f"meshwright: warning: {message}\n"
    if LAUNCHER in os.environ:
        sys.exit(main(sys.argv[1:]))
    signal.signal(signal.SIGTERM, _stop)
    try:
        code = main(sys.argv[1:])
        sys.stdout.flush()
    except UserError as error:
        record(error)  # shown by the user's torchrun, too
        code = _fail(str(error), exit_code(error))
    except RanksFailed as error:
        code = _fail(str(error), error.code, error.details)
    except KeyboardInterrupt as error:
        record(error)
        code = exit_code(error)
        print(f"meshwright: {str(error) or 'stopped by SIGINT'}", file=sys.stderr)
    except BrokenPipeError:  # the reader closed the pipe, as in `meshwright spec schema | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 141  # 128 + SIGPIPE
    leave(code)


def _stop(number: int, _frame: FrameType | None) -> NoReturn:
    raise Stopped(f"stopped by {signal.Signals(number).name}", 128 + number)


def _fail(sentence: str, code: int, details: str = "") -> int:
    if details:
        print(details.rstrip(), file=sys.stderr)
    print(f"meshwright: error: {one_line(sentence)}", file=sys.stderr)
    return code


def main(words: Sequence[str]) -> int:
    """Run the command line `words` and return the exit code. Raises `UserError`."""
    if not words or words[0] in _HELP:
        print(helps.program(VERBS, __version__))
        return 0
    if words[0] == "--version":
        print(f"meshwright {__version__}")
        return 0
    group = [verb for verb in VERBS if verb.name.startswith(f"{words[0]} ")]
    if group and (len(words) == 1 or words[1] in _HELP):
        print(helps.group(words[0], group))
        return 0
    verb, rest = _find(words, bool(group))
    flags = rest[: rest.index("--")] if "--" in rest else rest
    if any(word in _HELP for word in flags):
        print(helps.verb(verb))
        return 0
    return verb.function(parse(verb, rest))


def _find(words: Sequence[str], grouped: bool) -> tuple[Verb, Sequence[str]]:
    length = 2 if grouped else 1
    name = " ".join(words[:length])
    for verb in VERBS:
        if verb.name == name:
            return verb, words[length:]
    prefix = f"{words[0]} " if grouped else ""
    known = [verb.name.removeprefix(prefix) for verb in VERBS if verb.name.startswith(prefix)]
    known = list(dict.fromkeys(verb.split()[0] for verb in known))
    close = did_you_mean(words[length - 1], known).replace("'", f"'{prefix}", 1)
    raise UserError(f"'{name}': unknown verb" + (close or f"; the verbs are {', '.join(known)}"))
