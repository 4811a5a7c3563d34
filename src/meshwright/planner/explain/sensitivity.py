"""Sensitivity of the choice: which figure of the hardware, were it wrong, would make another layout better.

Each figure is raised and lowered by up to a half, and the layout is compared with its candidates again. A
candidate is timed only where it could be ahead: seconds do not rise with a rate, and fall no faster than the
rate rises.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from math import inf

from meshwright.hardware.cluster import NETWORKS
from meshwright.planner.cost.kernels import computed
from meshwright.planner.cost.model import CostModel
from meshwright.planner.cost.step import StepTime
from meshwright.planner.cost.uncertainty import room
from meshwright.planner.explain.candidate import TIE, Candidate

MOST = 50
"""Largest error of a figure that is considered, in percent."""
_CHOSEN = ""
"""Words for the chosen layout."""


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
    """A figure of the hardware, and the cost model and the capacity with that figure times a factor."""

    name: str
    value: str
    scaled: Callable[[float], tuple[CostModel, float]]


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
    for figure in figures(chosen.costs, capacity):
        race = _Race(chosen, others, figure)
        turns = [turn for sign in (1, -1) if (turn := race.turn(sign)) is not None]
        nearer_first = tuple(sorted(turns, key=lambda turn: abs(turn.percent)))
        found.append(Assumption(figure.name, figure.value, nearer_first))
    return tuple(found)


def figures(costs: CostModel, capacity: float) -> list[Figure]:
    """The rates that a step's seconds depend on most, and the bytes of a rank that may be filled."""
    device, stack, cluster, format = costs.cluster.device, costs.stack, costs.cluster, costs.format

    def products(factor: float) -> tuple[CostModel, float]:
        rates = replace(device.rates, matmul=device.rates.matmul * factor)
        return CostModel(replace(cluster, device=replace(device, rates=rates)), stack, format), capacity

    def linked(network: bool, factor: float) -> tuple[CostModel, float]:
        levels = tuple(
            replace(level, link=replace(level.link, bandwidth=level.link.bandwidth * factor))
            if (level.kind in NETWORKS) == network
            else level
            for level in cluster.levels
        )
        return CostModel(replace(cluster, levels=levels), stack, format), capacity

    def launch(factor: float) -> tuple[CostModel, float]:
        times = {kind: seconds / factor for kind, seconds in stack.numbers.launch.items()}
        return CostModel(
            cluster, replace(stack, numbers=replace(stack.numbers, launch=times)), format
        ), capacity

    share = device.attained(computed(device, format or "bf16"))
    found = [Figure("rate of matrix products", f"{share:.0%} of the peak", products)]
    for name, network in (("bandwidth within a node", False), ("bandwidth of the network", True)):
        mine = [level for level in cluster.levels if (level.kind in NETWORKS) == network]
        if mine and cluster.count > 1:
            value = f"{mine[0].link.bandwidth / 1e9:.4g} GB/s a device"
            found.append(Figure(name, value, partial(linked, network)))
    if stack.launch:
        found.append(Figure("speed of the host", f"{stack.launch * 1e6:.3g} us a launch", launch))
    memory = f"{room(cluster) / 1e9:.4g} GB"
    if capacity < room(cluster):
        memory += f", of which a plan may fill {capacity / 1e9:.4g}"
    found.append(Figure("memory capacity", memory, lambda factor: (costs, capacity * factor)))
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
    """A layout against others, at other values of a figure."""

    def __init__(self, chosen: Candidate, others: Mapping[str, Candidate], figure: Figure) -> None:
        self.layouts = {_CHOSEN: chosen, **others}
        self._scaled = cache(figure.scaled)
        self._times: dict[tuple[str, CostModel], StepTime] = {}
        self._bounds = {words: {1.0: other.bound} for words, other in others.items()}

    def turn(self, sign: int) -> Turn | None:
        """The smallest change of the figure in one direction at which another layout is preferred, or none.

        It is looked for by bounds, then near there by exact seconds, and if that fails by halves.
        """

        def turned(percent: int, exact: bool) -> bool:
            return self._preferred(1 + sign * percent / 100, every=False, exact=exact) != _CHOSEN

        guess = _first(lambda percent: turned(percent, False), (MOST,))
        found = _first(lambda percent: turned(percent, True), (guess, guess - 1, guess + 1, MOST))
        if found > MOST:
            return None
        return Turn(sign * found, self._preferred(1 + sign * found / 100, every=True))

    def _preferred(self, factor: float, every: bool, exact: bool = True) -> str | None:
        """The fastest layout that fits, by more than a tie if it is not the chosen one; None if none fits.

        Without `every` the first that is found to be ahead; without `exact` by lower bounds on seconds.
        """
        _, capacity = self._scaled(factor)
        preferred, best = None, inf
        if self.layouts[_CHOSEN].fits(capacity):
            preferred, best = _CHOSEN, self._seconds(_CHOSEN, factor, exact) * (1 - TIE)
        near = [words for words in self._bounds if self._bound(words, factor) < best]
        bounds = {words: self._seconds(words, factor, exact=False) for words in near}
        for words in sorted(bounds, key=bounds.__getitem__):
            if bounds[words] >= best or (preferred not in (None, _CHOSEN) and not every):
                break
            if self.layouts[words].fits(capacity):
                seconds = self._seconds(words, factor, exact)
                if seconds < best:
                    preferred, best = words, seconds
        return preferred

    def _bound(self, words: str, factor: float) -> float:
        """Lower bound on the step's seconds at `factor`, scaled from values that are known."""
        return max(value * min(1.0, other / factor) for other, value in self._bounds[words].items())

    def _seconds(self, words: str, factor: float, exact: bool) -> float:
        """Seconds of a layout's step at `factor`, or a lower bound."""
        costs, _ = self._scaled(factor)
        if (words, costs) not in self._times:
            layout = self.layouts[words]
            self._times[words, costs] = layout.time if costs is layout.costs else layout.time_on(costs)
        time = self._times[words, costs]
        seconds = time.seconds if exact else time.bound
        if words != _CHOSEN:
            self._bounds[words][factor] = max(seconds, self._bounds[words].get(factor, 0.0))
        return seconds
