"""Number formats and their sizes, and figures as text: seconds, gigabytes, percent, large counts."""

from __future__ import annotations

import re
from math import inf

DTYPE_BYTES: dict[str, int] = {"fp64": 8, "fp32": 4, "bf16": 2, "fp16": 2}
"""Bytes of an element, by the formats that tensors of a run are stored in."""

FORMAT_BYTES: dict[str, float] = {**DTYPE_BYTES, "tf32": 4, "fp8": 1, "fp4": 0.5}
"""Bytes of an element, by the formats that matrix products compute in."""

FORMATS = ("fp64", "fp32", "tf32", "bf16", "fp16", "fp8", "fp4")
"""Number formats that a device may have a peak for, widest first."""

_SECONDS = {"": 1.0, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_POWERS = {"": 0, "k": 1, "m": 2, "g": 3, "b": 3, "t": 4}


def seconds(value: float) -> str:
    """A time with a suitable unit: 1.25 s, 18.5 ms, 601 us."""
    for scale, unit in ((1.0, "s"), (1e-3, "ms"), (1e-6, "us")):
        if abs(value) >= scale:
            return f"{value / scale:.4g} {unit}"
    return "0 s" if abs(value) < 1e-9 else f"{value / 1e-9:.3g} ns"


def duration(text: str) -> float:
    """The seconds, above 0, that a text such as 30s, 1.5m, 500ms or 3h states; a plain number is seconds.

    Raises `ValueError`.
    """
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)\s*(ms|s|m|h|d|)", text.strip().lower())
    value = float(match[1]) * _SECONDS[match[2]] if match else 0.0
    if not 0 < value < inf:
        raise ValueError("a time above 0 is needed, such as 500ms, 30s, 5m or 3h")
    return value


def gigabytes(size: float) -> str:
    """Bytes in powers of ten, as device memories are specified: 12.3 GB, 850 MB, 3 KB."""
    for scale, unit in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "KB")):
        if abs(size) >= scale:
            amount = size / scale
            return f"{amount:,.0f} {unit}" if abs(amount) >= 1000 else f"{amount:.3g} {unit}"
    return f"{size:.0f} B"


def short(count: float) -> str:
    """A count with four significant digits, and a suffix from 10,000 up: 12.35k, 8.03B."""
    for power, suffix in ((12, "T"), (9, "B"), (6, "M"), (3, "k")):
        if abs(count) >= (10_000 if power == 3 else 10**power):
            return f"{count / 10**power:.4g}{suffix}"
    return f"{count:,.4g}" if abs(count) < 1000 else f"{count:,.0f}"


def counted(number: int, plural: str) -> str:
    """A number with what it counts, given by a plural as its first word: 1 chat without an end, 2 chats.

    Words that are no plural of a noun, such as "empty", stay as they are.
    """
    words = plural if number != 1 else re.sub(r"(?<=ch)es\b|(?<=\w)s\b", "", plural, count=1)
    return f"{number:,} {words}"


def percent(share: float) -> str:
    """A share as a percentage with one decimal: 0.0312 is 3.1%."""
    return f"{100 * share:.1f}%"


def amount(text: str, unit: int = 1000) -> float:
    """The number, at least 1, that a text such as 16M or 1.5e13 states; k, M, B (G) and T are powers of
    `unit`.

    Raises `ValueError`.
    """
    match = re.fullmatch(r"([0-9][0-9_,]*(?:\.[0-9]+)?(?:e[+-]?[0-9]+)?)([kmgbt]?)", text.strip().lower())
    value = float(re.sub("[_,]", "", match[1])) * unit ** _POWERS[match[2]] if match else 0.0
    if not 1 <= value < inf:
        raise ValueError("a number of at least 1 is needed, which may end in k, M, B or T, such as 16M")
    return value
