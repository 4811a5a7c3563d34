"""Closed forms of the idle time of schedules, as in the table of docs/schedules.md."""

from __future__ import annotations

from math import isclose


def idle(
    name: str, ranks: int, virtual: int, microbatches: int, forward: float, input: float, weight: float
) -> float | None:
    """Return the idle seconds of each rank in a step that all ranks begin and end together, if known.

    This is for p equal ranks, links that cost nothing, and the seconds F, I and W of one microbatch in all
    stages of a rank. Sources: Huang et al. 2019 (gpipe), Narayanan et al. 2021 (1f1b, interleaved),
    Lamy-Poirier 2023 (bfs), Qi et al. 2023 (zb-h1, zb-h2, zb-v); the forms for v-half, v-min and dualpipe-v
    describe the lists generated here. None if a form does not hold: for too few microbatches, for W above F
    or I in zb-h1 and zb-h2, and for unequal F, I and W in a V.
    """
    p, m, whole = ranks, microbatches, forward + input + weight
    if p == 1:
        return 0.0
    if name in ("gpipe", "1f1b"):
        return (p - 1) * whole
    if name in ("interleaved", "bfs"):
        holds = m % p == 0 or (name == "bfs" and m >= p)
        return (p - 1) * whole / virtual if holds else None
    if name in ("zb-h1", "zb-h2"):
        if weight > min(forward, input) or m < (p if name == "zb-h1" else 2 * p - 1):
            return None
        whole = forward + input - weight  # zb-h2: or its slant, as rank r begins r forwards after rank 0
        return (p - 1) * (whole if name == "zb-h1" else max(forward, whole - weight))
    equal = isclose(forward, input) and isclose(forward, weight)
    return forward / 2 * _chunks(name, p) if equal and m >= 2 * p else None


def _chunks(name: str, p: int) -> int:
    """Return the idle time in a V, in units of F of one chunk."""
    if name == "v-half":
        return 3 * p - 5 + p % 2
    if name == "v-min":
        return 4 * p - (4 if p % 3 == 1 else 7)
    return p - 1
