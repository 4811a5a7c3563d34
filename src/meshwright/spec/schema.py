"""Every key that a run file may hold: its type, default and meaning, read from the spec's JSON schema."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, get_args

from meshwright.spec.run import RunSpec

_PLAIN = {"boolean": "true|false", "integer": "integer", "number": "number", "string": "text", "null": "none"}
_BOUNDS = {"minimum": ">=", "exclusiveMinimum": ">", "maximum": "<=", "exclusiveMaximum": "<"}

Node = dict[str, Any]
"""A part of a JSON schema."""


@dataclass(frozen=True)
class Key:
    """One dotted key of a run file.

    `types` are the JSON types that its value may have: "null" if it may be absent, "object" for a table with
    keys that the user names. `choices` are the values of an enumeration. `text` and `default` describe the
    key to a reader, such as "integer >= 1 | none".
    """

    name: str
    types: tuple[str, ...]
    choices: tuple[Any, ...]
    text: str
    default: str
    description: str

    @property
    def optional(self) -> bool:
        """True if 'none' means no value here (and is not itself one of the choices)."""
        return "null" in self.types and "none" not in self.choices

    @property
    def is_text(self) -> bool:
        """True if every value is text, so that a flag's characters are used unparsed."""
        return {*self.types} <= {"string", "null"}

    @property
    def is_switch(self) -> bool:
        """True if the value is a boolean."""
        return "boolean" in self.types


@cache
def known_keys() -> dict[str, Key]:
    """Return every dotted key in the order of the parts; keys of a union's branches are merged."""
    keys: dict[str, Key] = {}
    for name, node, leaves in _nodes():
        if not any("properties" in leaf for leaf in leaves):
            key = _key(name, node, leaves)
            keys[name] = _merge(keys[name], key) if name in keys else key
    return keys


def parts_of(table: str) -> list[Any]:
    """Return the classes that a table of the run file may be: one, or the branches of a union."""
    annotation = RunSpec.model_fields[table].annotation
    return [part for part in get_args(annotation) if part is not type(None)] or [annotation]


@cache
def optional_tables() -> frozenset[str]:
    """Return the dotted names of tables that 'none' may stand for."""
    return frozenset(
        name
        for name, _, leaves in _nodes()
        if {"type": "null"} in leaves and any("properties" in leaf for leaf in leaves)
    )


@cache
def _nodes() -> list[tuple[str, Node, list[Node]]]:
    """Dotted name, node and alternatives of every property, those of a table after the table."""
    root = RunSpec.model_json_schema()

    def leaves(node: Node) -> Iterator[Node]:
        if "$ref" in node:
            yield root["$defs"][node["$ref"].removeprefix("#/$defs/")]
        elif options := node.get("anyOf", node.get("oneOf")):
            for option in options:
                yield from leaves(option)
        else:
            yield node

    def walk(prefix: str, table: Node) -> Iterator[tuple[str, Node, list[Node]]]:
        for name, node in table.get("properties", {}).items():
            listed = list(leaves(node))
            yield prefix + name, node, listed
            for leaf in listed:
                yield from walk(f"{prefix}{name}.", leaf)

    return list(walk("", root))


def _key(name: str, node: Node, leaves: list[Node]) -> Key:
    shown = [_describe(leaf) + _bounds(leaf) for leaf in leaves]
    text = (" | " if any(map(_bounds, leaves)) else "|").join(shown)
    kinds = tuple(leaf["type"] for leaf in leaves)
    choices = tuple(choice for leaf in leaves for choice in _choices(leaf))
    default = node.get("default", {} if "object" in kinds else "")
    if isinstance(default, list):
        default = ",".join(map(str, default)) or default
    if not isinstance(default, str):
        default = "none" if default is None else json.dumps(default)
    return Key(name, kinds, choices, text, default, node.get("description", ""))


def _merge(first: Key, other: Key) -> Key:
    """Merge a key that two branches of a union have: every choice of both, the first one's default."""
    kinds = tuple(dict.fromkeys((*first.types, *other.types)))
    choices = tuple(dict.fromkeys((*first.choices, *other.choices)))
    text = first.text if other.text == first.text else f"{first.text}|{other.text}"
    description = first.description or other.description
    return replace(first, types=kinds, choices=choices, text=text, description=description)


def _choices(leaf: Node) -> list[Any]:
    return [leaf["const"]] if "const" in leaf else list(leaf.get("enum", []))


def _describe(leaf: Node) -> str:
    if choices := _choices(leaf):
        return "|".join(map(str, choices))
    if leaf["type"] == "array":
        items = leaf["items"]
        if items.get("type") == "array":
            return f"list of lists of {_describe(items['items'])}s"
        words = _choices(items) or items.get("type") == "boolean"
        return f"list of {_describe(items)}" + ("" if words else "s")
    if leaf["type"] == "object":
        return f"table of {_describe(leaf['additionalProperties'])}s"
    return _PLAIN[leaf["type"]]


def _bounds(leaf: Node) -> str:
    return ",".join(f" {sign} {_bound(leaf[name])}" for name, sign in _BOUNDS.items() if name in leaf)


def _bound(number: float) -> str:
    """Return a bound as people read it: large powers of two as such."""
    power = int(number).bit_length() - 1
    return f"2^{power}" if power >= 16 and number == 2**power else str(number)


def schema() -> dict[str, Any]:
    """Return the JSON schema of a run file, for editors (`#:schema run.schema.json` as its first line).

    It says what the file may hold: a preset fills the fields of the model, so none is required, and 'none'
    stands for no value, as TOML has no null.
    """
    root = RunSpec.model_json_schema()
    for part in root["$defs"].values():
        part.pop("required", None)
    edited: dict[str, Any] = _none_as_text(root)
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
