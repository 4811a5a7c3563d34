"""Which figure of the hardware, were it wrong, would make another layout the better choice.

Each is raised and lowered by up to a half, and the layout is set beside its candidates again. A candidate is
timed only where it could be ahead: seconds do not rise with a rate, and fall no faster than the rate rises.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from meshwright.hardware.cluster import NETWORKS, Cluster
from meshwright.planner.cost.model import CostModel
from meshwright.planner.explain.candidate import TIE, Candidate

MOST = 50
"""Percent by which a figure is taken to be wrong at most."""


@dataclass(frozen=True)
class Turn:
    """The smallest change, to a whole percent, that makes another layout preferred."""

    percent: int
    """Below 0 where the figure is lowered."""
    candidate: int | None
    """The place of the layout that is preferred then; None where nothing fits."""


@dataclass(frozen=True)
class Assumption:
    """A figure, and what it would take."""

    name: str
    value: str
    turns: tuple[Turn, ...]
    """At most one each way, the nearer first; none where the choice stands within `MOST` percent."""

    def to_json(self, words: Sequence[str]) -> dict[str, Any]:
        """Plain values; `words` tells the candidates."""
        listed = [
            {"percent": turn.percent, "preferred": None if turn.candidate is None else words[turn.candidate]}
            for turn in self.turns
        ]
        return {"name": self.name, "value": self.value, "turns": listed}


@dataclass(frozen=True)
class Figure:
    """A rate of the hardware, and the engines with another one."""

    name: str
    value: str
    scaled: Callable[[float], CostModel]


def assumptions(
    chosen: Candidate, candidates: Sequence[Candidate], on: CostModel, capacity: float
) -> tuple[Assumption, ...]:
    """What each figure would have to be for one of `candidates` to be preferred.

    Preferred is the fastest that fits. Candidates that are preferred already count for nothing, as does
    everything where the chosen layout does not fit.
    """
    if not chosen.fits(capacity):
        return ()
    others = {
        place: each
        for place, each in enumerate(candidates)
        if not each.beats(chosen) or not each.fits(capacity)
    }
    found = []
    for figure in figures(on):
        turns = [_turn(_Race(chosen, others, figure, capacity), sign) for sign in (1, -1)]
        found.append(Assumption(figure.name, figure.value, _nearer(turns)))
    value = f"{capacity / 1e9:.4g} GB"
    turns = [_more_memory(chosen, others, capacity), _less_memory(chosen, others, capacity)]
    return (*found, Assumption("memory capacity", value, _nearer(turns)))


def _nearer(turns: Sequence[Turn | None]) -> tuple[Turn, ...]:
    return tuple(sorted((turn for turn in turns if turn is not None), key=lambda turn: abs(turn.percent)))


def figures(on: CostModel) -> list[Figure]:
    """The rates that a step's seconds follow from."""
    device, stack, cluster = on.cluster.device, on.stack, on.cluster
    rates = device.rates

    def products(factor: float) -> CostModel:
        scaled = replace(device, rates=replace(rates, matmul=rates.matmul * factor))
        return CostModel(replace(cluster, device=scaled), stack, on.format)

    def launch(factor: float) -> CostModel:
        return CostModel(cluster, replace(stack, launch=stack.launch / factor), on.format)

    found = [Figure("rate of matrix products", f"{rates.matmul:.0%} of the peak", products)]
    for name, leaves in (("bandwidth within a node", False), ("bandwidth of the network", True)):
        mine = [level for level in cluster.levels if (level.kind in NETWORKS) == leaves]
        if mine and cluster.count > 1:
            value = f"{mine[0].link.bandwidth / 1e9:.4g} GB/s a device"
            found.append(Figure(name, value, lambda factor, leaves=leaves: _linked(on, leaves, factor)))  # type: ignore[misc]
    if stack.launch:
        found.append(Figure("speed of the host", f"{stack.launch * 1e6:.3g} us a launch", launch))
    return found


def _linked(on: CostModel, leaves: bool, factor: float) -> CostModel:
    """Engines with other links: those that leave a node, or those within one."""
    levels = tuple(
        replace(level, link=replace(level.link, bandwidth=level.link.bandwidth * factor))
        if (level.kind in NETWORKS) == leaves
        else level
        for level in on.cluster.levels
    )
    changed: Cluster = replace(on.cluster, levels=levels)
    return CostModel(changed, on.stack, on.format)


