"""A class name stands for one thing in the whole package."""

from __future__ import annotations

import ast
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent / "src" / "meshwright"
ONE_ROLE = {"_Fields"}
"""Each part of a step gives the fields of its state under this name (`StepPart.Fields`)."""


def test_no_two_classes_have_one_name() -> None:
    places = defaultdict[str, list[str]](list)
    for path in ROOT.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                places[node.name].append(f"{path.relative_to(ROOT)}:{node.lineno}")
    assert {name: found for name, found in places.items() if len(found) > 1 and name not in ONE_ROLE} == {}
