"""Order of layouts by their predicted times against the measured one, in cells of runs that compete.

A cell has the runs of one model and batch on as many devices of one cluster, by one program and format: what
somebody who looks for a layout would choose from.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import combinations
from statistics import fmean, median
from typing import Any

_SHOWN = 3
"""Layouts that `plan` is asked for, from which somebody tries one."""

Times = list[tuple[float, float]]
"""(predicted, measured) seconds of the layouts of a cell."""


@dataclass(frozen=True)
class Cell:
    """Three or more layouts that were measured, one of which a planner would choose."""

    model: str
    gpus: int
    gpu: str
    batch_tokens: int
    times: Times

    @property
    def tau(self) -> float | None:
        """Kendall's tau of predicted against measured times; None where either are all equal."""
        return kendall(self.times)

    @property
    def regret_pct(self) -> float:
        """Excess of the layout predicted fastest over the fastest measured time, in percent."""
        _, chosen = min(self.times, key=lambda pair: pair[0])
        return 100 * (chosen / min(measured for _, measured in self.times) - 1)

    @property
    def is_fastest_shown(self) -> bool:
        """True if the fastest layout is among the three that are predicted fastest."""
        shown = sorted(self.times)[:_SHOWN]
        return min(time for _, time in self.times) in [time for _, time in shown]

    def to_json(self) -> dict[str, Any]:
        """The model, devices and batch, and the figures."""
        return {
            "model": self.model, "gpus": self.gpus, "gpu": self.gpu, "batch_tokens": self.batch_tokens,
            "layouts": len(self.times), "tau": self.tau, "regret_pct": self.regret_pct,
            "fastest_shown": self.is_fastest_shown,
        }  # fmt: skip


def figures(found: list[Cell]) -> dict[str, Any]:
    """Means of `tau` and `regret_pct`, the regret's median, and in how many `groups` the fastest is shown."""
    taus = [cell.tau for cell in found if cell.tau is not None]
    regrets = [cell.regret_pct for cell in found]
    return {
        "tau": fmean(taus) if taus else None,
        "regret_pct": fmean(regrets) if regrets else None,
        "regret_median_pct": median(regrets) if regrets else None,
        "fastest_shown": sum(cell.is_fastest_shown for cell in found),
        "groups": len(found),
    }


def kendall(times: Times) -> float | None:
    """Kendall's tau-b of predicted and measured times: 1 for equal order, -1 for reversed order, or None."""
    signs = [((a > c) - (a < c), (b > d) - (b < d)) for (a, b), (c, d) in combinations(times, 2)]
    untied = sum(first != 0 for first, _ in signs) * sum(second != 0 for _, second in signs)
    return sum(first * second for first, second in signs) / untied**0.5 if untied else None
