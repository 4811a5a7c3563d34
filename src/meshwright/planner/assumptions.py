"""Which figure of the hardware, were it wrong, would make another layout the better choice.

Each is raised and lowered by up to a half, and the layout is set beside its candidates again. A candidate is
timed only where it could be ahead: seconds do not rise with a rate, and fall no faster than the rate rises.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from meshwright.planner.engines import Engines
from meshwright.planner.estimate import step_time
from meshwright.planner.hardware import NETWORKS, Cluster
from meshwright.planner.neighbours import TIE, Estimate

MOST = 50
"""Percent by which a figure is taken to be wrong at most."""
_PROBES = (20, MOST)
"""Percents at which candidates are timed before the smallest is looked for."""


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
    scaled: Callable[[float], Engines]


def assumptions(
    chosen: Estimate, candidates: Sequence[Estimate], on: Engines, capacity: float
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
        if each.seconds >= chosen.seconds * (1 - TIE) or not each.fits(capacity)
    }
    fitting = {place: each for place, each in others.items() if each.fits(capacity)}
    found = []
    for figure in figures(on):
        turns = [_turn(chosen, fitting, figure, sign) for sign in (1, -1)]
        found.append(Assumption(figure.name, figure.value, _nearer(turns)))
    value = f"{capacity / 1e9:.4g} GB"
    turns = [_more_memory(chosen, others, capacity), _less_memory(chosen, fitting, capacity)]
    return (*found, Assumption("memory capacity", value, _nearer(turns)))


def _nearer(turns: Sequence[Turn | None]) -> tuple[Turn, ...]:
    return tuple(sorted((turn for turn in turns if turn is not None), key=lambda turn: abs(turn.percent)))


def figures(on: Engines) -> list[Figure]:
    """The rates that a step's seconds follow from."""
    device, stack, cluster = on.cluster.device, on.stack, on.cluster
    rates = device.rates

    def products(factor: float) -> Engines:
        scaled = replace(device, rates=replace(rates, matmul=rates.matmul * factor))
        return Engines(replace(cluster, device=scaled), stack, on.format)

    def launch(factor: float) -> Engines:
        return Engines(cluster, replace(stack, launch=stack.launch / factor), on.format)

    found = [Figure("rate of matrix products", f"{rates.matmul:.0%} of the peak", products)]
    for name, leaves in (("bandwidth within a node", False), ("bandwidth of the network", True)):
        mine = [level for level in cluster.levels if (level.kind in NETWORKS) == leaves]
        if mine and cluster.count > 1:
            value = f"{mine[0].link.bandwidth / 1e9:.4g} GB/s a device"
            found.append(Figure(name, value, lambda factor, leaves=leaves: _linked(on, leaves, factor)))  # type: ignore[misc]
    if stack.launch:
        found.append(Figure("speed of the host", f"{stack.launch * 1e6:.3g} us a launch", launch))
    return found


def _linked(on: Engines, leaves: bool, factor: float) -> Engines:
    """Engines with other links: those that leave a node, or those within one."""
    levels = tuple(
        replace(level, link=replace(level.link, bandwidth=level.link.bandwidth * factor))
        if (level.kind in NETWORKS) == leaves
        else level
        for level in on.cluster.levels
    )
    changed: Cluster = replace(on.cluster, levels=levels)
    return Engines(changed, on.stack, on.format)


def _turn(chosen: Estimate, fitting: dict[int, Estimate], figure: Figure, sign: int) -> Turn | None:
    """The smallest change of a rate one way at which one of `fitting` is ahead."""
    race, low = _Race(chosen, fitting, figure), 0
    for high in _PROBES:
        if race.ahead(1 + sign * high / 100, every=False) is not None:
            break
        low = high
    else:
        return None
    while high - low > 1:
        middle = (low + high) // 2
        lost = race.ahead(1 + sign * middle / 100, every=False) is not None
        low, high = (low, middle) if lost else (middle, high)
    return Turn(sign * high, race.ahead(1 + sign * high / 100, every=True))


class _Race:
    """A layout against its candidates, at other values of a rate."""

    def __init__(self, chosen: Estimate, fitting: dict[int, Estimate], figure: Figure) -> None:
        self.chosen, self.fitting, self.figure = chosen, fitting, figure
        self._timed = {place: {1.0: each.seconds} for place, each in fitting.items()}

    def ahead(self, factor: float, every: bool) -> int | None:
        """The fastest candidate that is ahead; unless `every` counts, the first that is found."""
        on = self.figure.scaled(factor)
        best, found = step_time(self.chosen.spec, on).seconds * (1 - TIE), None
        for place in sorted(self.fitting, key=lambda place: self._least(place, factor)):
            if self._least(place, factor) >= best:
                break
            known = self._timed[place]
            if factor not in known:
                known[factor] = step_time(self.fitting[place].spec, on).seconds
            if known[factor] < best:
                best, found = known[factor], place
                if not every:
                    break
        return found

    def _least(self, place: int, factor: float) -> float:
        """Seconds that a candidate takes at least, from those at other values."""
        return max(value * min(1.0, other / factor) for other, value in self._timed[place].items())


def _more_memory(chosen: Estimate, others: dict[int, Estimate], capacity: float) -> Turn | None:
    """The smallest larger memory in which something faster fits; seconds do not depend on it."""
    for percent in range(1, MOST + 1):
        room = capacity * (1 + percent / 100)
        faster = [
            place
            for place, each in others.items()
            if each.fits(room) and each.seconds < chosen.seconds * (1 - TIE)
        ]
        if faster:
            return Turn(percent, min(faster, key=lambda place: others[place].seconds))
    return None


def _less_memory(chosen: Estimate, fitting: dict[int, Estimate], capacity: float) -> Turn | None:
    """The largest smaller memory in which the chosen layout does not fit any more."""
    for percent in range(1, MOST + 1):
        room = capacity * (1 - percent / 100)
        if not chosen.fits(room):
            left = [place for place, each in fitting.items() if each.fits(room)]
            return Turn(-percent, min(left, key=lambda place: fitting[place].seconds, default=None))
    return None
