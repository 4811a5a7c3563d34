"""Frozen dataclasses that check their fields, and the sentence that a user reads where a check fails.

A `Record` validates its fields with pydantic, both when Python code constructs it and when `read` makes it of
a tree of plain values, as JSON and TOML files hold them.
"""

from __future__ import annotations

import json
import types
from collections.abc import Sequence
from dataclasses import fields, is_dataclass
from typing import Annotated, Any, TypeVar, Union, get_args, get_origin, get_type_hints

from pydantic import BeforeValidator, ConfigDict, Field, TypeAdapter, ValidationError, model_validator
from pydantic.dataclasses import dataclass
from pydantic_core import ArgsKwargs

from meshwright.spec.errors import UserError, did_you_mean

Number = Annotated[float, Field(strict=True, allow_inf_nan=False)]
Positive = Annotated[Number, Field(gt=0)]
NotNegative = Annotated[Number, Field(ge=0)]
Natural = Annotated[int, Field(strict=True, ge=0, lt=2**63)]
"""A whole number of 64 bits, 0 or more."""

_WORDS = {
    "Input should be": "it should be",
    "a valid tuple": "a list",
    "a valid dictionary": "a table",
    "a valid string": "a text",
    "a valid integer": "a whole number",
    "a valid number": "a number",
    "greater than or equal to": "at least",
    "greater than": "above",
    "less than or equal to": "at most",
}

T = TypeVar("T")


def _integral(value: Any) -> Any:  # TOML and JSON may write 8e10
    return int(value) if isinstance(value, float) and value.is_integer() else value


Integer = Annotated[int, BeforeValidator(_integral), Field(strict=True)]
Count = Annotated[Integer, Field(ge=1)]


@dataclass(frozen=True)
class Record:
    """Base of frozen dataclasses with checked fields.

    Constructing one with an invalid value, or with an unknown field, raises `UserError`.
    """

    __pydantic_config__ = ConfigDict(extra="forbid")

    @model_validator(mode="wrap")
    @classmethod
    def _one_sentence(cls, value: Any, handler: Any) -> Any:
        try:
            return handler(value)
        except ValidationError as error:
            if isinstance(value, ArgsKwargs):  # a call of the constructor, and not a part of a larger tree
                raise UserError(sentence(error, cls)) from None
            raise


def read(kind: type[T], tree: Any, where: str = "") -> T:
    """Return the `kind` that a tree of plain values describes. Raises `UserError`, starting with `where`."""
    prefix = f"{where}: " if where else ""
    try:
        return TypeAdapter(kind).validate_python(tree)
    except ValidationError as error:
        raise UserError(prefix + sentence(error, kind)) from None
    except UserError as error:
        raise UserError(f"{prefix}{error}") from None


def sentence(error: ValidationError, kind: Any) -> str:
    """The first of pydantic's errors in a `kind` as one sentence: the key, its value, and what would work."""
    first = error.errors(include_url=False)[0]
    cause, value = first["type"], first["input"]
    location = list(first["loc"])
    parent = _type_at(kind, location[:-1])
    known = _names(parent)
    if location and isinstance(location[-1], int) and known:
        location[-1] = known[location[-1]] if location[-1] < len(known) else str(location[-1])
    dotted = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in location)
    where = dotted.removeprefix(".") or "the file"
    if cause == "unexpected_keyword_argument":
        hint = did_you_mean(str(location[-1]), known) or f"; the keys are {', '.join(known)}"
        return f"{where}: unknown key{hint}"
    if cause in ("missing", "missing_argument"):
        rows = hasattr(parent, "_fields")
        return f"{where}: is missing" + (f"; it is a list of {', '.join(known)}" if rows else "")
    if cause == "literal_error":
        choices = get_args(_type_at(kind, location))
        return f"{where}: {show(value)} is not one of {', '.join(choices)}{did_you_mean(str(value), choices)}"
    if cause in ("dataclass_type", "dataclass_exact_type"):
        reason = "it should be a table"
    elif cause in ("named_tuple_type", "too_long"):
        reason = f"it should be a list of {', '.join(_names(_type_at(kind, location)))}"
    else:
        reason = first["msg"]
        for words, plain in _WORDS.items():
            reason = reason.replace(words, plain)
    return f"{where}: {show(value)} is not valid: {reason}"


def show(value: Any) -> str:
    """A value as a sentence quotes it, at most 60 characters of JSON; numbers as Python writes them."""
    try:
        text = str(value) if isinstance(value, float) else json.dumps(value, default=str)
    except ValueError:  # Python's limit on the digits of a number
        return "a value with a number of too many digits"
    return text if len(text) <= 60 else text[:57] + "..."


def _names(kind: Any) -> Sequence[str]:
    """Fields of a dataclass or a named tuple, else nothing."""
    return [field.name for field in fields(kind)] if is_dataclass(kind) else getattr(kind, "_fields", ())


def _type_at(kind: Any, location: Sequence[str | int]) -> Any:
    """The type at a location of `kind`, or None beyond what can be followed."""
    for part in location:
        inner = get_args(kind)
        if part in _names(kind):
            kind = get_type_hints(kind)[str(part)]
        elif inner:
            kind = inner[0] if get_origin(kind) is tuple else inner[-1]
        else:
            return None
        kind = next(iter(get_args(kind))) if get_origin(kind) in (Union, types.UnionType) else kind
    return kind
