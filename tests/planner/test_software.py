"""The tables of software stacks: each has a source, and broken ones are refused in one sentence."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest

from meshwright.hardware.sourced import read_tables
from meshwright.planner.cost import software
from meshwright.planner.cost.software import MESHWRIGHT, STACKS, SoftwareStack, stack_named
from meshwright.spec.errors import UserError


def tables() -> dict[str, Any]:
    path = Path(software.__file__).parent / "stacks.toml"
    return tomllib.loads(path.read_text(encoding="utf-8"))


def test_every_table_without_its_source_is_refused() -> None:
    for name, table in tables().items():
        bare = {key: value for key, value in table.items() if key not in ("source", "fitted_on")}
        with pytest.raises(UserError, match=rf"^file: {name}: has neither 'source' nor 'fitted_on'"):
            read_tables(SoftwareStack, tables() | {name: bare}, "file: ")


@pytest.mark.parametrize(
    ("changed", "sentence"),
    [
        ({"lunch": 1e-6}, r"^file: nanotron: lunch: unknown key; did you mean 'launch'"),
        ({"launch": "fast"}, r'^file: nanotron: launch: "fast" is not valid: it should be a number'),
        ({"selective": "most"}, r'"most" is not one of attention, half, elementwise'),
        ({"extends": "fspd"}, r"^file: nanotron\.extends: 'fspd' is not a table above it"),
    ],
)
def test_broken_tables_are_refused(changed: dict[str, object], sentence: str) -> None:
    tree = tables()
    tree["nanotron"] |= changed
    with pytest.raises(UserError, match=sentence):
        read_tables(SoftwareStack, tree, "file: ")


def test_a_table_takes_over_what_it_extends() -> None:
    fsdp, compiled = STACKS["fsdp"], STACKS["fsdp-compiled"]
    assert compiled.recipe == fsdp.recipe and compiled.recipe.copy == 0
    assert (compiled.launch, fsdp.launch) == (5e-6, 10e-6)


def test_stacks_by_name() -> None:
    assert stack_named("meshwright") is MESHWRIGHT and MESHWRIGHT.ours and "defaults" not in STACKS
    with pytest.raises(UserError, match="no stack 'fdsp'; did you mean 'fsdp'"):
        stack_named("fdsp")
