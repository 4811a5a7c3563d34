"""Options of functions, from which the command line makes its flags.

An option is a keyword whose type is `Annotated` with an `Option`. Its name, its default and its help stand
there alone: the flags of a verb are the options of its functions (`options_of`).
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from inspect import Parameter, signature
from pathlib import Path
from typing import Annotated, Any, TypeVar, Unpack, cast, get_args, get_origin, get_type_hints

from meshwright import units
from meshwright.spec.errors import did_you_mean
from meshwright.spec.files import user_path

T = TypeVar("T")
REQUIRED = Parameter.empty
"""Default of an option that must be given."""


@dataclass(frozen=True)
class Option:
    """An option on the command line: `--name VALUE`, or a switch if `read` is None.

    `read` makes a value of the text, and raises ValueError for bad text. `default` is that of a key of a
    `TypedDict`; a parameter has its own. `values` returns the values that it takes, each with what it is,
    which help lists. With `repeated` it may be given several times, and its value is the list of all.
    """

    summary: str
    value: str = ""
    read: Callable[[str], Any] | None = None
    default: Any = None
    values: Callable[[], Mapping[str, str]] | None = None
    repeated: bool = False


def options_of(function: Callable[..., Any]) -> Iterator[tuple[str, Option, Any]]:
    """Yield the name, the option and the default of each parameter of a function that is an option."""
    for name, parameter in signature(function, eval_str=True).parameters.items():
        hint = parameter.annotation
        if get_origin(hint) is Unpack:
            yield from _keys(get_args(hint)[0])
        elif (option := _option(hint)) is not None:
            yield name, option, parameter.default


def completed(kind: type[T], given: Mapping[str, Any]) -> T:
    """Return the options of a `TypedDict`, with the defaults of those that are not given.

    Raises `TypeError` for one that it lacks, as a call does.
    """
    defaults = {name: default for name, _, default in _keys(kind)}
    if unknown := given.keys() - defaults.keys():
        raise TypeError(f"unexpected keyword argument {', '.join(map(repr, sorted(unknown)))}")
    return cast(T, {**defaults, **given})


def _keys(kind: type[Any]) -> Iterator[tuple[str, Option, Any]]:
    for name, hint in get_type_hints(kind, include_extras=True).items():
        option = _option(hint)
        assert option is not None, f"{kind.__name__}.{name} is no option"
        yield name, option, option.default


def _option(hint: Any) -> Option | None:
    return next((each for each in getattr(hint, "__metadata__", ()) if isinstance(each, Option)), None)


def whole(least: int) -> Callable[[str], int]:
    """Return a reader of whole numbers of at least `least`."""

    def read(text: str) -> int:
        if not re.fullmatch(r"[+-]?[0-9]+", text) or int(text) < least:
            raise ValueError(f"a whole number of at least {least} is needed")
        return int(text)

    return read


def _reader(convert: Callable[[str], T], valid: Callable[[T], bool], needed: str) -> Callable[[str], T]:
    """Return a reader that raises ValueError(needed) unless the text converts to a valid value."""

    def read(text: str) -> T:
        with suppress(ValueError):
            if valid(value := convert(text)):
                return value
        raise ValueError(needed)

    return read


def number(least: float, most: float) -> Callable[[str], float]:
    """Return a reader of numbers within [least, most]."""
    bound = f" from {least:g} to {most:g}" if most < math.inf else f" of at least {least:g}"
    bound = "" if least == -math.inf else bound
    return _reader(float, lambda value: least <= value <= most, f"a number{bound} is needed")


positive = _reader(float, lambda value: 0 < value < math.inf, "a number above 0 is needed")
"""Reader of finite numbers above 0."""

fraction = _reader(float, lambda value: 0 < value <= 1, "a number above 0 and at most 1 is needed")
"""Reader of numbers within (0, 1]."""


def license_id(text: str) -> str:
    """Read the identifier of a license, as the Hugging Face hub lists them."""
    if not re.fullmatch(r"[a-z0-9][a-z0-9.+-]*", text):
        raise ValueError("the identifier of a license is needed, such as apache-2.0, mit or other")
    return text


def several(read: Callable[[str], T]) -> Callable[[str], tuple[T, ...]]:
    """Return a reader of values with commas between them, each of which `read` reads."""
    return lambda text: tuple(read(part.strip()) for part in text.split(","))


def tokens(unit: int = 1000) -> Callable[[str], int]:
    """Return a reader of whole numbers of tokens, such as 16M, whose suffixes are powers of `unit`."""

    def read(text: str) -> int:
        value = units.amount(text, unit)
        if not value.is_integer():
            raise ValueError(f"it is {value:,} tokens; a whole number is needed")
        return int(value)

    return read


def file_name(suffix: str) -> Callable[[str], Path]:
    """Return a reader of file names that end in `suffix`."""
    needed = f"the name of a file that ends in {suffix} is needed, such as step{suffix}"
    return _reader(Path, lambda path: path.suffix.lower() == suffix, needed)


def folder_name(text: str) -> Path:
    """Read the name of a folder; refuse the empty one, which would be the current folder."""
    if not text:
        raise ValueError("the name of a folder is needed")
    return user_path(text, "--out")


@dataclass(frozen=True)
class Choice:
    """A reader of one of `names`."""

    names: tuple[str, ...]

    def __call__(self, text: str) -> str:
        if text not in self.names:
            raise ValueError(f"it should be one of {', '.join(self.names)}{did_you_mean(text, self.names)}")
        return text


def choice(*names: str) -> Choice:
    """Return a reader of one of `names`."""
    return Choice(names)


Weights = Annotated[
    str,
    Option(
        "those of the last step, or their moving average", "trained|ema", choice("trained", "ema"), "trained"
    ),
]
"""Which set of weights of a checkpoint."""
Step = Annotated[int | None, Option("which checkpoint of a run; default the newest", "STEP", whole(0))]
"""Which checkpoint."""
Batch = Annotated[int, Option("most texts that are continued at a time on a data rank", "N", whole(1), 16)]
"""How many texts at a time."""
NewRun = Annotated[Path, Option("folder of the run to make", "DIR", folder_name)]
"""A folder that is given a run."""
