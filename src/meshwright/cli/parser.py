"""Command-line verbs, their flags and arguments, and how words are parsed into a `Call`."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from meshwright.api.options import REQUIRED, options_of
from meshwright.cli.overview import SUMMARIES
from meshwright.spec import RunSpec, UserError
from meshwright.spec.errors import did_you_mean
from meshwright.spec.files import user_path
from meshwright.spec.foreign_run_files import check_run_file
from meshwright.spec.load import Overrides
from meshwright.spec.schema import known_keys, optional_tables

_FLAG = re.compile(r"--?[A-Za-z]")  # -1 and -.5 are values


@dataclass(frozen=True)
class Flag:
    """A flag: `--name VALUE`, or a switch if `read` is None; `read` raises ValueError for bad text.

    `values` returns the values that it takes, each with what it is, which help lists. With `repeated`, it may
    be given several times, and its value is the list of all. With `fills` it is shorthand for the dotted
    flags that this returns for its value and the call; those that the user gives take precedence.
    """

    name: str
    summary: str
    value: str = ""
    read: Callable[[str], Any] | None = None
    default: Any = None
    required: bool = False
    values: Callable[[], Mapping[str, str]] | None = None
    repeated: bool = False
    fills: Callable[[Any, Call], Overrides] | None = None
    instead_of: tuple[str, ...] = ()
    """Dotted flags that may not be given beside it."""


@dataclass(frozen=True)
class Argument:
    """A positional argument, such as RUN or FOLDER; with `keys`, the run's keys may be given as flags.

    Help lists those in `listed`, by default all. The last may be `repeated`: it takes all words
    that are left.
    """

    name: str
    summary: str
    required: bool = True
    keys: bool = False
    listed: Sequence[str] = ()
    repeated: bool = False


@dataclass(frozen=True)
class Call:
    """A parsed command line.

    `words` are the positional arguments, `flags` the values of flags by name (with underscores, without
    --json), `overrides` the (key, text) of dotted flags; `json` is True if --json was given.
    """

    words: tuple[str, ...]
    flags: dict[str, Any]
    overrides: list[tuple[str, str]]
    json: bool = False

    def path(self) -> Path | None:
        """Return the first word as a path, or None if there are no words."""
        return Path(self.words[0]) if self.words else None


Function = Callable[[Call], int | None]
"""Runs a verb, and returns the exit code, or None for success."""


@dataclass(frozen=True)
class Verb:
    """A verb of the command line, with its flags and positional arguments."""

    name: str
    summary: str
    arguments: tuple[Argument, ...]
    flags: tuple[Flag, ...]
    function: Function

    @property
    def keys(self) -> bool:
        """True if keys of a run may be given as dotted flags."""
        return any(argument.keys for argument in self.arguments)

    @property
    def usage(self) -> str:
        """Usage in one line: the verb and its arguments."""
        words = [argument.name if argument.required else f"[{argument.name}]" for argument in self.arguments]
        words += [f"[{argument.name} ...]" for argument in self.arguments if argument.repeated]
        words += [f"--{flag.name} {flag.value}" for flag in self.flags if flag.required]
        words += ["[--TABLE.KEY VALUE ...]"] if self.keys else []
        words += ["[FLAGS]"] if any(not flag.required for flag in self.flags) else []
        return " ".join(["meshwright", self.name, *words])


def verb(name: str, *parts: Argument | Flag | Callable[..., Any]) -> Callable[[Function], Verb]:
    """Return a decorator that makes a `Verb` of the function that runs it.

    Of a part that is a function the verb has all options as flags, unless a flag of the name is before it.
    """
    arguments = tuple(part for part in parts if isinstance(part, Argument))
    flags: dict[str, Flag] = {}
    for part in parts:
        if isinstance(part, Flag):
            flags[part.name] = part
        elif not isinstance(part, Argument):
            for flag in flags_of(part):
                flags.setdefault(flag.name, flag)
    return partial(Verb, name, SUMMARIES[name], arguments, tuple(flags.values()))


def flags_of(function: Callable[..., Any]) -> Iterator[Flag]:
    """Yield the flags that the options of a function are."""
    for name, option, default in options_of(function):
        yield Flag(
            name.replace("_", "-"), option.summary, option.value, option.read,
            None if default is REQUIRED or option.read is None else default, default is REQUIRED,
            option.values, option.repeated,
        )  # fmt: skip


JSON = Flag("json", "print the result as one JSON object on the last line of stdout")


def parse(verb: Verb, words: Sequence[str]) -> Call:
    """Parse the words after the verb. Flags and arguments may be mixed; '--' ends the flags.

    Raises `UserError` for a flag that is unknown, repeated or lacks its value, and for a missing or surplus
    argument.
    """
    given: dict[str, Any] = {}
    overrides: dict[str, str] = {}
    places: list[str] = []
    queue = list(words)
    while queue:
        word = queue.pop(0)
        if word == "--":
            places += queue
            break
        if not _FLAG.match(word):
            places.append(word)
            continue
        name, equals, text = word.removeprefix("--").partition("=")
        if not word.startswith("--"):
            hint = did_you_mean(word[1:], [flag.name for flag in verb.flags])
            raise UserError(f"{word}: flags start with two dashes{hint}")
        listed = any(flag.name == name and flag.repeated for flag in verb.flags)
        if (name in given and not listed) or name in overrides:
            raise UserError(f"--{name}: is given twice; give it once")
        if "." in name or (verb.keys and name in optional_tables()):
            overrides[name] = _key_value(verb, name, text if equals else None, queue)
        else:
            value = _flag_value(verb, name, text if equals else None, queue)
            given[name] = [*given.get(name, ()), value] if listed else value
    if verb.keys and places:
        check_run_file(Path(places[0]))  # a flag may only be missing since this is no run file
    for flag in verb.flags:
        if flag.required and flag.name not in given:
            raise UserError(f"--{flag.name}: is missing; give --{flag.name} {flag.value} ({flag.summary})")
    many = bool(verb.arguments) and verb.arguments[-1].repeated
    for number, place in enumerate(places[: None if many else len(verb.arguments)]):
        user_path(place, verb.arguments[min(number, len(verb.arguments) - 1)].name)
    needed = sum(argument.required for argument in verb.arguments)
    if len(places) < needed:
        missing = verb.arguments[len(places)]
        raise UserError(f"{missing.name}: is missing ({missing.summary}); usage: {verb.usage}")
    if len(places) > len(verb.arguments) and not many:
        extra = places[len(verb.arguments)]
        raise UserError(f"'{extra}': is one word too many; usage: {verb.usage}")
    defaults = {flag.name: flag.default if flag.read else False for flag in verb.flags if flag.fills is None}
    flags = {name.replace("-", "_"): value for name, value in (defaults | given).items()}
    return Call(tuple(places), flags, list(overrides.items()), json=flags.pop("json", False))


def filled(verb: Verb, call: Call) -> Call:
    """Return a call with the dotted flags that some of its flags stand for in place of these.

    Raises `UserError` for a flag that says the same as one of these, and as their functions do.
    """
    flags, given = dict(call.flags), dict(call.overrides)
    found: dict[str, str] = {}
    for flag in verb.flags:
        value = flags.pop(flag.name.replace("-", "_"), None) if flag.fills is not None else None
        if flag.fills is None or value is None:
            continue
        for key in flag.instead_of:
            if key in given:
                raise UserError(
                    f"--{key}: {given[key]} is given together with --{flag.name} {value}, which says what to "
                    "start from; give one of them"
                )
        found |= dict(flag.fills(value, call))
    return replace(call, flags=flags, overrides=list({**found, **given}.items()))


def _flag_value(verb: Verb, name: str, text: str | None, queue: list[str]) -> Any:
    """Return the value of one of the verb's own flags; that of a switch is True."""
    flag = next((flag for flag in verb.flags if flag.name == name), None)
    if flag is None:
        raise _unknown(verb, name)
    if flag.read is None:
        if text is not None:
            raise UserError(f"--{name}: takes no value, got '{text}'")
        return True
    text = _next(name, queue) if text is None else text
    try:
        return flag.read(text)
    except ValueError as error:
        raise UserError(f"--{name}: '{text}' is not valid: {error}") from None


