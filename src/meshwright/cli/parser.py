"""Command-line verbs, their flags and arguments, and how words are parsed into a `Call`."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from meshwright import units
from meshwright.spec import RunSpec, UserError
from meshwright.spec.errors import did_you_mean
from meshwright.spec.schema import known_keys

_FLAG = re.compile(r"--?[A-Za-z]")  # -1 and -.5 are values
_KEY_TABLES = tuple(RunSpec.model_fields)


@dataclass(frozen=True)
class Flag:
    """A flag: `--name VALUE`, or a switch if `read` is None; `read` raises ValueError for bad text."""

    name: str
    summary: str
    value: str = ""
    read: Callable[[str], Any] | None = None
    default: Any = None
    required: bool = False


@dataclass(frozen=True)
class Argument:
    """A positional argument, such as RUN or FOLDER."""

    name: str
    summary: str
    required: bool = True


@dataclass(frozen=True)
class Call:
    """A parsed command line: positional words, flags by name, and (key, text) of dotted flags."""

    words: tuple[str, ...]
    flags: dict[str, Any]
    overrides: list[tuple[str, str]]

    def path(self, place: int = 0) -> Path | None:
        """Return the word at `place` as a path, or None if it was not given."""
        return Path(self.words[place]) if len(self.words) > place else None


@dataclass(frozen=True)
class Verb:
    """A verb of the command line; `function` runs it and returns the exit code."""

    name: str
    summary: str
    function: Callable[[Call], int]
    arguments: tuple[Argument, ...] = ()
    flags: tuple[Flag, ...] = ()
    keys: bool = field(default=False)
    """True if keys of a run may be given as dotted flags."""

    @property
    def usage(self) -> str:
        """Usage in one line: the verb and its arguments."""
        words = [argument.name if argument.required else f"[{argument.name}]" for argument in self.arguments]
        words += [f"--{flag.name} {flag.value}" for flag in self.flags if flag.required]
        words += ["[--TABLE.KEY VALUE ...]"] if self.keys else []
        words += ["[FLAGS]"] if any(not flag.required for flag in self.flags) else []
        return " ".join(["meshwright", self.name, *words])


JSON = Flag("json", "print the result as one JSON object on the last line of stdout")


def whole(least: int) -> Callable[[str], int]:
    """Return a reader of whole numbers of at least `least`."""

    def read(text: str) -> int:
        if not re.fullmatch(r"[+-]?[0-9]+", text) or int(text) < least:
            raise ValueError(f"a whole number of at least {least} is needed")
        return int(text)

    return read


def number(least: float, most: float) -> Callable[[str], float]:
    """Return a reader of numbers within [least, most]."""

    def read(text: str) -> float:
        value = _float(text)
        if not least <= value <= most:
            bound = f"from {least:g} to {most:g}" if most < float("inf") else f"of at least {least:g}"
            raise ValueError(f"a number {bound} is needed")
        return value

    return read


def _float(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan


def above_zero(text: str) -> float:
    """Read a finite number above 0."""
    value = _float(text)
    if not 0 < value < float("inf"):
        raise ValueError("a number above 0 is needed")
    return value


def tokens(unit: int = 1000) -> Callable[[str], int]:
    """Return a reader of whole numbers of tokens, such as 16M, whose suffixes are powers of `unit`."""

    def read(text: str) -> int:
        value = units.amount(text, unit)
        if not value.is_integer():
            raise ValueError(f"it is {value:,} tokens; a whole number is needed")
        return int(value)

    return read


def file_name(suffix: str) -> Callable[[str], str]:
    """Return a reader of file names that end in `suffix`."""

    def read(text: str) -> str:
        if Path(text).suffix.lower() != suffix:
            raise ValueError(f"the name of a file that ends in {suffix} is needed, such as step{suffix}")
        return text

    return read


def folder_name(text: str) -> str:
    """Read the name of a folder; refuse the empty one, which would be the current folder."""
    if not text:
        raise ValueError("the name of a folder is needed")
    return text


def choice(*names: str) -> Callable[[str], str]:
    """Return a reader of one of `names`."""

    def read(text: str) -> str:
        if text not in names:
            raise ValueError(f"it should be one of {', '.join(names)}{did_you_mean(text, names)}")
        return text

    return read


def parse(verb: Verb, words: Sequence[str]) -> Call:
    """Parse the words after the verb. Flags and arguments may be mixed; '--' ends the flags.

    Raises `UserError` for a flag that is unknown, repeated or lacks its value, and for a missing or surplus
    argument.
    """
    own = {flag.name: flag for flag in verb.flags}
    flags: dict[str, Any] = {}
    overrides: list[tuple[str, str]] = []
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
        given = text if equals else None
        if not word.startswith("--"):
            raise UserError(f"{word}: flags start with two dashes{did_you_mean(word[1:], own)}")
        if "." in name:
            if any(name == earlier for earlier, _ in overrides):
                raise UserError(f"--{name}: is given twice; give it once")
            overrides.append((name, _key_value(verb, name, given, queue)))
        else:
            flag = own.get(name) or _unknown(verb, name)
            if name in flags:
                raise UserError(f"--{name}: is given twice; give it once")
            flags[name] = _own_value(flag, given, queue)
    for flag in verb.flags:
        if flag.required and flag.name not in flags:
            raise UserError(f"--{flag.name}: is missing; give --{flag.name} {flag.value} ({flag.summary})")
        flags.setdefault(flag.name, flag.default)
    _check_places(verb, places)
    return Call(tuple(places), flags, overrides)


def _own_value(flag: Flag, given: str | None, queue: list[str]) -> Any:
    if flag.read is None:
        if given is not None:
            raise UserError(f"--{flag.name}: takes no value, got '{given}'")
        return True
    text = _next(flag.name, queue) if given is None else given
    try:
        return flag.read(text)
    except ValueError as error:
        raise UserError(f"--{flag.name}: '{text}' is not valid: {error}") from None


def _key_value(verb: Verb, name: str, given: str | None, queue: list[str]) -> str:
    """Return the text of a dotted flag; a switch without a value is 'true'."""
    if not verb.keys:
        raise UserError(f"--{name}: 'meshwright {verb.name}' takes no keys of a run; see its --help")
    if given is not None:
        return given
    key = known_keys().get(name)
    if key is not None and key.is_switch and (not queue or _FLAG.match(queue[0]) or _is_run(queue[0])):
        return "true"
    return _next(name, queue)


def _is_run(word: str) -> bool:
    """True if the word after a switch is the run, not the switch's value."""
    return word.endswith(".toml") or Path(word).exists()