def _turn(race: _Race, sign: int) -> Turn | None:
    """The smallest change of a rate one way at which another layout is ahead.

    First it is looked for by bounds, then near there; where that is not it, by halves.
    """

    def ahead(percent: int, exact: bool) -> bool:
        return race.ahead(1 + sign * percent / 100, every=False, exact=exact) is not None

    guess = _first(lambda percent: ahead(percent, False), (MOST,))
    found = _first(lambda percent: ahead(percent, True), (guess, guess - 1, guess + 1, MOST))
    if found > MOST:
        return None
    return Turn(sign * found, race.ahead(1 + sign * found / 100, every=True))


def _first(holds: Callable[[int], bool], tried: Sequence[int]) -> int:
    """The first percent that something holds at, `tried` being the first that are; beyond `MOST` if none."""
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
        self._engines: dict[float, CostModel] = {}
        self._seconds: dict[tuple[int | None, float], float] = {}
        self._bounds = {place: {1.0: each.least} for place, each in others.items()}

    def ahead(self, factor: float, every: bool, exact: bool = True) -> int | None:
        """The fastest other that fits and is ahead; unless `every` counts, the first that is found.

        Unless `exact`, by the seconds that each takes at least.
        """
        best = (self._exactly if exact else self._at_least)(None, factor) * (1 - TIE)
        near = [place for place in self.others if self._least(place, factor) < best]
        bounds = {place: self._at_least(place, factor) for place in near}
        found = None
        for place, seconds in sorted(bounds.items(), key=lambda item: item[1]):
            if seconds >= best:
                break
            if self.others[place].fits(self.capacity):
                seconds = self._exactly(place, factor) if exact else seconds
                if seconds < best:
                    best, found = seconds, place
                    if not every:
                        break
        return found

    def _least(self, place: int, factor: float) -> float:
        """Seconds that another takes at least, by what it takes at other values."""
        return max(value * min(1.0, other / factor) for other, value in self._bounds[place].items())

    def _at_least(self, place: int | None, factor: float) -> float:
        """The same, by a closer look; None is the chosen one."""
        found = self._of(place).timing.least(self._at(factor))
        if place is not None:
            self._bounds[place][factor] = max(found, self._bounds[place].get(factor, 0.0))
        return found

    def _exactly(self, place: int | None, factor: float) -> float:
        known = place, factor
        if known not in self._seconds:
            self._seconds[known] = self._of(place).timing.seconds(self._at(factor))
            if place is not None:
                self._bounds[place][factor] = self._seconds[known]
        return self._seconds[known]

    def _of(self, place: int | None) -> Candidate:
        return self.chosen if place is None else self.others[place]

    def _at(self, factor: float) -> CostModel:
        if factor not in self._engines:
            self._engines[factor] = self.figure.scaled(factor)
        return self._engines[factor]


def _more_memory(chosen: Candidate, others: Mapping[int, Candidate], capacity: float) -> Turn | None:
    """The smallest larger memory in which something faster fits; seconds do not depend on it."""
    faster = {place: each for place, each in others.items() if each.beats(chosen)}
    for percent in range(1, MOST + 1):
        fitting = [place for place, each in faster.items() if each.fits(capacity * (1 + percent / 100))]
        if fitting:
            return Turn(percent, min(fitting, key=lambda place: faster[place].seconds))
    return None


def _less_memory(chosen: Candidate, others: Mapping[int, Candidate], capacity: float) -> Turn | None:
    """The largest smaller memory in which the chosen layout does not fit any more."""
    for percent in range(1, MOST + 1):
        room = capacity * (1 - percent / 100)
        if not chosen.fits(room):
            return Turn(-percent, _fastest(others, room))
    return None


def _fastest(others: Mapping[int, Candidate], room: float) -> int | None:
    """The fastest that fits."""
    best, found = float("inf"), None
    for place in sorted(others, key=lambda place: others[place].least):
        each = others[place]
        if each.least >= best:
            break
        if each.fits(room) and each.seconds < best:
            best, found = each.seconds, place
    return found
