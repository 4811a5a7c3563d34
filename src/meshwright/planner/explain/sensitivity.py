"""Sensitivity of the choice: which figure of the hardware, were it wrong, would make another layout better.

Each figure is raised and lowered by up to a half, and the layout is compared with its candidates again. A
candidate is timed only where it could be ahead: seconds do not rise with a rate, and fall no faster than the
rate rises.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from meshwright.hardware.cluster import NETWORKS
from meshwright.planner.cost.model import CostModel
from meshwright.planner.cost.step import StepTime
from meshwright.planner.explain.candidate import TIE, Candidate

MOST = 50
"""Largest error of a figure that is considered, in percent."""


@dataclass(frozen=True)
class Turn:
    """The smallest change, to a whole percent, that makes another layout preferred."""

    percent: int
    """Below 0 where the figure is lowered."""
    candidate: int | None
    """The place of the layout that is preferred then; None where nothing fits."""


@dataclass(frozen=True)
class Assumption:
    """A figure, and the changes of it that would change the choice."""

    name: str
    value: str
    turns: tuple[Turn, ...]
    """At most one each way, the nearer first; none where the choice stands within `MOST` percent."""

    def to_json(self, words: Sequence[str]) -> dict[str, Any]:
        """Plain values; `words` name the candidates."""
        listed = [
            {"percent": turn.percent, "preferred": None if turn.candidate is None else words[turn.candidate]}
            for turn in self.turns
        ]
        return {"name": self.name, "value": self.value, "turns": listed}


@dataclass(frozen=True)
class Figure:
    """A rate of the hardware, and the cost model with that rate times a factor."""

    name: str
    value: str
    scaled: Callable[[float], CostModel]


def assumptions(
    chosen: Candidate, candidates: Sequence[Candidate], costs: CostModel, capacity: float
) -> tuple[Assumption, ...]:
    """The value that each figure would need for one of `candidates` to be preferred.

    The fastest layout that fits is preferred. Candidates that are preferred already are left out; where the
    chosen layout does not fit there are no assumptions.
    """
    if not chosen.fits(capacity):
        return ()
    others = {
        place: each
        for place, each in enumerate(candidates)
        if not each.beats(chosen) or not each.fits(capacity)
    }
    found = []
    for figure in figures(costs):
        race = _Race(chosen, others, figure, capacity)
        found.append(Assumption(figure.name, figure.value, _nearer([_turn(race, sign) for sign in (1, -1)])))
    turns = _nearer([_more_memory(chosen, others, capacity), _less_memory(chosen, others, capacity)])
    return (*found, Assumption("memory capacity", f"{capacity / 1e9:.4g} GB", turns))


def _nearer(turns: Sequence[Turn | None]) -> tuple[Turn, ...]:
    return tuple(sorted((turn for turn in turns if turn is not None), key=lambda turn: abs(turn.percent)))


def figures(costs: CostModel) -> list[Figure]:
    """The rates that a step's seconds depend on most."""
    device, stack, cluster, format = costs.cluster.device, costs.stack, costs.cluster, costs.format

    def products(factor: float) -> CostModel:
        rates = replace(device.rates, matmul=device.rates.matmul * factor)
        return CostModel(replace(cluster, device=replace(device, rates=rates)), stack, format)

    def launch(factor: float) -> CostModel:
        return CostModel(cluster, replace(stack, launch=stack.launch / factor), format)

    found = [Figure("rate of matrix products", f"{device.rates.matmul:.0%} of the peak", products)]
    for name, network in (("bandwidth within a node", False), ("bandwidth of the network", True)):
        mine = [level for level in cluster.levels if (level.kind in NETWORKS) == network]
        if mine and cluster.count > 1:

            def linked(factor: float, network: bool = network) -> CostModel:
                levels = tuple(
                    replace(level, link=replace(level.link, bandwidth=level.link.bandwidth * factor))
                    if (level.kind in NETWORKS) == network
                    else level
                    for level in cluster.levels
                )
                return CostModel(replace(cluster, levels=levels), stack, format)

            found.append(Figure(name, f"{mine[0].link.bandwidth / 1e9:.4g} GB/s a device", linked))
    if stack.launch:
        found.append(Figure("speed of the host", f"{stack.launch * 1e6:.3g} us a launch", launch))
    return found


