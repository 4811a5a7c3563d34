"""Times between measured points: exact at the points, near the truth beside them, the edge's rate beyond."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from math import inf, log

import pytest

from meshwright.hardware.cluster import AttentionTime, Collective, Matmul, ProfiledTimes
from meshwright.hardware.measurements import attention_seconds, collective_seconds, matmul_seconds


def machine(m: int, n: int, k: int) -> float:
    """Seconds on a machine with a launch, a memory and units that like whole tiles: no plane in any sense."""
    return 3e-6 + (m * k + n * k + m * n) * 4 / 20e9 + 2 * m * n * k / 200e9 * (1 + 64 / min(m, n, k))


def attends(b: int, h: int, kv: int, d: int, t: int) -> tuple[float, float]:
    work = 2 * b * h * t * t * d / (100e9 * d / (d + 32))
    memory = b * t * d * (2 * h + 2 * kv) * 4 / 20e9
    return 2e-5 + memory + work, 5e-5 + 2 * memory + 2.5 * work


SIDES = (64, 256, 1024, 4096)
SHAPES = [(b, h, kv, d, t) for b, t in ((1, 128), (8, 128), (1, 512), (4, 512), (1, 1024), (1, 2048))
          for h, kv, d in ((4, 4, 32), (8, 8, 64), (8, 2, 64), (8, 8, 128))]  # fmt: skip
MEASURED = ProfiledTimes(
    matmul=tuple(Matmul("fp32", *each, machine(*each)) for each in product(SIDES, repeat=3)),
    attention=tuple(AttentionTime("fp32", *each, *attends(*each)) for each in SHAPES),
    collectives=tuple(
        Collective(
            "all_reduce", ranks, "host", size, 20e-6 * (ranks - 1) + 2 * size * (ranks - 1) / ranks / 2e9
        )
        for ranks in (2, 4)
        for size in (2**10, 2**14, 2**18, 2**22, 2**24)
    ),
)


def test_products_are_exact_where_they_were_measured() -> None:
    for point in MEASURED.matmul:
        found = matmul_seconds(MEASURED, "fp32", point.m, point.n, point.k)
        assert found == pytest.approx(point.seconds, rel=1e-6)


def test_products_between_points_are_near_the_truth() -> None:
    sides = (96, 384, 768, 3000)
    errors = []
    for m, n, k in product(sides, repeat=3):
        found = matmul_seconds(MEASURED, "fp32", m, n, k)
        assert found is not None
        errors.append(abs(log(found / machine(m, n, k))))
    assert max(errors) < 0.25
    assert sorted(errors)[len(errors) // 2] < 0.08


def test_products_that_were_held_out_are_near_the_truth() -> None:
    """Each point by the others: their distance is a factor of 4 in one size."""
    errors = []
    for place, point in enumerate(MEASURED.matmul):
        rest = replace(MEASURED, matmul=MEASURED.matmul[:place] + MEASURED.matmul[place + 1 :])
        found = matmul_seconds(rest, "fp32", point.m, point.n, point.k)
        assert found is not None
        errors.append(abs(log(found / point.seconds)))
    assert sorted(errors)[len(errors) // 2] < 0.1


def test_beyond_what_was_measured_the_rate_is_that_at_the_edge() -> None:
    edge, far = (matmul_seconds(MEASURED, "fp32", m, 4096, 4096) for m in (4096, 65536))
    assert edge is not None and far == pytest.approx(16 * edge, rel=1e-6)
    assert matmul_seconds(MEASURED, "bf16", 64, 64, 64) is None
    assert matmul_seconds(MEASURED, "fp32", 64, 64, 64, alone=True) is None


def test_attention_between_points_is_near_the_truth() -> None:
    errors = []
    for shape in ((2, 8, 8, 64, 512), (1, 8, 4, 64, 768), (2, 4, 4, 64, 256), (1, 8, 8, 96, 1500)):
        found = attention_seconds(MEASURED, "fp32", *shape)
        assert found is not None
        errors += [abs(log(a / b)) for a, b in zip(found, attends(*shape), strict=True)]
    assert max(errors) < 0.2
    for point in MEASURED.attention:
        assert attention_seconds(MEASURED, "fp32", *point[1:6]) == pytest.approx(point[6:])
    assert attention_seconds(MEASURED, "bf16", 1, 8, 8, 64, 512) is None


def test_collectives_follow_their_points() -> None:
    last = 0.0
    for power in range(6, 30):
        found = collective_seconds(MEASURED, "all_reduce", 2, "host", 2**power)
        assert found is not None and found >= last
        true = 20e-6 + 2 * 2**power / 2 / 2e9
        assert abs(log(found / true)) < (0.35 if power > 10 else inf)
        last = found
    assert collective_seconds(MEASURED, "all_reduce", 1, "host", 2**20) == 0
    assert collective_seconds(MEASURED, "all_reduce", 2, "network", 2**20) is None
    assert collective_seconds(MEASURED, "all_gather", 2, "host", 2**20) is None


@pytest.mark.parametrize("ranks", [3, 8, 16])
def test_collectives_of_ranks_that_were_not_measured(ranks: int) -> None:
    for size in (2**10, 2**18, 2**24):
        found = collective_seconds(MEASURED, "all_reduce", ranks, "host", size)
        true = 20e-6 * (ranks - 1) + 2 * size * (ranks - 1) / ranks / 2e9
        assert found is not None and abs(log(found / true)) < 0.35
