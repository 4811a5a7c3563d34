"""Values as text for people; absent and non-finite ones are a dash."""

from __future__ import annotations

import math
from typing import Any, TypeGuard

from meshwright import units as words

ABSENT = "-"


def is_number(value: Any) -> TypeGuard[int | float]:
    """Return True for a finite int or float, False for a boolean."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def fixed(value: Any, digits: int = 4) -> str:
    """Return a number with fixed decimals: 5.1234."""
    return f"{value:.{digits}f}" if is_number(value) else ABSENT


def count(value: Any) -> str:
    """Return a whole number with separators: 12,345."""
    return f"{value:,.0f}" if is_number(value) else ABSENT


def percent(value: Any, digits: int = 1) -> str:
    """Return a share in percent: 34.1% for 0.341."""
    return f"{100 * value:.{digits}f}%" if is_number(value) else ABSENT


def size(value: Any) -> str:
    """Return bytes in powers of 1,024: 1.2 GiB."""
    if not is_number(value):
        return ABSENT
    amount, units = float(value), ["B", "KiB", "MiB", "GiB", "TiB", "PiB"]
    while abs(amount) >= 1024 and len(units) > 1:
        amount, units = amount / 1024, units[1:]
    return f"{amount:.0f} {units[0]}" if units[0] == "B" else f"{amount:.1f} {units[0]}"


def short(value: Any) -> str:
    """Return a number with a suffix: 12.35k for 12,345, 8.03B for 8,030,261,248."""
    return words.short(value) if is_number(value) else ABSENT


def duration(seconds: Any) -> str:
    """Return seconds as 0:42, 1:02:03 or 2 d 3:04:05."""
    if not is_number(seconds):
        return ABSENT
    whole = max(0, round(seconds))
    days, rest = divmod(whole, 86400)
    hours, rest = divmod(rest, 3600)
    minutes, left = divmod(rest, 60)
    if days:
        return f"{days} d {hours}:{minutes:02}:{left:02}"
    return f"{hours}:{minutes:02}:{left:02}" if hours else f"{minutes}:{left:02}"


def value_text(value: Any) -> str:
    """Return any JSON value in one line: floats to six digits, lists and dicts part by part."""
    if value is None:
        return ABSENT
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.6g}" if math.isfinite(value) else ABSENT
    if isinstance(value, dict):
        return ", ".join(f"{key} = {value_text(part)}" for key, part in value.items()) or "none"
    if isinstance(value, list | tuple):
        return ", ".join(value_text(part) for part in value) or "none"
    return str(value)


def fields_text(fields: dict[str, Any], between: str = "  ") -> str:
    """Return the fields of an event in one line: `step 20  seconds 0.41`."""
    return between.join(f"{key} {value_text(value)}" for key, value in fields.items())
