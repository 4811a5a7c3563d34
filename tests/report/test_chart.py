"""Charts keep what matters of a curve: extremes, gaps, order, and round numbers on their axes."""

from __future__ import annotations

import json
import math
import random
import re
from itertools import pairwise

import pytest

from meshwright.report.chart import (
    BUCKETS,
    HEIGHT,
    WIDTH,
    Chart,
    Scale,
    Series,
    decimate,
    fit,
    moving_mean,
    path,
    tick_labels,
    ticks,
)


def curve(length: int, seed: int = 0) -> list[float | None]:
    draw = random.Random(seed)
    return [draw.gauss(0, 1) for _ in range(length)]


@pytest.mark.parametrize("length", [1201, 5_000, 99_999])
def test_thinning_keeps_extremes_ends_and_order(length: int) -> None:
    values = curve(length)
    up, down = length // 3, length // 2
    values[up], values[down] = 100.0, -100.0
    keep = decimate(values, BUCKETS)
    assert {0, up, down, length - 1} <= set(keep)
    assert keep == sorted(set(keep)) and len(keep) <= 2 * BUCKETS + 2


def test_thinning_keeps_the_extremes_of_every_stretch() -> None:
    """Within any stretch of two buckets, what is kept spans what was there."""
    values = curve(20_000)
    keep = set(decimate(values, 100))
    for first in range(0, 20_000, 200):
        stretch = range(first, first + 200)
        kept = [values[i] for i in stretch if i in keep]
        assert max(kept) == max(values[i] for i in stretch)
        assert min(kept) == min(values[i] for i in stretch)


def test_short_curves_stay_whole() -> None:
    assert decimate(curve(2 * BUCKETS), BUCKETS) == list(range(2 * BUCKETS))
    assert decimate([], BUCKETS) == []


def test_thinning_keeps_a_long_gap() -> None:
    values = curve(10_000)
    values[4_000:6_000] = [None] * 2_000
    kept = [values[i] for i in decimate(values, 100)]
    assert None in kept and sum(value is not None for value in kept) >= 150


def test_the_moving_mean_is_the_mean_around_each_place() -> None:
    values = curve(200)
    values[50:70] = [None] * 20
    for window in (1, 5, 9):
        means, half = moving_mean(values, window), window // 2
        for i, mean in enumerate(means):
            around = [v for v in values[max(0, i - half) : i + half + 1] if v is not None]
            assert mean == (pytest.approx(sum(around) / len(around)) if around else None)


@pytest.mark.parametrize("low", [0.0, -3.7, 1e-5, 5.1230, 9_990.0])
@pytest.mark.parametrize("span", [1e-4, 0.3, 7.0, 123_456.0])
def test_ticks_are_inside_even_round_and_told_apart(low: float, span: float) -> None:
    marks = ticks(low, low + span, 5)
    assert 2 <= len(marks) <= 6
    assert all(low - 1e-9 * span <= mark <= low + span * (1 + 1e-9) for mark in marks)
    step = marks[1] - marks[0]
    mantissa = step / 10 ** math.floor(math.log10(step) + 1e-6)
    assert min(abs(mantissa - m) for m in (1, 2, 2.5, 5)) < 1e-3
    assert all(b - a == pytest.approx(step, rel=1e-3) for a, b in pairwise(marks))


@pytest.mark.parametrize(
    ("values", "labels"),
    [
        ([0, 5_000, 10_000, 12_500], ["0", "5.0k", "10.0k", "12.5k"]),
        ([0, 20_000, 100_000], ["0", "20k", "100k"]),
        ([0, 1e-4, 2.5e-4], ["0", "1e-4", "2.5e-4"]),
        ([5.12, 5.13, 5.14], ["5.12", "5.13", "5.14"]),
        ([-1.0, 0.0, 1.0], ["-1", "0", "1"]),
    ],
)
def test_tick_labels(values: list[float], labels: list[str]) -> None:
    assert tick_labels(values) == labels


@pytest.mark.parametrize("log", [False, True])
@pytest.mark.parametrize("values", [[3.0], [0.2, 40.0], [1e-6, 1e6], [5.1, 5.2]])
def test_a_scale_holds_its_values_and_has_ticks(values: list[float], log: bool) -> None:
    scale = fit(values, log, from_zero=False)
    assert all(0 < scale.at(value) < 1 for value in values)
    marks = scale.ticks(5)
    assert 1 <= len(marks) <= 8 and marks == sorted(marks)
    assert all(-1e-9 <= scale.at(mark) <= 1 + 1e-9 for mark in marks)
    assert len(set(scale.labels(marks))) == len(marks)


def test_a_path_goes_through_its_points_and_lifts_the_pen_at_gaps() -> None:
    drawn = path([0, 1, 2, 3, 4], [0.0, 10.0, None, 5.0, 5.0], Scale(0, 4), Scale(0, 10))
    assert drawn == f"M0.0 {HEIGHT:.1f}h0L250.0 0.0M750.0 150.0h0L{WIDTH:.1f} 150.0"


def test_steps_that_were_not_finite_are_marked_and_counted() -> None:
    chart = Chart("loss", "Loss", [Series("training", [1, 2, 3, 4], [5.0, None, None, 4.0])], mark_gaps=True)
    html = chart.html()
    assert "not finite: 2 steps" in html
    marks = re.search(r'class="bad" d="([^"]*)"', html)
    assert marks and marks[1].count("M") == 2


def test_a_curve_without_one_finite_value_says_so() -> None:
    html = Chart("loss", "Loss", [Series("training", [1, 2], [None, None])], mark_gaps=True).html()
    assert "No finite value was recorded" in html and "not finite: 2 steps" in html
    assert "Nothing was recorded" in Chart("lr", "LR", [Series("lr", [], [])]).html()


def test_a_logarithmic_view_is_offered_for_positive_values_only() -> None:
    def offered(values: list[float | None]) -> bool:
        series = Series("x", list(range(len(values))), values)
        return "pick-log" in Chart("x", "X", [series], log=True).html()

    assert offered([1.0, 2.0]) and not offered([0.0, 2.0]) and not offered([-1.0, 2.0]) and not offered([2.0])


def test_the_hover_data_cannot_end_its_element() -> None:
    evil = "</script><script>alert(1)</script>"
    html = Chart("x", evil, [Series(evil, [1, 2], [1.0, 2.0]), Series("b", [1], [1.0])]).html()
    assert html.count("<script") == html.count("</script") == 1
    inside = re.search(r"<script[^>]*>(.*)</script>", html)
    assert inside and json.loads(inside[1])["series"][0]["name"] == evil
