"""Times between the points that `profile` measured: the rate is fitted near what is asked for.

Products and attention: log FLOP/s is fitted as a plane over the logs of the sizes, through the points nearest
to the query, nearer ones counting more (locally weighted regression, Cleveland 1979). Beyond the measured
sizes the rate is that at the edge. Collectives: log seconds over log bytes, point to point.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise
from math import exp, log

from meshwright.hardware.cluster import Attention, Collective, Matmul, Measured

_NEAREST = 12
_RIDGE = 0.05
"""Pulls slopes to 0 where the points near do not tell them."""

Known = tuple[tuple[tuple[float, ...], float], ...]
"""(logs of sizes, log of the rate) of each measured point."""


def matmul_seconds(
    measured: Measured, format: str, m: int, n: int, k: int, alone: bool = False
) -> float | None:
    """Seconds of (m, k) times (k, n) on one of `measured.ranks` ranks at work, or `alone` on its host.

    None where the format was not measured.
    """
    known = _products(measured.matmul_alone if alone else measured.matmul, format)
    if not known:
        return None
    return 2 * m * n * k / exp(_fitted(known, (log(m), log(n), log(k))))


def attention_seconds(
    measured: Measured,
    format: str,
    sequences: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    length: int,
) -> tuple[float, float] | None:
    """(forward, backward) seconds of causal attention; None where the format was not measured."""
    forward = _attentions(measured.attention, format, False)
    if not forward:
        return None
    backward = _attentions(measured.attention, format, True)
    at = _attention_logs(sequences, heads, kv_heads, head_dim, length)
    work = _attention_work(sequences, heads, head_dim, length)
    return work / exp(_fitted(forward, at)), work / exp(_fitted(backward, at))


def collective_seconds(
    measured: Measured, operation: str, ranks: int, level: str, bytes: float
) -> float | None:
    """Seconds of a collective; None where the operation was not measured at that level.

    `bytes` are those of the whole tensor, as in `Collective`. For a number of ranks that was not measured,
    the nearest one's time is taken at the size for which each rank sends as many bytes, and one least
    message is added for each rank more.
    """
    if ranks == 1:
        return 0.0
    of_ranks = _by_ranks(measured.collectives, operation, level)
    if not of_ranks:
        return None
    near = min(of_ranks, key=lambda each: (abs(log(each / ranks)), each))
    points = of_ranks[near]
    sent = _sent(operation, ranks) / _sent(operation, near)
    steps = 0 if operation in ("send", "shift") else ranks - near
    each_step = points[0][1] / max(1, near - 1)
    return max(points[0][1] * min(1.0, ranks / near), _on_line(points, bytes * sent) + steps * each_step)


def _sent(operation: str, ranks: int) -> float:
    """Bytes that one rank sends, of the whole tensor's."""
    return 1.0 if operation in ("send", "shift") else (ranks - 1) / ranks


@lru_cache(maxsize=256)
def _by_ranks(
    points: tuple[Collective, ...], operation: str, level: str
) -> dict[int, tuple[tuple[int, float], ...]]:
    """Number of ranks -> (bytes, seconds), ascending."""
    found: dict[int, list[tuple[int, float]]] = {}
    for point in points:
        if (point.operation, point.level) == (operation, level):
            found.setdefault(point.ranks, []).append((point.bytes, point.seconds))
    return {ranks: tuple(sorted(each)) for ranks, each in found.items()}


def _on_line(points: Sequence[tuple[int, float]], bytes: float) -> float:
    """Below the least size its time, above the largest its rate."""
    if bytes <= points[0][0]:
        return points[0][1]
    for (low, before), (high, after) in pairwise(points):
        if bytes <= high:
            part = log(bytes / low) / log(high / low)
            return exp((1 - part) * log(before) + part * log(after))
    largest, seconds = points[-1]
    return seconds * bytes / largest


@lru_cache(maxsize=64)
def _products(points: tuple[Matmul, ...], format: str) -> Known:
    return tuple(
        ((log(p.m), log(p.n), log(p.k)), log(2 * p.m * p.n * p.k / p.seconds))
        for p in points
        if p.format == format
    )


@lru_cache(maxsize=64)
def _attentions(points: tuple[Attention, ...], format: str, backward: bool) -> Known:
    found = []
    for p in points:
        if p.format == format:
            work = _attention_work(p.sequences, p.heads, p.head_dim, p.length)
            rate = work / (p.backward if backward else p.forward)
            at = _attention_logs(p.sequences, p.heads, p.kv_heads, p.head_dim, p.length)
            found.append((at, log(rate)))
    return tuple(found)


def _attention_logs(
    sequences: int, heads: int, kv_heads: int, head_dim: int, length: int
) -> tuple[float, ...]:
    return log(sequences * heads), log(heads / kv_heads), log(head_dim), log(length)


def _attention_work(sequences: int, heads: int, head_dim: int, length: int) -> int:
    """FLOPs of two products over the causal half; the backward's are in proportion."""
    return 2 * sequences * heads * length**2 * head_dim


@lru_cache(maxsize=65536)
def _fitted(known: Known, at: tuple[float, ...]) -> float:
    """The fitted value at `at`, moved into the box of what is known."""
    sides = list(zip(*(where for where, _ in known), strict=True))
    inside = tuple(min(max(x, min(side)), max(side)) for x, side in zip(at, sides, strict=True))
    near = sorted((_distance(where, inside), where, value) for where, value in known)[:_NEAREST]
    if near[0][0] < 1e-9:
        return near[0][2]
    reach = near[-1][0] or 1.0
    size = len(at) + 1
    matrix = [[_RIDGE * (i == j > 0) for j in range(size)] for i in range(size)]
    right = [0.0] * size
    for distance, where, value in near:
        weight = 1 / (distance / reach + 1e-3) ** 2
        row = [1.0, *(a - b for a, b in zip(where, inside, strict=True))]
        for i in range(size):
            right[i] += weight * row[i] * value
            for j in range(size):
                matrix[i][j] += weight * row[i] * row[j]
    values = [value for _, _, value in near]
    spread = max(values) - min(values)
    return min(max(_solve(matrix, right)[0], min(values) - spread / 4), max(values) + spread / 4)


def _distance(one: tuple[float, ...], other: tuple[float, ...]) -> float:
    return sum((a - b) ** 2 for a, b in zip(one, other, strict=True))


def _solve(matrix: list[list[float]], right: list[float]) -> list[float]:
    """Gauss's elimination of a small positive system; both arguments are used up."""
    size = len(right)
    for i in range(size):
        pivot = max(range(i, size), key=lambda row: abs(matrix[row][i]))
        matrix[i], matrix[pivot] = matrix[pivot], matrix[i]
        right[i], right[pivot] = right[pivot], right[i]
        for row in range(i + 1, size):
            factor = matrix[row][i] / matrix[i][i]
            right[row] -= factor * right[i]
            for column in range(i, size):
                matrix[row][column] -= factor * matrix[i][column]
    for i in reversed(range(size)):
        right[i] = (right[i] - sum(matrix[i][j] * right[j] for j in range(i + 1, size))) / matrix[i][i]
    return right
