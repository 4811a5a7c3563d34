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
    parts = spec.to_json()
    lines = [f"{name} = {_value(None)}" for name, part in parts.items() if part is None]
    for name, part in parts.items():
        if part is not None:
            _table(lines, (name,), part)
    return "\n".join(lines).strip() + "\n"


def _table(lines: list[str], path: tuple[str, ...], fields: dict[str, Any]) -> None:
    tables = {name: value for name, value in fields.items() if isinstance(value, dict) and value}
    lines += ["", f"[{'.'.join(map(_name, path))}]"]
    lines += [f"{_name(name)} = {_value(value)}" for name, value in fields.items() if name not in tables]
    for name, value in tables.items():
        _table(lines, (*path, name), value)


def _name(name: str) -> str:
    return name if _BARE.fullmatch(name) else _value(name)


def _value(value: Any) -> str:
    if value is None:
        return '"none"'
    if isinstance(value, dict):  # only empty ones stand on one line
        return "{}"
    if isinstance(value, list):
        return f"[{', '.join(map(_value, value))}]"
    if isinstance(value, str):  # TOML's basic strings are JSON's, but for DEL, which TOML wants escaped
        return _CONTROL.sub(lambda found: f"\\u{ord(found[0]):04x}", json.dumps(value, ensure_ascii=False))
    return json.dumps(value)
