"""A JSON object of a user's, with keys that are checked as they are read."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from meshwright.spec.base import MAX_LAYERS
from meshwright.spec.errors import UserError
from meshwright.spec.files import MAX_JSON, parse_json, read_text
from meshwright.spec.records import show


def read_json_object(path: Path, key: str) -> dict[str, Any]:
    """The JSON object in the file `path`; raises `UserError`, which starts with `key`, for anything else."""
    try:
        content = parse_json(read_text(path, MAX_JSON))
    except OSError as error:
        raise UserError(f"{key}: {path} cannot be read ({error.strerror or error})") from error
    except ValueError as error:
        raise UserError(f"{key}: {path} is not JSON that can be read ({error})") from error
    if not isinstance(content, dict):
        raise UserError(f"{key}: {path} is not a JSON object")
    return content


class Check(NamedTuple):
    """Values that a key may have: of one of `types`, at least `least`, or above it if `above`, to `most`."""

    types: tuple[type, ...]
    least: int
    above: bool
    text: str
    most: float = sys.float_info.max
    listed: bool = False
    """True for a list of such values."""

    def admits(self, value: Any) -> bool:
        """Return whether a key may have this value."""
        if self.listed:
            return isinstance(value, list) and all(map(self._replace(listed=False).admits, value))
        valid = isinstance(value, self.types) and isinstance(value, bool) == (bool in self.types)
        return valid and self.least <= value <= self.most and not (self.above and value == self.least)


SIZE = Check((int,), 1, False, "a whole number of at least 1")
LAYERS = Check((int,), 1, False, f"a whole number from 1 to {MAX_LAYERS}", MAX_LAYERS)
PAIR = Check((int,), 2, False, "a whole number of at least 2")
COUNT = Check((int,), 0, False, "a whole number of at least 0")
NUMBER = Check((int, float), 0, True, "a number above 0")
FACTOR = Check((int, float), 0, False, "a number of at least 0")
FACTORS = Check((int, float), 0, True, "a list of numbers above 0", listed=True)
FLAG = Check((bool,), 0, False, "true or false")


class JsonKey(NamedTuple):
    """A key with the values that it may have, and its default; without a default it is required.

    `other` is a second name that is read if the first is absent. A null is read as None if `nullable`. The
    field is 1 over the value if `inverse`.
    """

    name: str
    check: Check
    default: Any = None
    other: str = ""
    nullable: bool = False
    inverse: bool = False

    def convert(self, value: Any) -> Any:
        """Return the field of a value of the key, or the value of a field."""
        return 1 / value if self.inverse else value


@dataclass(frozen=True)
class Config:
    """The keys of a `config.json`, or of the object `inside` it, each checked as it is read.

    Errors start with `key` and name `source`, the path of the file.
    """

    source: str
    values: dict[str, Any]
    key: str = "model.hf"
    inside: str = ""

    def fields(self, keys: dict[str, JsonKey]) -> dict[str, Any]:
        """Return field -> the value of its key."""
        return {field: key.convert(self.read(*key[:5])) for field, key in keys.items()}

    def read(
        self, name: str, check: Check, default: Any = None, other: str = "", nullable: bool = False
    ) -> Any:
        """Return the value of the key `name`, whose parameters are those of `JsonKey`."""
        if other in self.values and name not in self.values:
            name = other
        if name not in self.values and default is None and not nullable:
            raise UserError(f"{self.key}: {self._place()} lacks the key {name!r}")
        value = self.values.get(name, default)
        if value is None and check is FLAG:  # null is false, as in transformers
            return False
        if value is None and nullable:
            return None
        if not check.admits(value):
            raise self.wrong(name, f"it must be {check.text}")
        return value

    def section(self, name: str) -> Config:
        """Return the object under `name`; one that is absent or null is empty."""
        value = self.values.get(name)
        if value is not None and not isinstance(value, dict):
            raise self.wrong(name, "it must be an object or null")
        return Config(self.source, value or {}, self.key, name)

    def wrong(self, name: str, why: str) -> UserError:
        """Return the error to raise for the value of the key `name`."""
        return UserError(f"{self.key}: {self._place()} has {name} {show(self.values.get(name))}; {why}")

    def check(self, name: str, computed: Any) -> None:
        """Raise `UserError` unless the key is absent or has the value `computed`."""
        if self.values.get(name, computed) != computed:
            raise self.wrong(name, f"only {show(computed)} is computed")

    def _place(self) -> str:
        return f"{self.inside} of {self.source}" if self.inside else self.source