def _key_value(verb: Verb, name: str, text: str | None, queue: list[str]) -> str:
    """Return the text of a dotted flag; a switch without a value is 'true'."""
    own = name.rpartition(".")[2].replace("_", "-")
    hint = f"; did you mean '--{own}'?" if any(flag.name == own for flag in verb.flags) else ""
    if not verb.keys:
        sentence = f"'meshwright {verb.name}' takes no keys of a run"
        raise UserError(f"--{name}: {sentence}{hint or '; see its --help'}")
    listed = [key for argument in verb.arguments for key in argument.listed]
    if hint and listed and name not in listed and name in known_keys():
        raise UserError(f"--{name}: of the keys of a run, {verb.name} takes those of its --help only{hint}")
    if text is not None:
        return text
    key = known_keys().get(name)
    if key is not None and key.is_switch:
        is_run = bool(queue) and (queue[0].endswith(".toml") or Path(queue[0]).exists())
        if not queue or _FLAG.match(queue[0]) or is_run:
            return "true"
    return _next(name, queue)


def _next(name: str, queue: list[str]) -> str:
    if not queue or _FLAG.match(queue[0]):
        raise UserError(f"--{name}: needs a value; write one that starts with '-' as --{name}=VALUE")
    return queue.pop(0)


def _unknown(verb: Verb, name: str) -> UserError:
    hint = did_you_mean(name, [flag.name for flag in verb.flags])
    if verb.keys and name in RunSpec.model_fields:
        first = next(key for key in known_keys() if key.startswith(f"{name}."))
        hint = f"; it is a table of keys: give one, as in --{first} VALUE"
    elif verb.keys and not hint:
        same = [key for key in known_keys() if key.endswith(f".{name.replace('-', '_')}")]
        hint = f"; did you mean '--{same[0]}'?" if same else ""
    return UserError(f"--{name}: unknown flag{hint or f'; see meshwright {verb.name} --help'}")
