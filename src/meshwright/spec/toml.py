"""A `RunSpec` as TOML that loads back to an equal one."""

from __future__ import annotations

import json
import re
from typing import Any

from meshwright.spec.run import RunSpec

_BARE = re.compile(r"[A-Za-z0-9_-]+")
_CONTROL = re.compile("[\x7f-\x9f]")  # a terminal obeys those above DEL, too


def to_toml(spec: RunSpec) -> str:
    """Every field of `spec`, the defaults included; 'none' stands for no value, as TOML has no null."""
    return _toml(spec.to_json())


def changes_to_toml(spec: RunSpec) -> str:
    """The fields of `spec` that are not those of its preset and the program, with the preset."""
    named = {"preset": spec.model.preset} if spec.model.preset else {}
    changed = _changes(spec.to_json(), usual(spec.model.preset))
    return _toml({**changed, "model": {**named, **changed.get("model", {})}})


def usual(preset: str | None) -> dict[str, Any]:
    """The fields of a run file that has a preset's name alone, or nothing, as JSON."""
    return RunSpec.model_validate({"model": {"preset": preset} if preset else {}}).to_json()


def _changes(tree: dict[str, Any], usual: dict[str, Any]) -> dict[str, Any]:
    """The values of a tree that another one lacks or has otherwise; tables of which something is left."""
    found: dict[str, Any] = {}
    for name, value in tree.items():
        other = usual.get(name)
        if isinstance(value, dict) and isinstance(other, dict) and other:
            value = _changes(value, other)
            found |= {name: value} if value else {}
        elif name not in usual or value != other:
            found[name] = value
    return found


def _toml(parts: dict[str, Any]) -> str:
    lines = [f"{name} = {toml_value(None)}" for name, part in parts.items() if part is None]
    for name, part in parts.items():
        if part is not None:
            _table(lines, (name,), part)
    return "\n".join(lines).strip() + "\n"


def _table(lines: list[str], path: tuple[str, ...], fields: dict[str, Any]) -> None:
    tables = {name: value for name, value in fields.items() if isinstance(value, dict) and value}
    lines += ["", f"[{'.'.join(map(_name, path))}]"]
    lines += [f"{_name(name)} = {toml_value(value)}" for name, value in fields.items() if name not in tables]
    for name, value in tables.items():
        _table(lines, (*path, name), value)


def _name(name: str) -> str:
    return name if _BARE.fullmatch(name) else toml_value(name)


def toml_value(value: Any) -> str:
    """Return a value as TOML; "none" stands for no value."""
    if value is None:
        return '"none"'
    if isinstance(value, dict):  # only empty ones stand on one line
        return "{}"
    if isinstance(value, list):
        return f"[{', '.join(map(toml_value, value))}]"
    if isinstance(value, str):  # TOML's basic strings are JSON's, but for DEL, which TOML wants escaped
        return _CONTROL.sub(lambda found: f"\\u{ord(found[0]):04x}", json.dumps(value, ensure_ascii=False))
    return json.dumps(value)
