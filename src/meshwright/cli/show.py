"""What a verb prints: one JSON object for programs, aligned lines for people."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

WIDTH = 100
"""Columns that tables are kept within, where their last cells are words."""


def as_json(result: Mapping[str, Any]) -> None:
    """One JSON object on one line of stdout."""
    print(json.dumps(result), flush=True)


def pairs(result: Mapping[str, Any]) -> None:
    """One line for each plain value, names and values aligned."""
    plain = {name: value for name, value in result.items() if not isinstance(value, (list, dict))}
    width = max((len(name) for name in plain), default=0)
    for name, value in plain.items():
        print(f"{name.replace('_', ' '):<{width}}  {text(value)}")


def table(rows: Sequence[Mapping[str, Any]]) -> None:
    """Rows with the same keys, under a line of their names, without nested values; numbers stand right."""
    if not rows:
        return
    names = [name for name, value in rows[0].items() if not isinstance(value, (list, dict))]
    cells = [[text(row.get(name)) for name in names] for row in rows]
    widths = [max(len(name), *(len(row[place]) for row in cells)) for place, name in enumerate(names)]
    numbers = [all(isinstance(row.get(name), (int, float)) for row in rows) for name in names]
    for row in [[name.replace("_", " ") for name in names], *cells]:
        shown = [
            cell.rjust(width) if right else cell.ljust(width)
            for cell, width, right in zip(row, widths, numbers, strict=True)
        ]
        print(_within("  ".join(shown).rstrip(), sum(widths[:-1]) + 2 * len(widths[:-1])))


def _within(line: str, indent: int) -> str:
    """The line in as many as it takes, of at most `WIDTH` columns, where its last cell can be wrapped."""
    if len(line) <= WIDTH or indent > WIDTH // 2:
        return line
    last = textwrap.wrap(line[indent:], WIDTH - indent, break_long_words=False)
    return line[:indent] + ("\n" + " " * indent).join(last)


def text(value: Any) -> str:
    """A value as people read it: 1,234,567; 3.142; yes; -."""
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def count(number: int, noun: str) -> str:
    """A number of things: 1 step, 1,234 microbatches."""
    plural = noun + ("es" if noun.endswith("ch") else "s")
    return f"{number:,} {noun if number == 1 else plural}"
