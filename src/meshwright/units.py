"""Figures as sentences have them: seconds, gigabytes, percent, large counts."""

from __future__ import annotations


def seconds(value: float) -> str:
    """A time with the unit that suits it: 1.25 s, 18.5 ms, 601 us."""
    for scale, unit in ((1.0, "s"), (1e-3, "ms"), (1e-6, "us")):
        if abs(value) >= scale:
            return f"{value / scale:.4g} {unit}"
    return "0 s" if abs(value) < 1e-9 else f"{value / 1e-9:.3g} ns"


def gigabytes(size: float) -> str:
    """Bytes as memories of devices are given, in powers of ten: 12.3 GB, 850 MB, 3 KB."""
    for scale, unit in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "KB")):
        if abs(size) >= scale:
            amount = size / scale
            return f"{amount:,.0f} {unit}" if abs(amount) >= 1000 else f"{amount:.3g} {unit}"
    return f"{size:.0f} B"


def short(count: float) -> str:
    """12,345 as 12.35k, 8,030,261,248 as 8.03B: four significant digits, with a suffix from 10,000 up."""
    for power, suffix in ((12, "T"), (9, "B"), (6, "M"), (3, "k")):
        if abs(count) >= (10_000 if power == 3 else 10**power):
            return f"{count / 10**power:.4g}{suffix}"
    return f"{count:,.4g}" if abs(count) < 1000 else f"{count:,.0f}"


def percent(share: float) -> str:
    """0.0312 as 3.1%."""
    return f"{100 * share:.1f}%"
