"""Output of verbs: one JSON object for programs, or aligned lines for people."""

from __future__ import annotations

import json
import os
import re
import sys
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any

from meshwright.spec.load import one_line
from meshwright.units import counted

if TYPE_CHECKING:
    from meshwright.cli.parser import Call

WIDTH = 100
"""Columns that lines are kept within, unless a single word is longer."""
_BEFORE_UNIT = re.compile(r"(?<=\d) (?=(?:[KMGTP]i?)?B\b|[mu]?s\b)")
"""The space between a number and its unit."""
_JOINT = "\ue000"
"""Stands for that space while a table is laid out, so that no cell is cut there."""


def result(
    call: Call,
    values: Mapping[str, Any],
    text: Callable[[Mapping[str, Any]], None] | None = None,
    wrote: Iterable[Path | None] = (),
) -> None:
    """Print a verb's result: one JSON object on one line of stdout, or text for people.

    `text` prints `values` for people, by default as `pairs`; the files that were written follow it.
    """
    if call.json:
        print(json.dumps(values), flush=True)
        return
    (text or pairs)(values)
    for path in filter(None, wrote):
        print(f"wrote {path}")


def error(sentence: str) -> None:
    """Print an error on stderr, in one line."""
    print(f"meshwright: error: {one_line(sentence)}", file=sys.stderr)


def note(words: str) -> None:
    """Print a line on stderr that scripts may look for, such as the status of a run."""
    print(f"meshwright: {words}", file=sys.stderr)


def problems(sentences: Sequence[str]) -> int:
    """Print each problem as an error, and return the exit code: 1 if there are any."""
    for sentence in sentences:
        error(sentence)
    return int(bool(sentences))


def prose(words: str, end: str = "\n") -> None:
    """Print a text of a model's as it is, but for control characters other than line ends and tabs."""
    print("".join(char if char in "\n\t" else one_line(char) for char in words), end=end, flush=True)


def marked(parts: Iterable[tuple[str, bool]]) -> None:
    """Print a text in parts, marked ones in green, or in brackets where no terminal shows colours."""
    coloured = sys.stdout.isatty() and "NO_COLOR" not in os.environ
    begin, end = ("\x1b[1;32m", "\x1b[0m") if coloured else ("⟦", "⟧")
    for words, is_marked in parts:
        print(begin * is_marked, end="")
        prose(words, end="")
        print(end * is_marked, end="")
    print()


def line(words: str, indent: int = 2) -> None:
    """Print a sentence, wrapped; lines after the first are indented."""
    print("\n".join(_wrap(words, WIDTH, " " * indent)), flush=True)


def pairs(result: Mapping[str, Any]) -> None:
    """Print a line for each plain value, with names and values aligned; long values are wrapped."""
    plain = {name: value for name, value in result.items() if not isinstance(value, (list, dict))}
    width = max((len(name) for name in plain), default=0) + 2
    for name, value in plain.items():
        lines = _wrap(text(value), WIDTH - width)
        print(f"{name.replace('_', ' '):<{width}}" + f"\n{'':{width}}".join(lines))


def table(rows: Sequence[Mapping[str, Any]]) -> None:
    """Print rows with equal keys under a line of names, without nested values; numbers are right-aligned.

    If they are wider than `WIDTH`, cells are wrapped, those of the widest columns first, but not between a
    number and its unit.
    """
    if not rows:
        return
    names = [name for name, value in rows[0].items() if not isinstance(value, (list, dict))]
    cells = [[name.replace("_", " ") for name in names]]
    cells += [[_BEFORE_UNIT.sub(_JOINT, text(row.get(name))) for name in names] for row in rows]
    widths = _widths(list(zip(*cells, strict=True)))
    numbers = [all(isinstance(row.get(name), (int, float)) for row in rows) for name in names]
    for row in cells:
        wrapped = [_wrap(cell, width) for cell, width in zip(row, widths, strict=True)]
        for parts in zip_longest(*wrapped, fillvalue=""):
            shown = [
                part.rjust(width) if right else part.ljust(width)
                for part, width, right in zip(parts, widths, numbers, strict=True)
            ]
            print("  ".join(shown).rstrip().replace(_JOINT, " "))


def _widths(columns: Sequence[Sequence[str]]) -> list[int]:
    """Return the width of each column, so that rows stay within `WIDTH` if their words allow it."""
    widths = [max(map(len, column)) for column in columns]
    least = [max(len(word) for cell in column for word in cell.split() or [""]) for column in columns]
    while sum(widths) + 2 * (len(widths) - 1) > WIDTH and widths != least:
        widths[max(range(len(widths)), key=lambda place: (widths[place] > least[place], widths[place]))] -= 1
    return widths


def _wrap(words: str, width: int, indent: str = "") -> list[str]:
    """Wrap into lines of whole words; a longer word gets a line of its own."""
    return textwrap.wrap(
        words, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    ) or [""]


def text(value: Any) -> str:
    """Return a value as people read it: 1,234,567; 3.142; yes; -.

    Control characters are escaped: a terminal would obey those that a foreign file holds.
    """
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:,.0f}" if 10_000 <= abs(value) < 1e15 else f"{value:,.4g}"
    return one_line(str(value))


def count(number: int, noun: str) -> str:
    """Return a number with its noun: 1 step, 1,234 microbatches."""
    return counted(number, noun + ("es" if noun.endswith("ch") else "s"))
