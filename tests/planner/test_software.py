"""The tables of software stacks: each has a source, and broken ones are refused in one sentence."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

from meshwright.hardware.sourced import read_tables
from meshwright.planner.cost import software
from meshwright.planner.cost.software import MESHWRIGHT, STACKS, SoftwareStack, stack_named
from meshwright.planner.validation import calibration
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
        ({"atention": "flash2"}, r"^file: nanotron: atention: unknown key; did you mean 'attention'"),
        ({"spread": "most"}, r'^file: nanotron: spread: "most" is not valid: it should be a number'),
        ({"overlaps": ["date"]}, r'^file: nanotron: overlaps\[0\]: "date" is not one of data, parameters'),
        ({"selective": "most"}, r'"most" is not one of attention, half, elementwise, latents'),
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
    assert compiled.numbers == fsdp.numbers and compiled.launch < fsdp.launch


def test_programs_differ_in_kinds_and_share_all_numbers() -> None:
    own = {"host", "ends", "packed", "unpacked"}  # measured on processors, where this program alone is timed
    for name, table in tables().items():
        if name not in ("defaults", "meshwright-cpu"):
            assert "numbers" not in table and not own & set(table)
    assert all(stack.numbers == MESHWRIGHT.numbers for stack in STACKS.values())


def test_at_most_30_numbers_are_fitted() -> None:
    named = sum(len(kinds) if isinstance(kinds, dict) else 1 for kinds in calibration.OF_STACKS.values())
    named += sum(map(len, calibration.OF_RATES.values()))
    assert named + sum(calibration.BY_HAND.values()) <= 30
    told = set()
    for path in Path(software.__file__).parents[1].rglob("*.py"):
        constants = r'\n([A-Z_, ]+) = [^"]*"""(?:(?!""").)*?[Ff]itted\s+on'
        for name in re.findall(constants, path.read_text(), re.DOTALL):
            told |= {each for each in name.split(", ") if not each.startswith("SIGMA")}  # of the error alone
    assert told == {name for name in calibration.BY_HAND if name.isupper()}


def test_stacks_by_name() -> None:
    assert stack_named("meshwright") is MESHWRIGHT and MESHWRIGHT.ours and "defaults" not in STACKS
    with pytest.raises(UserError, match="no stack 'fdsp'; did you mean 'fsdp'"):
        stack_named("fdsp")
