"""The lint of prose finds planted breaches, and passes what is well written."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
LINT = runpy.run_path(str(ROOT / "tools" / "lint_prose.py"))


@pytest.mark.parametrize(
    ("source", "line", "words"),
    [
        ('"""What a module does."""', 1, "opens with 'What'"),
        ('def _f():\n    """The same for trees."""', 2, "opens with 'The same'"),
        ('class A:\n    """A box."""\n    size: int\n    """Of the box, in bytes."""', 4, "opens with 'Of'"),
        ('class A:\n    """A."""\n    def f(self):\n        """Whether it fits."""', 4, "'Whether'"),
        ('raise UserError(f"{key}: {value} is no number")', 1, "'is no'"),
        ('raise UserError("--top: " + f"{count} cannot be; give 1 or more")', 1, "'cannot be'"),
        ('raise errors.UserError(\n    "tp: 3 and 8",\n    hint="leave it away",\n)', 3, "'leave it away'"),
        ('failure = ValueError("presets: there are none")', 1, "'are none'"),
        ("def load(): ...", 1, "load is public"),
        ("class Plan: ...", 1, "Plan is public"),
    ],
)
def test_a_planted_breach_is_found(source: str, line: int, words: str) -> None:
    ((at, message),) = LINT["breaches"](source)
    assert at == line and words in message


def test_what_is_well_written_passes() -> None:
    source = '''
"""Pages of runs."""

WORDS = "The same is no error outside of one; Whatever"


def load():
    """Offset in bytes, whether sharded or not."""
    raise UserError("layout.tp: 3 does not divide 8 heads; use 1, 2, 4 or 8")
    raise UserError("run.toml: cannot be written (no space); give another file")


@overload
def load(path): ...


def _helper(): ...
'''
    assert LINT["breaches"](source) == []


def test_only_the_library_must_be_described() -> None:
    assert LINT["breaches"]("def test_a(): ...", library=False) == []


def test_listed_files_exist() -> None:
    """The lint itself complains about listed files that are clean, but not about those that were moved."""
    for name in LINT["ALLOWED"].read_text(encoding="utf-8").split():
        assert (ROOT / name).is_file(), name
