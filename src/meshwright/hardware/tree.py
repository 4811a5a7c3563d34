"""Trees of plain values, as JSON has them, into dataclasses; one sentence for each mistake."""

from __future__ import annotations

import json
import types
from collections.abc import Mapping
from dataclasses import MISSING, fields, is_dataclass
from functools import cache
from typing import Any, Literal, Union, cast, get_args, get_origin, get_type_hints

from meshwright.spec.errors import UserError, did_you_mean


@cache
def _hints(kind: type) -> dict[str, Any]:
    return get_type_hints(kind)


def read_tree(kind: Any, value: Any, where: str) -> Any:
    """`value` as an instance of `kind`, which is made of dataclasses, named tuples and plain types."""
    origin, inner = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):  # only ever with None
        return None if value is None else read_tree(inner[0], value, where)
    if origin is Literal:
        if value not in inner:
            hint = did_you_mean(str(value), inner)
            raise UserError(f"{where}: {_show(value)} is not one of {', '.join(inner)}{hint}")
        return value
    if is_dataclass(kind):
        return _read_table(cast(type, kind), value, where)
    if origin is tuple:
        _check(isinstance(value, (list, tuple)), where, value, "a list")
        return tuple(read_tree(inner[0], item, f"{where}[{place}]") for place, item in enumerate(value))
    if isinstance(kind, type) and issubclass(kind, tuple):
        return _read_row(kind, value, where)
    if origin is not None and issubclass(origin, Mapping):
        _check(isinstance(value, Mapping), where, value, "a table")
        return {str(key): read_tree(inner[1], item, f"{where}.{key}") for key, item in value.items()}
    return _read_plain(kind, value, where)


def _read_table(kind: type, value: Any, where: str) -> Any:
    _check(isinstance(value, Mapping), where or "the file", value, "a table")
    known, inside = {each.name: each for each in fields(kind)}, f"{where}." if where else ""
    for name in value:
        if name not in known:
            hint = did_you_mean(name, known) or f"; the keys are {', '.join(known)}"
            raise UserError(f"{inside}{name}: unknown key{hint}")
    for name, each in known.items():
        if name not in value and each.default is MISSING and each.default_factory is MISSING:
            raise UserError(f"{inside}{name}: is missing")
    hints = _hints(kind)
    read_fields = {name: read_tree(hints[name], item, f"{inside}{name}") for name, item in value.items()}
    return kind(**read_fields)


def _read_row(kind: type, value: Any, where: str) -> Any:
    hints = _hints(kind)
    right = isinstance(value, (list, tuple)) and len(value) == len(hints)
    _check(right, where, value, f"a list of {', '.join(hints)}")
    pairs = zip(hints.items(), value, strict=True)
    row = [read_tree(hint, item, f"{where}.{name}") for (name, hint), item in pairs]
    numbers = [item for item in row if not isinstance(item, str)]
    _check(all(0 < item < float("inf") for item in numbers), where, value, "sizes and seconds above 0")
    return kind(*row)


def _read_plain(kind: type, value: Any, where: str) -> Any:
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if kind is float:
        _check(number, where, value, "a number")
        return float(value)
    if kind is int:
        _check(number and value == value // 1, where, value, "a whole number")
        return int(value)
    _check(isinstance(value, kind), where, value, "a text")
    return value


def _check(right: bool, where: str, value: Any, wanted: str) -> None:
    if not right:
        raise UserError(f"{where}: {_show(value)} is not valid: it should be {wanted}")


def _show(value: Any) -> str:
    text = json.dumps(value, default=str)
    return text if len(text) <= 60 else text[:57] + "..."
