"""Tables of figures in TOML files: each names where its figures come from, and may extend another."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from meshwright.spec.errors import UserError

SOURCE_KEYS = ("source", "fitted_on")
"""Keys that name a publication, and the measured runs of a fit; each table of figures has at least one."""


def resolve(tables: Mapping[str, dict[str, Any]], where: str) -> dict[str, dict[str, Any]]:
    """The tables with the figures that they inherit by `extends` filled in.

    Where figures come from is not inherited. Raises `UserError`, which starts with `where`, for a table that
    names neither a source nor a fit, and for one that extends no table above it.
    """
    whole: dict[str, dict[str, Any]] = {}
    for name, table in tables.items():
        if not any(isinstance(table.get(key), str) and table[key].strip() for key in SOURCE_KEYS):
            raise UserError(
                f"{where}.{name}: has neither 'source' nor 'fitted_on'; name the publication, or the "
                "measured runs, that its figures come from"
            )
        own = {key: value for key, value in table.items() if key != "extends"}
        base = table.get("extends", "")
        if base and base not in whole:
            raise UserError(
                f"{where}.{name}.extends: '{base}' is not a table above it; the tables are {', '.join(whole)}"
            )
        inherited = {key: value for key, value in whole.get(base, {}).items() if key not in SOURCE_KEYS}
        whole[name] = inherited | own
    return whole
