"""Every key that a run file may hold: its type, default and meaning, read from the parts themselves."""

from __future__ import annotations

import json
import types
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from meshwright.spec.run import RunSpec

_PLAIN = {bool: "true|false", int: "integer", float: "number", str: "text"}
_BOUNDS = {"ge": ">=", "gt": ">", "le": "<=", "lt": "<"}


@dataclass(frozen=True)
class Key:
    """One dotted key: `kinds` are the types that its value may have, NoneType where it may be absent.

    `text` and `default` describe it to a reader: "integer >= 1 | none".
    """

    name: str
    kinds: tuple[Any, ...]
    text: str
    default: str
    description: str

    @property
    def optional(self) -> bool:
        """True if 'none' means no value here (and is not itself one of the choices)."""
        return type(None) in self.kinds and "none" not in self.choices

    @property
    def choices(self) -> tuple[Any, ...]:
        """The values that a `Literal` admits."""
        return tuple(value for kind in self.kinds if get_origin(kind) is Literal for value in get_args(kind))

    @property
    def is_text(self) -> bool:
        """True if every value is text, so that a flag's characters are used unparsed."""
        kinds = [kind for kind in self.kinds if kind is not type(None)]
        return all(kind is str or _is_text_choice(kind) for kind in kinds)

    @property
    def is_list(self) -> bool:
        """True if the value is a list."""
        return any(get_origin(kind) is tuple for kind in self.kinds)

    @property
    def is_table(self) -> bool:
        """True if the value is a table with keys that the user names."""
        return any(get_origin(kind) is dict for kind in self.kinds)

    @property
    def is_switch(self) -> bool:
        """True if the value is a boolean."""
        return bool in self.kinds


def _is_text_choice(kind: Any) -> bool:
    return get_origin(kind) is Literal and all(isinstance(value, str) for value in get_args(kind))


@cache
def known_keys() -> dict[str, Key]:
    """Every dotted key in the order of the parts; keys of a union's branches are merged."""
    keys: dict[str, Key] = {}
    for key in _walk("", RunSpec):
        before = keys.get(key.name)
        keys[key.name] = key if before is None else _merge(before, key)
    return keys


def parts_of(table: str) -> list[type[BaseModel]]:
    """The parts that a table of the run file may be: one, or the branches of a union."""
    return list(_parts(RunSpec.model_fields[table].annotation))


@cache
def optional_tables() -> frozenset[str]:
    """The dotted names of tables that 'none' may stand for."""
    return frozenset(
        f"{part}.{name}"
        for part, outer in RunSpec.model_fields.items()
        for owner in _parts(outer.annotation)
        for name, field in owner.model_fields.items()
        if any(_parts(field.annotation)) and type(None) in _kinds(field.annotation)
    )


def _walk(prefix: str, part: type[BaseModel]) -> Iterator[Key]:
    for name, field in part.model_fields.items():
        parts = list(_parts(field.annotation))
        for inner in parts:
            yield from _walk(f"{prefix}{name}.", inner)
        if not parts:
            yield _key(prefix + name, field)


def _key(name: str, field: FieldInfo) -> Key:
    kinds = tuple(_kinds(field.annotation))
    bounds = _bounds(field.metadata) or _bounds(list(_metadata(field.annotation)))
    shown = [_describe(kind) + (bounds if kind in (int, float) else "") for kind in kinds]
    text = (" | " if bounds else "|").join(shown)
    return Key(name, kinds, text, _default(field), field.description or "")


def _merge(first: Key, other: Key) -> Key:
    """Merge a key that two branches of a union have: every choice of both, the first one's default."""
    kinds = tuple(dict.fromkeys((*first.kinds, *other.kinds)))
    text = first.text if other.text == first.text else f"{first.text}|{other.text}"
    return replace(first, kinds=kinds, text=text, description=first.description or other.description)


def _parts(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    elif get_origin(annotation) in (Annotated, Union, types.UnionType):
        for argument in get_args(annotation):
            yield from _parts(argument)


def _kinds(annotation: Any) -> Iterator[Any]:
    origin = get_origin(annotation)
    if origin in (Union, types.UnionType):
        for argument in get_args(annotation):
            yield from _kinds(argument)
    elif origin is Annotated:
        yield from _kinds(get_args(annotation)[0])
    else:
        yield annotation


def _metadata(annotation: Any) -> Iterator[Any]:
    """Metadata of the types in a union, such as the bound in `PositiveInt | None`."""
    if get_origin(annotation) is Annotated:
        yield from annotation.__metadata__
    elif get_origin(annotation) in (Union, types.UnionType):
        for argument in get_args(annotation):
            yield from _metadata(argument)


def _describe(kind: Any) -> str:
    origin, arguments = get_origin(kind), get_args(kind)
    if kind is type(None):
        return "none"
    if origin is Literal:
        return "|".join(str(value) for value in arguments)
    if origin is tuple:
        item = next(_kinds(arguments[0]))
        return f"list of {_describe(item)}" + ("s" if item in _PLAIN else "")
    if origin is dict:
        return "table of " + "|".join(_describe(inner) for inner in _kinds(arguments[1])) + "s"
    return _PLAIN[kind]


def _bounds(metadata: list[Any]) -> str:
    found = [
        f" {sign} {getattr(item, name)}"
        for item in metadata
        for name, sign in _BOUNDS.items()
        if getattr(item, name, None) is not None
    ]
    return ",".join(bound.replace(str(2**63), "2^63") for bound in found)


def _default(field: FieldInfo) -> str:
    value = field.get_default(call_default_factory=True, validated_data={})
    if value is PydanticUndefined:
        return ""
    if value is None:
        return "none"
    if isinstance(value, tuple):
        return ",".join(map(str, value)) or "[]"
    return value if isinstance(value, str) else json.dumps(value)


def schema() -> dict[str, Any]:
    """The JSON schema of a run file, for editors (`#:schema run.schema.json` as a TOML file's first line).

    It says what the file may hold: a preset fills the model's fields, so none is required, and 'none' stands
    for no value, as TOML has no null.
    """
    found = RunSpec.model_json_schema()
    for part in found.get("$defs", {}).values():
        part.pop("required", None)
    edited: dict[str, Any] = _none_as_text(found)
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **edited}


def _none_as_text(node: Any) -> Any:
    if isinstance(node, list):
        return [_none_as_text(item) for item in node]
    if not isinstance(node, dict):
        return node
    if node == {"type": "null"}:
        return {"const": "none"}
    shown = {key: value for key, value in node.items() if not (key == "default" and value is None)}
    return {key: _none_as_text(value) for key, value in shown.items()}
