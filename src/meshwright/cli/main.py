"""The command line: find the verb, parse, call it; errors become a line and an exit code."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence
from importlib import import_module
from types import FrameType
from typing import TYPE_CHECKING, NoReturn

from meshwright import __version__
from meshwright.cli import output, overview
from meshwright.cli.ending import NO_READER
from meshwright.cli.overview import HELP, MODULES, SHORT, SUMMARIES
from meshwright.rank.child import leave, set_up_output
from meshwright.rank.failure import RanksFailed, exit_code, record
from meshwright.spec import UserError
from meshwright.spec.errors import Stopped, did_you_mean
from meshwright.version import full_version

if TYPE_CHECKING:
    from meshwright.cli.parser import Verb


def run() -> None:
    """Run the console script: exit with the code of `main`, without a traceback for mistakes of the user."""
    set_up_output()
    signal.signal(signal.SIGTERM, _stop)
    try:
        code = main(sys.argv[1:])
        if sys.stdout is not None:  # closed by the caller
            sys.stdout.flush()
    except (UserError, RanksFailed) as error:
        if isinstance(error, UserError):
            record(error)  # shown by the user's torchrun, too
        elif error.details:
            print(error.details.rstrip(), file=sys.stderr)
        output.error(str(error))
        _tell_notes(error)
        code = exit_code(error)
    except KeyboardInterrupt as error:
        record(error)
        code = exit_code(error)
        if code != NO_READER:
            print(f"meshwright: {str(error) or 'stopped by SIGINT'}", file=sys.stderr)
            _tell_notes(error)
    except OSError as error:
        if not _output_fails():
            raise
        code = NO_READER  # as in `meshwright spec schema | head`
        if not isinstance(error, BrokenPipeError):
            output.error(
                f"standard output: cannot be written ({error.strerror}); give it space, or another file"
            )
            code = 1
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    leave(code)


def _tell_notes(error: BaseException) -> None:
    """Print what has been added to an error, such as the status of the run that it has ended."""
    for note in getattr(error, "__notes__", ()):
        output.note(note)


def _output_fails() -> bool:
    """True if standard output can't write an empty line."""
    try:
        print(flush=True)
    except OSError:
        return True
    return False


def _stop(number: int, _frame: FrameType | None) -> NoReturn:
    raise Stopped(f"stopped by {signal.Signals(number).name}", 128 + number)


def main(words: Sequence[str]) -> int:
    """Run the command line `words` and return the exit code. Raises `UserError`."""
    if not words or words[0] in HELP:
        print(overview.program(__version__))
        return 0
    if words[0] == "--version":
        print(f"meshwright {full_version()}")
        return 0
    words = [*SHORT.get(words[0], words[:1]), *words[1:]]
    group = [name for name in SUMMARIES if name.startswith(f"{words[0]} ")]
    if group and (len(words) == 1 or words[1] in HELP):
        print(overview.group(words[0]))
        return 0
    length = 2 if group else 1
    verb, rest = find(*words[:length]), words[length:]
    flags = rest[: rest.index("--")] if "--" in rest else rest
    if any(word in HELP or word.startswith("--help=") for word in flags):
        from meshwright.cli import help as helps

        print(helps.verb(verb, helps.wanted(flags)))
        return 0
    from meshwright.cli.parser import filled, parse

    return verb.function(filled(verb, parse(verb, rest))) or 0


def find(*words: str) -> Verb:
    """Return the verb of one or two words, whose module is only imported now. Raises `UserError`."""
    if (name := " ".join(words)) not in SUMMARIES:
        raise _unknown(*words)
    from meshwright.cli import parser

    module = import_module(f"meshwright.cli.{MODULES.get(name, name)}")
    return next(each for each in vars(module).values() if isinstance(each, parser.Verb) and each.name == name)


def _unknown(*words: str) -> UserError:
    """Return the error of words that are no verb, with the verbs that there are, or those of its group."""
    *group, last = words
    name, prefix = " ".join(words), "".join(f"{word} " for word in group)
    if last.startswith("-"):
        return UserError(f"'{name}': an option stands before any verb; 'meshwright --help' lists the verbs")
    verbs = [verb for verb in SUMMARIES if verb.startswith(prefix)]
    known = list(dict.fromkeys(verb.removeprefix(prefix).split()[0] for verb in verbs))
    close = did_you_mean(last, known).replace("'", f"'{prefix}", 1)
    listed = f"; the {'verb is' if len(known) == 1 else 'verbs are'} {', '.join(known)}"
    return UserError(f"'{name}': unknown verb{close or listed}")
