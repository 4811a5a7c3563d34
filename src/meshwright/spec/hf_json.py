"""A JSON object of a user's, with keys that are checked as they are read."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meshwright.spec.errors import UserError


def read_json_object(path: Path, key: str) -> dict[str, Any]:
    """The JSON object in the file `path`; raises `UserError`, which starts with `key`, for anything else."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"{key}: {path} cannot be read ({error.strerror or error})") from error
    except RecursionError as error:
        raise UserError(f"{key}: {path} is nested too deeply to be read") from error
    except ValueError as error:  # of the JSON, of UTF-8, or of a number with too many digits
        raise UserError(f"{key}: {path} is not JSON ({error})") from error
    if not isinstance(content, dict):
        raise UserError(f"{key}: {path} is not a JSON object")
    return content


@dataclass(frozen=True)
class Config:
    """The keys of a `config.json`, or of the object `inside` it, each checked as it is read."""

    path: Path
    values: dict[str, Any]
    inside: str = ""

    def size(self, key: str, absent: int | None = None, null: int | None = None, smallest: int = 1) -> int:
        """A whole number; `absent` and `null` stand in for a key that is not there and for a null."""
        value = self._value(key, absent)
        value = null if value is None and null is not None else value
        if isinstance(value, bool) or not isinstance(value, int) or value < smallest:
            raise self.wrong(key, f"it must be a whole number of at least {smallest}")
        return value

    def number(self, key: str, absent: float | None = None, zero: bool = False) -> float:
        """A finite number above 0, or 0 too with `zero`."""
        value = self._value(key, absent)
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not is_number or not (0 < value < math.inf or (zero and value == 0)):
            raise self.wrong(
                key, "it must be a number of at least 0" if zero else "it must be a number above 0"
            )
        return float(value) if zero else value

    def present(self, *keys: str) -> str:
        """Which of the names of one value the file uses; the first where it has none of them."""
        return next((key for key in keys if key in self.values), keys[0])

    def flag(self, key: str, absent: bool) -> bool:
        """A boolean; null is false, as in transformers."""
        value = self.values.get(key, absent)
        if value is not None and not isinstance(value, bool):
            raise self.wrong(key, "it must be true or false")
        return bool(value)

    def section(self, key: str) -> Config:
        """The object under `key`; one that is absent or null is empty."""
        value = self.values.get(key)
        if value is not None and not isinstance(value, dict):
            raise self.wrong(key, "it must be an object or null")
        return Config(self.path, value or {}, key)

    def wrong(self, key: str, why: str) -> UserError:
        """The error to raise for the value of `key`."""
        return UserError(f"model.hf: {self._place()} has {key} {self.values.get(key)!r}; {why}")

    def _value(self, key: str, absent: Any) -> Any:
        if key not in self.values and absent is None:
            raise UserError(f"model.hf: {self._place()} lacks the key {key!r}")
        return self.values.get(key, absent)

    def _place(self) -> str:
        return f"{self.inside} of {self.path}" if self.inside else str(self.path)
