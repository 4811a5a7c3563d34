"""Interpolation between the points that `meshwright profile` measured.

Matrix products and attention: log FLOP/s is fitted as a plane over the logs of the sizes, to the points
nearest to the query, weighted by nearness (locally weighted regression, Cleveland 1979). Beyond the measured
sizes the rate is that of the edge. Collectives: log seconds is linear in log bytes between points.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise
from math import exp, log

from meshwright.hardware.cluster import AttentionTime, Collective, Matmul, ProfiledTimes

_NEAREST = 12
"""Points of a fit. Source: assumed."""
_RIDGE = 0.05
"""Ridge penalty, which pulls slopes to 0 that the nearby points do not determine. Source: assumed."""

Points = tuple[tuple[tuple[float, ...], float], ...]
"""(logs of sizes, log of the rate) of each measured point."""


def matmul_seconds(
    measured: ProfiledTimes, format: str, m: int, n: int, k: int, alone: bool = False
) -> float | None:
    """Seconds of (m, k) x (k, n) on one of `measured.ranks` computing ranks, or `alone` on its host.

    None if the format was not measured.
    """
    rates = _rates(measured.matmul_alone if alone else measured.matmul, format)
    return _seconds(rates, Matmul(format, m, n, k, 0.0)) if rates else None


def attention_seconds(
    measured: ProfiledTimes,
    format: str,
    sequences: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    length: int,
) -> tuple[float, float] | None:
    """(forward, backward) seconds of causal attention; None if the format was not measured."""
    forward, backward = (_rates(measured.attention, format, half) for half in (False, True))
    query = AttentionTime(format, sequences, heads, kv_heads, head_dim, length, 0.0, 0.0)
    return (_seconds(forward, query), _seconds(backward, query)) if forward else None


def collective_seconds(
    measured: ProfiledTimes | None, operation: str, ranks: int, level: str, bytes: float
) -> float | None:
    """Seconds of a collective; None if the operation was not measured at that level, or nothing was.

    `bytes` counts the whole tensor, as in `Collective`. For a number of ranks that was not measured, the time
    is that of the nearest measured number, at the size at which each rank sends as many bytes, plus the
    smallest message's time for each additional rank.
    """
    if ranks == 1:
        return 0.0
    if measured is None or not (by_ranks := _by_ranks(measured.collectives, operation, level)):
        return None
    near = min(by_ranks, key=lambda count: (abs(log(count / ranks)), count))
    points = by_ranks[near]
    least = points[0][1]
    if operation in ("send", "shift"):
        return max(least * min(1.0, ranks / near), _on_line(points, bytes))
    sent = ((ranks - 1) / ranks) / ((near - 1) / near)
    more = (ranks - near) * (least / max(1, near - 1))
    return max(least * min(1.0, ranks / near), _on_line(points, bytes * sent) + more)


@lru_cache(maxsize=256)
def _by_ranks(
    points: tuple[Collective, ...], operation: str, level: str
) -> dict[int, tuple[tuple[int, float], ...]]:
    """Number of ranks -> (bytes, seconds) of its points, in ascending order."""
    by_ranks: dict[int, list[tuple[int, float]]] = {}
    for point in points:
        if (point.operation, point.level) == (operation, level):
            by_ranks.setdefault(point.ranks, []).append((point.bytes, point.seconds))
    return {ranks: tuple(sorted(line)) for ranks, line in by_ranks.items()}


def _on_line(points: Sequence[tuple[int, float]], bytes: float) -> float:
    """Seconds of a message; below the smallest point its time, above the largest point its rate."""
    if bytes <= points[0][0]:
        return points[0][1]
    for (low, before), (high, after) in pairwise(points):
        if bytes <= high:
            part = log(bytes / low) / log(high / low)
            return exp((1 - part) * log(before) + part * log(after))
    largest, seconds = points[-1]
    return seconds * bytes / largest


@lru_cache(maxsize=64)
def _rates(
    points: tuple[Matmul, ...] | tuple[AttentionTime, ...], format: str, backward: bool = False
) -> Points:
    """The rates of the points of a format; of attention, of its forward or its backward."""
    rates = []
    for p in points:
        if p.format == format:
            seconds = p.seconds if isinstance(p, Matmul) else p.backward if backward else p.forward
            rates.append((_logs(p), log(p.flops / seconds)))
    return tuple(rates)


def _logs(shape: Matmul | AttentionTime) -> tuple[float, ...]:
    """Logarithms of the sizes that the rate depends on."""
    if isinstance(shape, Matmul):
        return log(shape.m), log(shape.n), log(shape.k)
    batch, group = shape.sequences * shape.heads, shape.heads / shape.kv_heads
    return log(batch), log(group), log(shape.head_dim), log(shape.length)


def _seconds(rates: Points, query: Matmul | AttentionTime) -> float:
    return query.flops / exp(_fitted(rates, _logs(query)))


@lru_cache(maxsize=65536)
def _fitted(points: Points, query: tuple[float, ...]) -> float:
    """The fitted value at `query`, clamped to the bounding box of the points."""
    sides = list(zip(*(sizes for sizes, _ in points), strict=True))
    inside = tuple(min(max(x, min(side)), max(side)) for x, side in zip(query, sides, strict=True))
    near = sorted((_distance(sizes, inside), sizes, value) for sizes, value in points)[:_NEAREST]
    if near[0][0] < 1e-9:
        return near[0][2]
    reach = near[-1][0] or 1.0
    size = len(query) + 2
    # Normal equations, their right-hand side as the last column; the first unknown is the value at `inside`
    normal = [[_RIDGE * (i == j > 0) for j in range(size)] for i in range(size - 1)]
    for distance, sizes, value in near:
        weight = 1 / (distance / reach + 1e-3) ** 2
        row = [1.0, *(a - b for a, b in zip(sizes, inside, strict=True)), value]
        for i in range(size - 1):
            for j in range(size):
                normal[i][j] += weight * row[i] * row[j]
    for pivot in reversed(range(1, size - 1)):  # positive definite: any order of elimination is stable
        for i in range(pivot):
            factor = normal[i][pivot] / normal[pivot][pivot]
            normal[i] = [a - factor * b for a, b in zip(normal[i], normal[pivot], strict=True)]
    values = [value for _, _, value in near]
    spread = max(values) - min(values)
    fitted = normal[0][-1] / normal[0][0]
    return min(max(fitted, min(values) - spread / 4), max(values) + spread / 4)


def _distance(one: tuple[float, ...], other: tuple[float, ...]) -> float:
    return sum((a - b) ** 2 for a, b in zip(one, other, strict=True))
