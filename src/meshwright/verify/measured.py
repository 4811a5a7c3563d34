"""Differences of a run in its own precision, each beside what rounding explains."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from meshwright.spec.files import strict_json
from meshwright.verify.rounding import Gradients

MARGIN = 4.0
"""Tolerances are so many times the largest of what rounding was measured to do."""

SLOPE_MARGIN = 6.0
"""That of the common slope, whose standard deviation is itself known to a third only, from a few draws."""

MOST_PARTS = 8
"""Parts of a dim whose noise is looked at one by one, so that a wrong slice does not drown in the rest."""


@dataclass(frozen=True)
class ComparedValue:
    """One value that was compared: its relative difference, what of it rounding explains, and a sentence."""

    step: int
    kind: str
    name: str
    relative: float
    tolerance: float
    sentence: str

    @property
    def fails(self) -> bool:
        """True if the difference is beyond the tolerance, or not a number."""
        return not self.relative <= self.tolerance

    @property
    def share(self) -> float:
        """The difference as a share of its tolerance."""
        if self.relative == 0.0 or not math.isfinite(self.relative):
            return 0.0 if self.relative == 0.0 else math.inf
        return self.relative / self.tolerance if self.tolerance else math.inf


class Measurements:
    """All that was compared, in the order in which a step computes it."""

    def __init__(self) -> None:
        self.found: list[ComparedValue] = []

    def add(self, step: int, kind: str, name: str, relative: float, tolerance: float, sentence: str) -> None:
        """Take down one comparison; the sentence is used if it is the first to fail."""
        self.found.append(ComparedValue(step, kind, name, relative, tolerance, sentence))

    def close(
        self,
        step: int,
        kind: str,
        found: Mapping[str, Tensor],
        wanted: Mapping[str, Tensor],
        tolerance: float,
        words: str,
    ) -> None:
        """Compare equally named tensors by max |a - b| / max |b|; `words` say what differs, with {}."""
        for name in [*wanted, *sorted(found.keys() - wanted.keys())]:
            relative = math.inf
            if name in wanted and name in found and wanted[name].shape == found[name].shape:
                target = wanted[name].double()
                largest = float(target.abs().max()) or 1.0
                relative = float((found[name].double() - target).abs().max()) / largest
            self.add(step, kind, name, relative, tolerance, f"{words.format(name)} ({relative:.1e})")

    def result(self) -> dict[str, Any]:
        """Return the JSON object of the comparison, with one row for each step and kind.

        A difference or tolerance that is not finite is None.
        """
        kinds: dict[tuple[int, str], list[ComparedValue]] = {}
        for each in self.found:
            kinds.setdefault((each.step, each.kind), []).append(each)
        rows = []
        for (step, kind), some in kinds.items():
            worst = max(some, key=lambda each: each.share)
            row = {"kind": f"step {step} {kind}", "compared": len(some), "worst": worst.relative}
            rows.append({**row, "tolerance": worst.tolerance, "name": worst.name})
        first = next((each for each in self.found if each.fails), None)
        worst = max(self.found, key=lambda each: each.share)
        result: dict[str, Any] = strict_json(
            {
                "equal": first is None,
                "worst_relative": worst.relative,
                "worst_name": f"step {worst.step} {worst.kind}: {worst.name}",
                "first": None if first is None else asdict(first),
                "differences": [
                    asdict(each) for each in self.found if first and each.step == first.step and each.fails
                ],
                "compared": len(self.found),
                "tolerance": worst.tolerance,
                "rows": rows,
            }
        )
        return result


class _Fit:
    """A gradient as a multiple of the exact one (`slope`, least squares), and the `rest` of it.

    Where the slope is above 1 the rest is divided by it, so that a factor makes no noise.
    """

    def __init__(self, found: Tensor, exact: Tensor) -> None:
        squares = float(exact.square().sum())
        self.slope = float((found * exact).sum()) / squares if squares else 1.0
        self.rest = (found - self.slope * exact) / max(1.0, abs(self.slope))


def compare_gradients(
    into: Measurements, step: int, found: Mapping[str, Tensor], exact: Gradients, draws: Sequence[Gradients],
    eps: float,
) -> None:  # fmt: skip
    """Compare noise and slopes of all gradients, from the head's to the embedding's, with those of `draws`.

    A gradient that is scaled has no more noise, one that is wrong in part has. Of slopes the first is that
    which most gradients have in common, a weighted median: rounding hardly moves it, while it may move the
    slope of one by as much as its noise. `eps` is that of the coarsest format in use.
    """
    names = list(reversed(exact.by_name))
    fits = {name: _Fit(found[name].double(), exact.by_name[name]) for name in names}
    drawn = {name: [_Fit(draw.by_name[name], exact.by_name[name]) for draw in draws] for name in names}
    size = {name: float(exact.by_name[name].norm()) for name in names}
    noise = {
        name: max(float(each.rest.norm()) for each in drawn[name]) / size[name] if size[name] else math.inf
        for name in names
    }
    for name in names:
        _compare_noise(into, step, name, fits[name], drawn[name], exact.by_name[name], eps)
    expected = {name: sum(each.slope for each in drawn[name]) / len(draws) for name in names}
    off = {name: fits[name].slope / expected[name] - 1 for name in names}
    # Of a draw, against the mean of the others.
    others = {
        name: [
            (each.slope - expected[name]) * len(draws) / (len(draws) - 1) / expected[name]
            for each in drawn[name]
        ]
        for name in names
    }
    common = _weighted_median(off, noise)
    spread = math.sqrt(
        sum(
            _weighted_median({name: others[name][draw] for name in names}, noise) ** 2
            for draw in range(len(draws))
        )
        / len(draws)
    )
    into.add(
        step, "common slope", f"all {len(names)} gradients", abs(common), max(SLOPE_MARGIN * spread, eps / 8),
        f"step {step}: all {len(names)} gradients are {1 + common:.6g} times what they should be, which "
        f"rounding does not explain",
    )  # fmt: skip
    for name in names:
        tolerance = max(MARGIN * max(map(abs, others[name])), 2 * noise[name], eps / 8)
        into.add(
            step, "gradient slope", name, abs(off[name]), tolerance,
            f"step {step}: the gradient of {name} is {1 + off[name]:.4g} times what it should be, which "
            f"rounding does not explain (it explains {tolerance:.1e})",
        )  # fmt: skip


def _weighted_median(values: Mapping[str, float], noise: Mapping[str, float]) -> float:
    """The median of values that weigh one over the square of their noise, at most as the median of these."""
    least = sorted(noise.values())[len(noise) // 2]
    weights = {name: 1 / max(noise[name], least, 1e-30) ** 2 for name in values}
    half, passed = sum(weights.values()) / 2, 0.0
    for name in sorted(values, key=values.__getitem__):
        passed += weights[name]
        if passed >= half:
            return values[name]
    return math.nan


def _compare_noise(
    into: Measurements, step: int, name: str, fit: _Fit, drawn: Sequence[_Fit], exact: Tensor, eps: float
) -> None:
    """Compare what is left of a gradient, as a whole and in parts of each dim, with what is left of draws."""
    typical = _rms(exact)
    worst = (0.0, 0.0, 0.0, "")
    for dim in range(exact.ndim):
        parts = min(MOST_PARTS, exact.shape[dim])
        limit = max(
            [_rms(part) for each in drawn for part in each.rest.chunk(parts, dim)] + [eps / 8 * typical]
        )
        start = 0
        for rest, own in zip(fit.rest.chunk(parts, dim), exact.chunk(parts, dim), strict=True):
            end = start + rest.shape[dim]
            unit = max(_rms(own), limit) or 1.0
            share = _rms(rest) / (MARGIN * limit) if limit else (math.inf if _rms(rest) else 0.0)
            if not share <= worst[0]:
                noun = "rows" if dim == 0 else "columns" if dim == exact.ndim - 1 else f"indices of dim {dim}"
                where = f" in {noun} {start} to {end - 1}"
                worst = share, _rms(rest) / unit, MARGIN * limit / unit, where
            start = end
    _, relative, tolerance, where = worst
    into.add(
        step, "gradient noise", name, relative, tolerance,
        f"step {step}: the gradient of {name} is off by {relative:.2g} of its size{where}, and not by a "
        f"factor; rounding explains {tolerance:.1e}",
    )  # fmt: skip


def _rms(x: Tensor) -> float:
    return float(torch.linalg.vector_norm(x)) / math.sqrt(max(1, x.numel()))
