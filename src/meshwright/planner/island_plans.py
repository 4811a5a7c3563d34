"""The choice of islands for a slow link: how many, how often they exchange, in which parts, how late, and in
which format.

The loss that a period costs is not known to a planner, which keeps to periods that were published: DiLoCo
with 8 islands and 500 steps (Douillard et al. 2023, arXiv 2311.08105), scaling laws over periods of 30 to
100 steps (Charles et al. 2025, arXiv 2503.09799), Streaming DiLoCo with 100 steps, delays of about 5, and
messages in fp4 (E3M0) whose loss is that of fp32 (Douillard et al. 2025, arXiv 2501.18512). The shortest
period up to the longest of these that hides the link is taken, as the one nearest to synchronous training.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from meshwright.hardware.cluster import Cluster, Level
from meshwright.planner.explain.candidate import Candidate
from meshwright.planner.explain.link_load import communication
from meshwright.planner.group_shapes import axes
from meshwright.planner.search.problem import SearchProblem
from meshwright.spec import UserError
from meshwright.spec.outer import OuterFormat, OuterSpec
from meshwright.spec.rules import is_accepted
from meshwright.units import percent, seconds

LONGEST, USUAL, LATEST, MANY = 500, 100, 5, 8
"""Steps of the longest period published, of the longest that scaling laws are over, of the usual delay, and
the number of islands of both."""
SMALL: OuterFormat = "fp4"
"""The format of messages that was published with the fewest bits."""
_SOURCES = (
    "its loss is not predicted; published are 8 islands with periods of 500 steps (Douillard et al. 2023), "
    "scaling laws over 30 to 100 (Charles et al. 2025), and fragments at 100 with delays of about 5, in fp4, "
    "too (Douillard et al. 2025)"
)


@dataclass(frozen=True)
class Exchanges:
    """A way to exchange, and the share of the time that islands wait for it."""

    outer: OuterSpec
    exposed: float

    def adds_to(self, chosen: Exchanges) -> bool:
        """True if it has a shorter period than the one that is chosen, or does without its means."""
        mine, other = self.outer, chosen.outer
        return (
            (mine.every, mine.delay) < (other.every, other.delay)
            or mine.compressed < other.compressed
            or (mine.fragments == 1 and mine.delay == 0 and (other.fragments > 1 or other.delay > 0))
        )

    @property
    def words(self) -> str:
        """The keys of `outer` that say how."""
        keys = [f"outer.every = {self.outer.every}"]
        if self.outer.fragments > 1:
            keys.append(f"outer.fragments = {self.outer.fragments}")
        if self.outer.delay:
            keys.append(f"outer.delay = {self.outer.delay}")
        if self.outer.compressed:
            keys.append(f"outer.format = {self.outer.format!r}")
        return ", ".join(keys)

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return {"outer": self.outer.model_dump(mode="json"), "exposed": self.exposed}


@dataclass(frozen=True)
class IslandChoice:
    """Islands as they were chosen, and what they were compared with."""

    count: int
    """1 where there are none."""
    chosen: Exchanges | None
    others: Sequence[Exchanges]
    """Other ways to exchange, with their shortest periods: whole, streamed in fragments with a delay, or
    that in 4 bits."""
    synchronous: Candidate | None
    """The fastest layout whose ranks all train together; None where none fits."""
    waiting: float
    """The share of its time that it waits for the outermost level of the cluster."""
    level: Level
    """The level that joins islands, or the outermost one."""
    limit: float
    """The largest share of the time that islands should wait."""
    seconds: float = 0.0
    """Seconds of a step of the plan with these islands."""

    def of(self, plan: Candidate) -> IslandChoice:
        """The choice with the step of a plan, and the share of it that its islands wait."""
        if self.chosen is None:
            return self
        chosen = replace(self.chosen, exposed=plan.time.exchange.exposed / plan.seconds)
        return replace(self, chosen=chosen, seconds=plan.seconds)

    @property
    def words(self) -> str:
        """The choice and its reasons, in sentences."""
        link = f"'{self.level.name}' ({self.level.loaded / 1e6:,.4g} MB/s a device)"
        together = "no layout of all ranks together fits"
        if self.synchronous is not None:
            together = (
                f"all ranks together take {seconds(self.synchronous.seconds)} a step, of which they wait "
                f"{percent(self.waiting)} for {link}"
            )
        if self.chosen is None:
            return f"Islands: none are faster: {together}, at most {percent(self.limit)} asked"
        late = self.chosen.exposed > self.limit
        found = (
            f"Islands: {self.count}, with {self.chosen.words}, which wait {percent(self.chosen.exposed)} of "
            f"the time for {link}, {'more than the' if late else 'at most'} {percent(self.limit)} asked; "
            f"{together}"
        )
        if late:
            found += f". No period up to {LONGEST} steps hides that link"
        if self.synchronous is not None and self.seconds > self.synchronous.seconds:
            found += f". All ranks together are {self.seconds / self.synchronous.seconds:.1f} times as fast"
        better = (each for each in self.others if each.exposed <= self.limit and each.adds_to(self.chosen))
        if would := "; or ".join(each.words for each in better):
            found += f". {would} would do, too"
        many = f", and more than {MANY} islands were seldom tried" if self.count > MANY else ""
        return (
            f"{found}. The shortest period with which the fastest layout hides the link is taken: "
            f"{_SOURCES}{many}"
        )

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "count": self.count,
            "chosen": self.chosen and self.chosen.to_json(),
            "others": [way.to_json() for way in self.others],
            "synchronous": self.synchronous and self.synchronous.figures(),
            "synchronous_exposed": self.waiting,
            "level": self.level.name,
            "limit": self.limit,
        }


def choose_islands(
    problem: SearchProblem, wanted: int | str, keys: Mapping[str, Any], limit: float
) -> tuple[SearchProblem, IslandChoice]:
    """The run with the fewest islands, or as many as are `wanted`, that wait at most a share `limit` of time.

    'auto' takes none where ranks that train together wait no more for the outermost level of the cluster, or
    are faster. `keys` of `outer` stay. Raises `UserError`.
    """
    if wanted != "auto" and problem.ranks % int(wanted):
        raise UserError(
            f"--islands: {wanted} islands cannot have equal shares of {problem.ranks} devices; give "
            + " or ".join(str(each) for each in _nearest_divisors(problem.ranks, int(wanted)))
        )
    outermost, together = problem.cluster.levels[-1], _fastest(problem)
    waiting = _waiting(together, outermost) if together is not None else 0.0
    none = IslandChoice(1, None, (), together, waiting, outermost, limit)
    if wanted == "auto" and together is not None and waiting <= limit:
        return problem, none
    found: list[tuple[SearchProblem, IslandChoice]] = []
    for count in _counts(problem.cluster) if wanted == "auto" else [int(wanted)]:
        try:
            tried = problem.with_replicas(count, outer={"every": LONGEST, **keys})
            best = _fastest(tried)
        except UserError:
            if wanted == "auto":
                continue  # samples that so many islands cannot share
            raise
        if best is not None and (wanted != "auto" or together is None or best.beats(together)):
            chosen, *others = _exchanges(best, keys, limit)
            level = best.costs.links.outermost(axes(best.spec.layout).replicate)
            choice = replace(none, count=count, chosen=chosen, others=others, level=level)
            base = tried.base.model_copy(update={"outer": chosen.outer})
            found.append((replace(tried, base=base), choice))
            if chosen.exposed <= limit:
                break
    if not found and wanted != "auto":
        return problem.with_replicas(int(wanted), outer={"every": LONGEST, **keys}), none
    return min(found, key=lambda each: max(limit, _exposed(each[1])), default=(problem, none))


def _nearest_divisors(count: int, wanted: int) -> list[int]:
    """Divisors of `count` from 2 up: the largest below `wanted`, and the smallest above it."""
    divisors = [each for each in range(2, count + 1) if count % each == 0]
    below, above = [each for each in divisors if each < wanted], [each for each in divisors if each > wanted]
    return below[-1:] + above[:1]


def _exposed(choice: IslandChoice) -> float:
    return choice.chosen.exposed if choice.chosen is not None else 0.0


def _fastest(problem: SearchProblem) -> Candidate | None:
    """The fastest layout, which fits with one half at least where no one is surer to; None if none fits."""
    for each in (problem, replace(problem, unsure=True)):
        if best := each.search(1).best:
            return Candidate(best[0].spec, problem.costs)
    return None


def _waiting(found: Candidate, level: Level) -> float:
    """The share of a step that is spent waiting for messages over a level of the cluster."""
    loads = communication(found.spec, found.costs, found.time)
    over = (load.exposed for load in loads if level.name in [each.level for each in load.levels])
    return sum(over) / found.seconds


def _counts(cluster: Cluster) -> Iterator[int]:
    """Numbers of islands, the fewest first: the groups of each level below the outermost, or all devices."""
    sizes = [level.devices for level in reversed(cluster.levels[:-1])] or [1]
    yield from (cluster.count // size for size in sizes if cluster.count % size == 0 and cluster.count > size)


def _exchanges(best: Candidate, keys: Mapping[str, Any], limit: float) -> list[Exchanges]:
    """The way to exchange for a layout of islands, and the others, with the shortest period each: whole where
    a usual period does, else in fragments with a delay, else these in 4 bits."""
    ways = [_shortest(best, {"fragments": 1, "delay": 0} | dict(keys), limit)]
    if not keys.keys() >= {"fragments", "delay"}:
        ways.append(_streaming(best, keys, limit))
    blocks = best.spec.model_copy(update={"outer": OuterSpec(every=1, format=SMALL)})
    if not keys.keys() & {"format", "top_k"} and is_accepted(blocks):
        ways.append(_streaming(best, {"format": SMALL} | dict(keys), limit))
    usual = (each for each in ways if each.exposed <= limit and each.outer.every <= USUAL)
    chosen = next(usual, None) or min(ways, key=lambda each: (max(limit, each.exposed), each.outer.every))
    return [chosen, *(each for each in ways if each is not chosen)]


def _streaming(best: Candidate, keys: Mapping[str, Any], limit: float) -> Exchanges:
    """The shortest period in fragments with a delay, the shortest that does."""
    most = min(best.spec.model.layers, best.spec.outer.every)
    parts = [keys["fragments"]] if "fragments" in keys else [2**n for n in range(most.bit_length())]
    tried = [_shortest(best, {"delay": LATEST} | dict(keys) | {"fragments": count}, limit) for count in parts]
    found = min(tried, key=lambda each: (max(limit, each.exposed), each.outer.every))
    return found if "delay" in keys else _sooner(best, found, limit)


def _shortest(best: Candidate, keys: Mapping[str, Any], limit: float) -> Exchanges:
    """The shortest period with which islands wait at most `limit`, or the longest that may be."""
    low, high = max(keys["fragments"], keys["delay"] + 1), LONGEST
    if "every" in keys:
        return _with(best, keys)
    while low < high:
        middle = (low + high) // 2
        if _with(best, {**keys, "every": middle}).exposed <= limit:
            high = middle
        else:
            low = middle + 1
    return _with(best, {**keys, "every": high})


def _sooner(best: Candidate, found: Exchanges, limit: float) -> Exchanges:
    """An exchange like `found`, with the shortest delay that does."""
    keys = found.outer.model_dump()
    delays = (_with(best, {**keys, "delay": delay}) for delay in range(found.outer.delay))
    return next((each for each in delays if each.exposed <= limit), found)


def _with(best: Candidate, keys: Mapping[str, Any]) -> Exchanges:
    """A way to exchange, and what a layout waits for it."""
    outer = OuterSpec.model_validate({**best.spec.outer.model_dump(), **keys})
    other = Candidate(best.spec.model_copy(update={"outer": outer}), best.costs, best.times)
    return Exchanges(outer, other.time.exchange.exposed / other.seconds)
