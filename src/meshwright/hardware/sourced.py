"""Tables of figures in TOML files: each names where its figures come from, and may extend another."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any, TypeVar

from meshwright.spec import records
from meshwright.spec.errors import UserError

_SOURCE_KEYS = ("source", "fitted_on")
"""Keys that name a publication, and the measured runs of a fit; each table of figures has at least one."""

Tables = Mapping[str, dict[str, Any]]
T = TypeVar("T", bound=records.Record)


def read_tables(kind: type[T], tables: Tables, where: str, **defaults: Any) -> dict[str, T]:
    """The tables as records of a `kind`, by name, with the figures that they inherit by `extends` filled in.

    Where figures come from is not inherited. A table named 'defaults' is only inherited from. A record gets
    its table's name and sources if it has fields for them, and `defaults` for keys that its table lacks.
    Raises `UserError`, which starts with `where` and the table's name, for a table that names neither a
    source nor a fit, for one that extends no table above it, for an unknown key, and for an invalid value.
    """
    unused = {"name", "extends", *_SOURCE_KEYS} - {field.name for field in fields(kind)}
    whole: dict[str, dict[str, Any]] = {}
    made: dict[str, T] = {}
    for name, table in tables.items():
        if not any(isinstance(table.get(key), str) and table[key].strip() for key in _SOURCE_KEYS):
            raise UserError(
                f"{where}{name}: has neither 'source' nor 'fitted_on'; name the publication, or the "
                "measured runs, that its figures come from"
            )
        base = table.get("extends", "")
        if base and base not in whole:
            raise UserError(
                f"{where}{name}.extends: '{base}' is not a table above it; the tables are {', '.join(whole)}"
            )
        inherited = {key: value for key, value in whole.get(base, {}).items() if key not in _SOURCE_KEYS}
        whole[name] = {**defaults, **inherited, **table, "name": name}
        if name != "defaults":
            figures = {key: value for key, value in whole[name].items() if key not in unused}
            made[name] = records.read(kind, figures, f"{where}{name}")
    return made
