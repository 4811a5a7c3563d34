"""Line charts and scatter plots as inline SVG that stretches to any width; labels are HTML.

Long curves are thinned to the smallest and largest value of about each pixel, so that a spike of one step in
a hundred thousand stays visible.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import accumulate
from typing import Any

from markupsafe import Markup

from meshwright.report.format import is_number
from meshwright.report.page import render

# Coordinates of the SVG; the browser stretches them to the available width.
WIDTH, HEIGHT = 1000, 300
# Two points in each bucket: about one per pixel on a wide screen.
BUCKETS = 600
# More dots than this would touch each other.
MOST_DOTS = 80

Values = Sequence[float | None]


@dataclass(frozen=True)
class Series:
    """One curve: x ascending, y None where it is unknown or not finite.

    `css` is line, faint or dots, `stroke` is empty or dash, dotted or dashdot; `run` is which of the page's
    runs the curve is of, by which its steps have tokens and a time (`curves.axes`).
    """

    name: str
    x: Sequence[float]
    y: Values
    colour: int = 0
    css: str = "line"
    lost: Collection[float] = ()
    """Those of `x` whose y was measured and is lost: the curve has a gap there."""
    run: int = 0
    stroke: str = ""

    def thinned(self) -> Series:
        """Return the curve thinned to at most `2 * BUCKETS + 2` points beside those of gaps."""
        keep = decimate(self.y, BUCKETS)
        if self.lost:
            keep = sorted({*keep, *(i for i, x in enumerate(self.x) if x in self.lost)})
        return replace(self, x=[self.x[i] for i in keep], y=[self.y[i] for i in keep])


def decimate(values: Values, buckets: int) -> list[int]:
    """Return ascending indices that keep a curve's shape: each bucket's extremes, the first and the last.

    A bucket without finite values gives one index, which keeps the gap. Short curves stay whole.
    """
    length = len(values)
    if length <= 2 * buckets:
        return list(range(length))
    keep = {0, length - 1}
    for bucket in range(buckets):
        first, last = bucket * length // buckets, (bucket + 1) * length // buckets
        finite = [(value, i) for i in range(first, last) if (value := values[i]) is not None]
        keep.update({min(finite)[1], max(finite)[1]} if finite else {first})
    return sorted(keep)


def moving_mean(values: Values, window: int) -> list[float | None]:
    """Return the mean of the finite values in the `window` around each value; None if there are none."""
    half = window // 2
    sums = [0.0, *accumulate(value or 0.0 for value in values)]
    counts = [0, *accumulate(int(value is not None) for value in values)]
    means: list[float | None] = []
    for i in range(len(values)):
        first, last = max(0, i - half), min(len(values), i + half + 1)
        seen = counts[last] - counts[first]
        means.append((sums[last] - sums[first]) / seen if seen else None)
    return means


def ticks(low: float, high: float, most: int) -> list[float]:
    """Return about `most` round numbers (1, 2, 2.5 or 5 times a power of ten) within [low, high]."""
    if not high > low:
        return [low]
    rough = (high - low) / max(1, most)
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * m for m in (1, 2, 2.5, 5, 10) if power * m >= rough * (1 - 1e-9))
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [i * step for i in range(first, last + 1)]


def tick_labels(values: Sequence[float]) -> list[str]:
    """Return labels with the fewest decimals that distinguish them, such as 20k or 3e-4."""
    largest = max((abs(value) for value in values), default=0.0)
    if largest == 0:
        return ["0" for _ in values]
    if largest < 0.01:
        pairs = [f"{value:.2e}".split("e") for value in values]
        return [f"{float(digits):g}e{int(power)}" if float(digits) else "0" for digits, power in pairs]
    power, suffix = next(
        ((p, s) for p, s in ((1e9, "G"), (1e6, "M"), (1e3, "k")) if largest >= 10 * p), (1, "")
    )
    scaled = [value / power for value in values]
    for digits in range(7):
        labels = [f"{value:,.{digits}f}" for value in scaled]
        exact = all(abs(round(v, digits) - v) <= 1e-9 * max(1.0, abs(v)) for v in scaled)
        if exact and len(set(labels)) == len(labels):
            break
    return [label + suffix if float(label.replace(",", "")) else "0" for label in labels]


@dataclass(frozen=True)
class Scale:
    """A linear or logarithmic axis from `low` to `high`."""

    low: float
    high: float
    log: bool = False

    def at(self, value: float) -> float:
        """Return the position of a value, from 0 to 1."""
        if self.log:
            return math.log(value / self.low) / math.log(self.high / self.low)
        return (value - self.low) / (self.high - self.low)

    def ticks(self, most: int) -> list[float]:
        """Return round numbers; on a logarithmic axis 1, 2, 5 of each decade, decades, or even steps."""
        if not self.log:
            return ticks(self.low, self.high, most)
        decades = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
        every = max(1, math.ceil(len(decades) / most))
        for digits in ((1, 2, 5), (1, 3), (1,)):
            marks = [digit * 10.0**d for d in decades if d % every == 0 for digit in digits]
            inside = [mark for mark in marks if self.low <= mark <= self.high]
            if 3 <= len(inside) <= most + 2:
                return inside
        return ticks(self.low, self.high, most)

    def labels(self, marks: Sequence[float]) -> list[str]:
        """Return the labels of ticks, with equal decimals on a linear axis."""
        return [tick_labels([mark])[0] for mark in marks] if self.log else tick_labels(marks)

    def labelled(self, marks: Sequence[float], upward: bool = False) -> list[tuple[str, str]]:
        """(percent of the width, label) of each tick; `upward` the percent counts from the top."""
        places = [1 - self.at(mark) if upward else self.at(mark) for mark in marks]
        return [(f"{100 * p:.2f}", label) for p, label in zip(places, self.labels(marks), strict=True)]


def fit(values: Sequence[float], log: bool, from_zero: bool) -> Scale:
    """Return a scale with a margin around the values; a single value is centred."""
    low, high = min(values), max(values)
    if log:
        air = max(1.05, (high / low) ** 0.05)
        return Scale(low / air, high * air, True)
    if from_zero:
        return Scale(min(0.0, low), high * 1.08 if high > 0 else 1.0)
    air = 0.06 * (high - low) or 0.1 * abs(high) or 1.0
    return Scale(low - air, high + air)


@dataclass(frozen=True)
class Chart:
    """A titled plot of curves over the optimiser step.

    `log` offers a logarithmic scale, too. `mark_gaps` says that a None in the first curve
    means a value that was not finite, and marks those steps.
    """

    key: str
    title: str
    series: Sequence[Series]
    log: bool = False
    from_zero: bool = False
    mark_gaps: bool = False
    wide: bool = False

    def html(self) -> Markup:
        """Return the chart as a `<figure>`, with the data of its read-out under the pointer."""
        curves = [series.thinned() for series in self.series]
        values = [value for curve in curves for value in curve.y if value is not None]
        first = self.series[0]
        unknown = [x for x, y in zip(first.x, first.y, strict=True) if y is None and x not in first.lost]
        gaps = unknown if self.mark_gaps else []
        if not values:
            return render("chart.html", chart=self, gaps=len(gaps), views=[])
        x = _steps_scale([step for series in self.series for step in series.x])
        scales = {"linear": fit(values, False, self.from_zero)}
        if self.log and min(values) > 0 and max(values) > min(values):
            scales["log"] = fit(values, True, False)
        return render(
            "chart.html",
            chart=self,
            gaps=len(gaps),
            views=[self._view(name, x, y, curves, gaps) for name, y in scales.items()],
            # A spike would flatten a linear plot, so such a curve opens on the logarithmic one.
            opened="log" if "log" in scales and max(values) > 10 * statistics.median(values) else "linear",
            steps=x.labelled([mark for mark in x.ticks(6 if self.wide else 4) if mark == int(mark)]),
            data=_data(x, scales, curves),
            width=WIDTH,
            height=HEIGHT,
        )

    def _view(
        self, name: str, x: Scale, y: Scale, curves: Sequence[Series], gaps: Sequence[float]
    ) -> dict[str, Any]:
        """Return one way to draw the curves (linear or log): its lines, and the y labels."""
        marks = y.ticks(7 if self.wide else 5)
        paths: list[_Path] = [("grid", f"M0 {down(y.at(mark))}H{WIDTH}", None) for mark in marks]
        if gaps:
            places = sorted({round(x.at(step) * WIDTH / 2) * 2 for step in gaps})
            marked = "".join(f"M{place} 0V{HEIGHT}" for place in places)
            paths.append(("bad", marked, self.series[0].run))
        paths += [path for curve in curves for path in _paths(curve, x, y)]
        return {"name": name, "paths": paths, "labels": y.labelled(marks, upward=True)}


_Path = tuple[str, str, int | None]
"""Class and path of a line, and the run whose steps it lies over; None where it lies over none."""


def _paths(curve: Series, x: Scale, y: Scale) -> list[_Path]:
    """Return the line of a curve, and dots on points that are drawn so or stand alone."""
    css = f"c{curve.colour} {curve.css} {curve.stroke}".rstrip()
    drawn: list[_Path] = [(css, path(curve.x, curve.y, x, y), curve.run)]
    dotted = curve.css == "dots" and len(curve.x) <= MOST_DOTS
    around = [None, *curve.y, None]
    points = "".join(
        path([step], [value], x, y)
        for i, (step, value) in enumerate(zip(curve.x, curve.y, strict=True))
        if dotted or (around[i] is None and around[i + 2] is None)
    )
    return [*drawn, (f"c{curve.colour} points", points, curve.run)] if points else drawn


def _steps_scale(steps: Sequence[float]) -> Scale:
    """Return the x axis: from 0 if the run starts near it, and never empty."""
    low, high = min(steps), max(steps)
    if low == high:
        return Scale(low - 1, high + 1)
    return Scale(0 if 0 < low <= 0.05 * high else low, high)


def down(share: float) -> str:
    """Return the SVG coordinate y of a share of the height, counted from below."""
    return f"{HEIGHT * (1 - share):.1f}"


def path(xs: Sequence[float], ys: Values, x: Scale, y: Scale) -> str:
    """Return SVG path data; None lifts the pen, and an isolated point becomes a dot (`h0`, round cap)."""
    pieces: list[str] = []
    pen_down = False
    for step, value in zip(xs, ys, strict=True):
        if value is None:
            pen_down = False
            continue
        place = f"{x.at(step) * WIDTH:.1f} {down(y.at(value))}"
        pieces.append(f"L{place}" if pen_down else f"M{place}h0")
        pen_down = True
    return "".join(pieces)


def _data(x: Scale, scales: dict[str, Scale], curves: Sequence[Series]) -> dict[str, Any]:
    """Return the data that `chart.js` reads out under the pointer, as plain values for JSON."""
    return {
        "x": [x.low, x.high],
        "scales": {name: asdict(scale) for name, scale in scales.items()},
        "series": [
            {
                "name": curve.name,
                "colour": curve.colour,
                "run": curve.run,
                "x": list(curve.x),
                "y": [float(f"{v:.6g}") if is_number(v) else None for v in curve.y],
            }
            for curve in curves
        ],
    }


@dataclass(frozen=True)
class Points:
    """Points of one kind in a scatter plot: (x, y, words); `joined` ones are linked by steps."""

    name: str
    css: str
    points: Sequence[tuple[float, float, str]]
    joined: bool = False


def scatter(
    title: str, groups: Sequence[Points], x_name: str, y_name: str, limit: float, limit_words: str
) -> Markup:
    """Return a plot of points as a `<figure>`, with a line across at y = `limit`."""
    every = [point for group in groups for point in group.points]
    x = fit([point[0] for point in every], False, False)
    y = fit([*(point[1] for point in every), limit], False, True)
    marks = y.ticks(6)
    paths = [("grid", f"M0 {down(y.at(mark))}H{WIDTH}", "") for mark in marks]
    paths.append(("bad", f"M0 {down(y.at(limit))}H{WIDTH}", ""))
    for group in groups:
        places = [f"{WIDTH * x.at(across):.1f} {down(y.at(up))}" for across, up, _ in sorted(group.points)]
        if group.joined and places:
            steps = "".join("H{}V{}".format(*place.split()) for place in places[1:])
            paths.append((f"{group.css} front", f"M{places[0]}{steps}", ""))
        for across, up, words in group.points:
            paths.append((f"{group.css} points", path([across], [up], x, y), words))
    return render(
        "scatter.html",
        title=title,
        groups=groups,
        paths=paths,
        x_name=x_name,
        y_name=y_name,
        x_labels=x.labelled(x.ticks(5)),
        y_labels=y.labelled(marks, upward=True),
        limit_words=limit_words,
        width=WIDTH,
        height=HEIGHT,
    )
