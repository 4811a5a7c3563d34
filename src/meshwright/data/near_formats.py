"""Rows that are almost in a format: which one is nearest, what its keys are called there, and what lacks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

Formats = Mapping[Any, tuple[str, ...]]
"""The keys that a row of each format has."""
_CHAT = ("conversation", "dialog", "dialogue", "chat", "turns")
OTHER_NAMES: Mapping[str, tuple[str, ...]] = MappingProxyType({
    "messages": ("conversations", *_CHAT),
    "conversations": _CHAT,
    "instruction": ("question", "query", "prompt", "problem", "input"),
    "output": ("answer", "response", "completion", "solution", "target"),
    "prompt": ("question", "query", "input"),
    "completion": ("response", "answer", "output"),
    "chosen": ("preferred", "accepted"),
    "rejected": ("dispreferred",),
    "input": ("context",),
})  # fmt: skip
"""Other names that data sets have for the keys of a format, the most usual first."""
OPTIONAL: Mapping[str, tuple[str, ...]] = MappingProxyType({"alpaca": ("input",)})
"""Keys that a row of a format may have besides, and that would be lost under another name."""
_PREFERRED = ("chat", "sharegpt", "alpaca", "prompt", "preference", "judged")
"""Formats in the order in which equally near ones are proposed."""


class NearFormat(NamedTuple):
    """A format that a row is almost in: its keys that have other names in the row, and those that lack."""

    format: str
    columns: Mapping[str, str]
    missing: Sequence[str]


def nearest_format(row: Mapping[Any, Any], formats: Formats) -> NearFormat | None:
    """Return the format of which the row lacks the fewest keys, and then renames the fewest.

    None for a row that has no key of any.
    """
    found: list[tuple[int, int, int, NearFormat]] = []
    for format, wanted in formats.items():
        names = {key: _name_in(row, key) for key in (*wanted, *OPTIONAL.get(format, ()))}
        missing = [key for key in wanted if names[key] is None]
        columns = {key: name for key, name in names.items() if name not in (None, key)}
        if len(missing) < len(wanted) and format in _PREFERRED:
            near = NearFormat(format, {key: str(name) for key, name in columns.items()}, missing)
            found.append((len(missing), len(columns), _PREFERRED.index(format), near))
    return min(found)[-1] if found else None


def advice(row: Mapping[Any, Any], formats: Formats) -> str:
    """Return what to do for the row to be of the format that is nearest to it; '' where none is near."""
    near = nearest_format(row, formats)
    if near is None:
        return ""
    named = f"data.format = '{near.format}' ({' and '.join(formats[near.format])})"
    if near.missing:
        return f"the nearest is {named}, for which {' and '.join(near.missing)} is missing"
    if near.columns:
        return f"{named} reads them with {flags(near.columns)}"
    return f"{named} reads them; rows of several formats need a corpus each, mixed by data.mixture"


def flags(columns: Mapping[str, str]) -> str:
    """Return the flags that say what the keys of a format are called in the rows."""
    return " ".join(f"--data.columns.{key} {name}" for key, name in columns.items())


def renamed(row: Any, columns: Mapping[str, str]) -> Any:
    """Return a row whose keys have the names of its format, where `columns` has those of the row by them."""
    if not columns or not isinstance(row, Mapping):
        return row
    moved = {*columns, *columns.values()}
    kept = {name: value for name, value in row.items() if name not in moved}
    return kept | {key: row[name] for key, name in columns.items() if name in row}


def _name_in(row: Mapping[Any, Any], key: str) -> str | None:
    """Return the name that a key of a format has in a row, as it is or in capitals; None if it has none.

    Turns with `from` and `value` are conversations, and others messages.
    """
    if key in row:
        return key
    spelt = {name.lower(): name for name in row if isinstance(name, str)}
    for other in (key, *OTHER_NAMES.get(key, ())):
        name = spelt.get(other)
        if name is not None and (key not in ("messages", "conversations") or _suits(row[name], key)):
            return name
    return None


def _suits(turns: Any, key: str) -> bool:
    """True for a list of turns that `key` may name."""
    first = turns[0] if isinstance(turns, list) and turns else None
    return isinstance(first, Mapping) and ("from" in first) == (key == "conversations")
