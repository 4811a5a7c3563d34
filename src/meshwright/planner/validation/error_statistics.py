"""Absolute errors of predictions, and their mean."""

from __future__ import annotations

from collections.abc import Iterable
from statistics import fmean, median


def errors(relative: Iterable[float | None]) -> dict[str, float | int | None]:
    """Mean, median and 90th percentile of absolute errors, and the mean error, in percent; no None counts."""
    signed = [error for error in relative if error is not None]
    sizes = sorted(map(abs, signed))
    return {
        "mean_abs_pct": fmean(sizes) if sizes else None,
        "bias_pct": fmean(signed) if signed else None,
        "median_abs_pct": median(sizes) if sizes else None,
        "p90_abs_pct": sizes[int(0.9 * len(sizes))] if sizes else None,
        "rows": len(sizes),
    }
