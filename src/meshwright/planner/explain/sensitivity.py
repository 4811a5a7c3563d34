"""Sensitivity of the choice: which figure of the hardware, were it wrong, would make another layout better.

Each figure is raised and lowered by up to a half, and the layout is compared with its candidates again. A
candidate is timed only where it could be ahead: seconds do not rise with a rate, and fall no faster than the
rate rises.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from math import inf

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
    preferred: str | None
    """Words for the layout that is preferred then; None where nothing fits."""


@dataclass(frozen=True)
class Assumption:
    """A figure, and the changes of it that would change the choice."""

    name: str
    value: str
    turns: tuple[Turn, ...]
    """At most one each way, the nearer first; none where the choice stands within `MOST` percent."""


@dataclass(frozen=True)
class Figure:
    """A rate of the hardware, and the cost model with that rate times a factor."""

    name: str
    value: str
    scaled: Callable[[float], CostModel]


def assumptions(
    chosen: Candidate, candidates: Mapping[str, Candidate], capacity: float
) -> tuple[Assumption, ...]:
    """The value that each figure would need for one of `candidates` to be preferred.

    The fastest layout that fits is preferred. Candidates that are preferred already are left out; where the
    chosen layout does not fit there are no assumptions.
    """
    if not chosen.fits(capacity):
        return ()
    others = {
        words: other
        for words, other in candidates.items()
        if not other.beats(chosen) or not other.fits(capacity)
    }
    found = []
    for figure in figures(chosen.costs):
        race = _Race(chosen, others, figure, capacity)
        found.append(Assumption(figure.name, figure.value, _nearer(race.turn(1), race.turn(-1))))
    turns = _nearer(_more_memory(chosen, others, capacity), _less_memory(chosen, others, capacity))
    return (*found, Assumption("memory capacity", f"{capacity / 1e9:.4g} GB", turns))


def _nearer(*turns: Turn | None) -> tuple[Turn, ...]:
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
        self, chosen: Candidate, others: Mapping[str, Candidate], figure: Figure, capacity: float
    ) -> None:
        self.chosen, self.others, self.capacity = chosen, others, capacity
        self._costs = cache(figure.scaled)
        self._times: dict[tuple[str | None, float], StepTime] = {}
        self._bounds = {words: {1.0: other.bound} for words, other in others.items()}

    def turn(self, sign: int) -> Turn | None:
        """The smallest change of the rate in one direction at which another layout is ahead.

        It is looked for by bounds, then near there by exact seconds, and if that fails by halves.
        """

        def ahead(percent: int, exact: bool) -> bool:
            return self._ahead(1 + sign * percent / 100, every=False, exact=exact) is not None

        guess = _first(lambda percent: ahead(percent, False), (MOST,))
        found = _first(lambda percent: ahead(percent, True), (guess, guess - 1, guess + 1, MOST))
        if found > MOST:
            return None
        return Turn(sign * found, self._ahead(1 + sign * found / 100, every=True))

    def _ahead(self, factor: float, every: bool, exact: bool = True) -> str | None:
        """The fastest other layout that fits and is ahead, or without `every` the first that is found.

        Without `exact` by lower bounds on seconds.
        """
        best, found = self._seconds(None, factor, exact) * (1 - TIE), None
        near = [words for words in self.others if self._bound(words, factor) < best]
        bounds = {words: self._seconds(words, factor, exact=False) for words in near}
        for words in sorted(bounds, key=bounds.__getitem__):
            if bounds[words] >= best or (found is not None and not every):
                break
            if self.others[words].fits(self.capacity):
                seconds = self._seconds(words, factor, exact)
                if seconds < best:
                    best, found = seconds, words
        return found

    def _bound(self, words: str, factor: float) -> float:
        """Lower bound on the step's seconds at `factor`, scaled from values that are known."""
        return max(value * min(1.0, other / factor) for other, value in self._bounds[words].items())

    def _seconds(self, words: str | None, factor: float, exact: bool) -> float:
        """Seconds of a candidate's step at `factor`, or a lower bound; None is the chosen one."""
        if (words, factor) not in self._times:
            layout = self.chosen if words is None else self.others[words]
            self._times[words, factor] = layout.time_on(self._costs(factor))
        time = self._times[words, factor]
        seconds = time.seconds if exact else time.bound
        if words is not None:
            self._bounds[words][factor] = max(seconds, self._bounds[words].get(factor, 0.0))
        return seconds


def _more_memory(chosen: Candidate, others: Mapping[str, Candidate], capacity: float) -> Turn | None:
    """The smallest larger memory in which something faster fits; seconds do not depend on it."""
    faster = {words: other for words, other in others.items() if other.beats(chosen)}
    for percent in range(1, MOST + 1):
        fitting = [words for words in faster if faster[words].fits(capacity * (1 + percent / 100))]
        if fitting:
            return Turn(percent, min(fitting, key=lambda words: faster[words].seconds))
    return None


def _less_memory(chosen: Candidate, others: Mapping[str, Candidate], capacity: float) -> Turn | None:
    """The largest smaller memory in which the chosen layout no longer fits, and the fastest that does."""
    for percent in range(1, MOST + 1):
        room = capacity * (1 - percent / 100)
        if chosen.fits(room):
            continue
        best, found = inf, None
        for words, other in sorted(others.items(), key=lambda item: item[1].bound):
            if other.bound >= best:
                break
            if other.fits(room) and other.seconds < best:
                best, found = other.seconds, words
        return Turn(-percent, found)
    return None