def _next(name: str, queue: list[str]) -> str:
    if not queue or _FLAG.match(queue[0]):
        raise UserError(f"--{name}: needs a value; write one that starts with '-' as --{name}=VALUE")
    return queue.pop(0)


def _unknown(verb: Verb, name: str) -> Flag:
    hint = did_you_mean(name, [flag.name for flag in verb.flags])
    if verb.keys and name in _KEY_TABLES:
        first = next(key for key in known_keys() if key.startswith(f"{name}."))
        hint = f"; it is a table of keys: give one, as in --{first} VALUE"
    elif verb.keys and not hint:
        same = [key for key in known_keys() if key.endswith(f".{name}")]
        hint = f"; did you mean '--{same[0]}'?" if same else ""
    raise UserError(f"--{name}: unknown flag{hint or f'; see meshwright {verb.name} --help'}")


def _check_places(verb: Verb, places: Sequence[str]) -> None:
    needed = [argument for argument in verb.arguments if argument.required]
    if len(places) < len(needed):
        missing = needed[len(places)]
        raise UserError(f"{missing.name}: is missing ({missing.summary}); usage: {verb.usage}")
    if len(places) > len(verb.arguments):
        extra = places[len(verb.arguments)]
        raise UserError(f"'{extra}': is one word too many; usage: {verb.usage}")
