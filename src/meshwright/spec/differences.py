"""Differences between two trees of keys and values, such as the specs of two runs."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

Tree = Mapping[str, Any]


def differences(first: Tree, second: Tree) -> dict[str, tuple[Any, Any]]:
    """Return the values of both trees by dotted key, where they differ; None where a tree has no such key.

    A tree without a table is like one in which that is empty.
    """
    one, other = flat(first), flat(second)
    pairs = {key: (one.get(key), other.get(key)) for key in sorted({*one, *other})}
    return {key: (a, b) for key, (a, b) in pairs.items() if a != b and (a, b) not in (({}, None), (None, {}))}


def as_in_file(value: Any) -> str:
    """Return a value as a run file has it."""
    return repr(value or "none") if value is None or isinstance(value, str) else json.dumps(value)


def flat(table: Tree, prefix: str = "") -> dict[str, Any]:
    """Return values by dotted key, those of tables within the table too."""
    found: dict[str, Any] = {}
    for key, value in table.items():
        filled = isinstance(value, Mapping) and value
        found |= flat(value, f"{prefix}{key}.") if filled else {prefix + key: value}
    return found