def _turn(race: _Race, sign: int) -> Turn | None:
    """The smallest change of a rate in one direction at which another layout is ahead.

    It is looked for by bounds, then near there by exact seconds, and if that fails by halves.
    """

    def ahead(percent: int, exact: bool) -> bool:
        return race.ahead(1 + sign * percent / 100, every=False, exact=exact) is not None

    guess = _first(lambda percent: ahead(percent, False), (MOST,))
    found = _first(lambda percent: ahead(percent, True), (guess, guess - 1, guess + 1, MOST))
    if found > MOST:
        return None
    return Turn(sign * found, race.ahead(1 + sign * found / 100, every=True))


def _first(holds: Callable[[int], bool], tried: Sequence[int]) -> int:
    """The first percent at which something holds, or more than `MOST`; `tried` come first."""
    low, high = 0, MOST + 1
    for percent in tried:
        if low < percent < high:
            low, high = (low, percent) if holds(percent) else (percent, high)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if holds(middle) else (middle, high)
    return high


class _Race:
    """A layout against others, at other values of a rate."""

    def __init__(
        self, chosen: Candidate, others: Mapping[int, Candidate], figure: Figure, capacity: float
    ) -> None:
        self.chosen, self.others, self.figure, self.capacity = chosen, others, figure, capacity
        self._costs: dict[float, CostModel] = {}
        self._steps: dict[tuple[int | None, float], StepTime] = {}
        self._bounds = {place: {1.0: each.bound} for place, each in others.items()}

    def ahead(self, factor: float, every: bool, exact: bool = True) -> int | None:
        """The fastest other layout that fits and is ahead, or without `every` the first that is found.

        Without `exact` by lower bounds on seconds.
        """
        best = self._seconds(None, factor, exact) * (1 - TIE)
        near = [place for place in self.others if self._bound(place, factor) < best]
        bounds = {place: self._seconds(place, factor, exact=False) for place in near}
        found = None
        for place, seconds in sorted(bounds.items(), key=lambda item: item[1]):
            if seconds >= best:
                break
            if self.others[place].fits(self.capacity):
                seconds = self._seconds(place, factor, exact) if exact else seconds
                if seconds < best:
                    best, found = seconds, place
                    if not every:
                        break
        return found

    def _bound(self, place: int, factor: float) -> float:
        """Lower bound on the step's seconds at `factor`, scaled from values that are known."""
        return max(value * min(1.0, other / factor) for other, value in self._bounds[place].items())

    def _seconds(self, place: int | None, factor: float, exact: bool) -> float:
        """Seconds of a candidate's step at `factor`, or a lower bound; None is the chosen one."""
        if (place, factor) not in self._steps:
            if factor not in self._costs:
                self._costs[factor] = self.figure.scaled(factor)
            layout = self.chosen if place is None else self.others[place]
            self._steps[place, factor] = layout.step_on(self._costs[factor])
        step = self._steps[place, factor]
        seconds = step.seconds if exact else step.bound
        if place is not None:
            self._bounds[place][factor] = max(seconds, self._bounds[place].get(factor, 0.0))
        return seconds


def _more_memory(chosen: Candidate, others: Mapping[int, Candidate], capacity: float) -> Turn | None:
    """The smallest larger memory in which something faster fits; seconds do not depend on it."""
    faster = {place: each for place, each in others.items() if each.beats(chosen)}
    for percent in range(1, MOST + 1):
        fitting = [place for place, each in faster.items() if each.fits(capacity * (1 + percent / 100))]
        if fitting:
            return Turn(percent, min(fitting, key=lambda place: faster[place].seconds))
    return None


def _less_memory(chosen: Candidate, others: Mapping[int, Candidate], capacity: float) -> Turn | None:
    """The largest smaller memory in which the chosen layout no longer fits, and the fastest that does."""
    for percent in range(1, MOST + 1):
        room = capacity * (1 - percent / 100)
        if chosen.fits(room):
            continue
        best, found = float("inf"), None
        for place in sorted(others, key=lambda place: others[place].bound):
            each = others[place]
            if each.bound >= best:
                break
            if each.fits(room) and each.seconds < best:
                best, found = each.seconds, place
        return Turn(-percent, found)
    return None
