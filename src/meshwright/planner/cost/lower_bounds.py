"""What every layout of a branch must take at least: seconds and bytes that no choice in it can avoid.

A step is at least as long as the compute and the messages inside stages, shared evenly by the ranks of a
pipeline (`microbatch_seconds`, with `Floor` and `Trips` for experts that are not dealt out yet); at
least as long as its busiest rank, before which a first microbatch has come down and after which the last
one goes up again (`paced`, and with every rank `rank_ends`); and at least as long as any path through the
schedule's lists. Which path is the longest depends on what stages cost, but little: the one that a
simulation has found is remembered, and bounds every other layout with the same lists.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple

from meshwright.planner.cost.breakdown import PassSeconds, Product, Seconds
from meshwright.planner.cost.kernels import peak
from meshwright.planner.cost.layer import LayerCost
from meshwright.planner.group_shapes import GroupShape
from meshwright.planner.layout_space import WHOLE
from meshwright.planner.traffic.messages import Message, Phase
from meshwright.schedule import MOST_HELD, Kind, Path, Schedule, StageCost, make
from meshwright.spec import ModelSpec
from meshwright.spec.arithmetic import divisors
from meshwright.spec.layout import HOLD_ALL


class Floor(LayerCost):
    """What blocks cost at least, however their experts are dealt out: no message, no product below its rate.

    It is made for a layout with ep = etp = 1, and a run that computes nothing again.
    """

    def _routed_products(self) -> list[Product]:
        return [Product(self.own, self._moe().experts, self.spec.model.hidden)]  # the router

    def _launched(self, passes: PassSeconds, routed: bool) -> PassSeconds:
        if not routed:
            return super()._launched(passes, routed)
        each = self._experts()
        with_experts = (seconds._replace(matmul=seconds.matmul + each) for seconds in passes[:3])
        return super()._launched(PassSeconds(*with_experts), routed)

    def _experts(self) -> float:
        """Seconds of the experts' products of one pass, at the rate of large ones."""
        moe, model, device = self._moe(), self.spec.model, self.kernels.device
        rows = _fewest_rows(self.tokens / self.spec.layout.tp * moe.top_k, moe.experts, moe.ffn)
        rate = peak(device, self.format) * device.rates.matmul * self.stack.matmul
        if self.format == "fp8":
            rate *= device.rates.fp8
        return 2.0 * rows * model.hidden * moe.ffn * (self.gates + 1) / rate


class Ground(Floor):
    """What blocks cost at least, however sequences are shared too: with as many tokens on a rank."""

    def _exposed(self, listed: Iterable[Message], core: float, *phases: Phase) -> Seconds:
        return super()._exposed(listed, core, *phases)._replace(context=0.0, expert=0.0)


@lru_cache(maxsize=1024)
def _fewest_rows(tokens: float, experts: int, channels: int) -> float:
    """Rows of whole experts, where each expert's are rounded to whole ones."""
    return min(
        max(1, round(tokens * etp / local)) * local / etp
        for local in (experts // ep for ep in divisors(experts))
        for etp in divisors(channels)
    )


def kinds(model: ModelSpec) -> list[tuple[int, bool]]:
    """(blocks, whether they have experts), without what the model has none of."""
    routed = sum(map(model.has_experts, range(model.layers)))
    return [(count, wanted) for count, wanted in ((model.layers - routed, False), (routed, True)) if count]


Kinds = Sequence[tuple[int, bool]]


def microbatch_seconds(blocks: LayerCost, of: Kinds, policy: str | None = None) -> float:
    """Seconds of one microbatch through the whole model, on the ranks of one stage.

    `policy` is what `blocks` are not made with: 'full' computes each block's forward again.
    """
    total = blocks.embedding().total + blocks.head().total
    for count, routed in of:
        passes = blocks.passes(routed)
        total += count * (passes.total + (passes.forward.total if policy == "full" else 0.0))
    return total


class Trips:
    """A microbatch's trips to experts and back, on the ranks of one stage."""

    def __init__(self, blocks: LayerCost, of: Kinds) -> None:
        moe = blocks.spec.model.moe
        self._links, self._count = blocks.links, sum(count for count, routed in of if routed)
        if moe is None or not self._count:
            self._count = 0
            return
        tokens = blocks.tokens / blocks.spec.layout.tp * moe.top_k
        self._size = tokens * blocks.spec.model.hidden * blocks.width
        self._exposed = 2 * (1 - blocks.stack.overlap_expert)
        self._hosts = [each.host for each in blocks.passes(True)[:2]]

    def seconds(self, folded: int, etp: int) -> float:
        """With experts on `folded` = ep x etp ranks, at least: less what the device waits for its host."""
        if folded == 1 or not self._count:
            return 0.0
        once = self._exposed * self._links.collective("all_to_all", self._size * etp, GroupShape(folded, 1))
        return self._count * sum(max(0.0, once - host) for host in self._hosts)


class StageShape(NamedTuple):
    """What a rank of a cut has to do, and what comes before it: (dense, routed) blocks, embedding, head."""

    work: tuple[int, int, int, int]
    before: tuple[int, int, int, int]
    hops: int


def rows(
    blocks: Sequence[int], routed_before: Sequence[int], own: Sequence[Sequence[int]]
) -> list[StageShape]:
    """Of the ranks that may set a step's pace: the first, the last, that of the head, and the fullest."""
    ends = list(accumulate(blocks, initial=0))
    count = [sum(blocks[stage] for stage in mine) for mine in own]
    last, most = len(blocks) - 1, max(count)
    fullest = max(rank for rank, each in enumerate(count) if each == most)
    head = next(rank for rank, mine in enumerate(own) if last in mine)
    found = []
    for rank in sorted({0, len(own) - 1, head, fullest}):
        mine, first = own[rank], min(own[rank])
        routed = sum(routed_before[ends[stage + 1]] - routed_before[ends[stage]] for stage in mine)
        before = routed_before[ends[first]]
        found.append(
            StageShape(
                (count[rank] - routed, routed, int(0 in mine), int(last in mine)),
                (ends[first] - before, before, int(first > 0), 0),
                first,
            )
        )
    return found


class Pace(NamedTuple):
    """Seconds of a microbatch by what it goes through, as `StageShape` counts it, and of a message."""

    forward: tuple[float, ...]
    back: tuple[float, ...]
    weight: tuple[float, ...]
    hop: float


def pace(blocks: LayerCost, of: Kinds, hop: float) -> Pace:
    """Of a mesh whose stages are a message of `hop` seconds apart."""
    wanted = {routed for _, routed in of}
    each = [blocks.passes(routed) if routed in wanted else PassSeconds() for routed in (False, True)]
    each += [blocks.embedding(), blocks.head()]
    return Pace(
        tuple(passes.forward.total for passes in each),
        tuple(passes.input.total + passes.again.total for passes in each),
        tuple(passes.weight.total for passes in each),
        hop,
    )


def paced(found: Sequence[StageShape], at: Pace, microbatches: int, whole: bool) -> float:
    """Seconds of a step at least: a rank's work, what comes down to it before, and up from it after."""
    most = 0.0
    for work, before, hops in found:
        seconds = hops * at.hop * (2 if whole else 1)
        for own, earlier, forward, back, weight in zip(work, before, *at[:3], strict=True):
            seconds += microbatches * own * (forward + back + weight) + earlier * forward
            if whole:
                seconds += earlier * (back + weight)
        most = max(most, seconds)
    return most


class ScheduleShape(NamedTuple):
    """What each rank of a schedule holds, whatever its stages cost."""

    most: tuple[int, ...]
    """Rank -> most microbatches of its stages together."""
    held: tuple[tuple[tuple[int, ...], ...], ...]
    """Rank -> how many of each of its stages when it holds most: all that may be it."""


@lru_cache(maxsize=4096)
def shape(name: str, ranks: int, virtual: int, microbatches: int) -> ScheduleShape:
    """Of the schedule of that name."""
    if name in HOLD_ALL:
        return ScheduleShape((virtual * microbatches,) * ranks, (((microbatches,) * virtual,),) * ranks)
    made = schedule(name, ranks, virtual, microbatches)
    most, held = [], []
    for rank, listed in enumerate(made.actions):
        own = {stage: place for place, stage in enumerate(made.stages_of(rank))}
        now, rising = [0] * len(own), False
        found: set[tuple[int, ...]] = set()
        for kind, stage, _ in listed:
            if kind is Kind.F:
                now[own[stage]] += 1
                rising = True
            elif kind is not Kind.I:
                if rising:
                    found.add(tuple(now))
                now[own[stage]] -= 1
                rising = False
        most.append(max(map(sum, found)))
        held.append(_largest(found))
    return ScheduleShape(tuple(most), tuple(held))


def _largest(found: set[tuple[int, ...]]) -> tuple[tuple[int, ...], ...]:
    """Those that no other has as many of each as."""
    kept: list[tuple[int, ...]] = []
    for each in sorted(found, key=sum, reverse=True):
        if not any(all(a <= b for a, b in zip(each, other, strict=True)) for other in kept):
            kept.append(each)
    return tuple(kept)


@lru_cache(maxsize=16)
def schedule(name: str, ranks: int, virtual: int, microbatches: int) -> Schedule:
    """The lists, which are large: few are kept."""
    return make(name, ranks, virtual, microbatches)


def rank_ends(
    costs: Sequence[StageCost],
    own: Sequence[Sequence[int]],
    hop: float,
    name: str,
    microbatches: int,
    paths: Sequence[Path] = (),
) -> list[float]:
    """Rank -> when its last action ends, at the earliest.

    `own` are each rank's stages, `hop` the seconds of a message between ranks, `name` that of the schedule,
    and `paths` those of its lists that are known.
    """
    whole = name in WHOLE
    back = [cost.input + cost.weight if whole else cost.input for cost in costs]
    rank_of = {stage: rank for rank, mine in enumerate(own) for stage in mine}
    hops = [hop * (rank_of[stage] != rank_of[stage + 1]) for stage in range(len(costs) - 1)]
    fill = list(accumulate((cost.forward + hop for cost, hop in zip(costs, hops, strict=False)), initial=0.0))
    work = {min(mine): sum(costs[stage].forward + back[stage] for stage in mine) for mine in own}
    last, later = [0.0] * len(costs), 0.0
    for stage in reversed(range(len(costs))):
        found = later + (hops[stage] if stage < len(hops) else 0.0) + back[stage]
        if stage in work:
            found = max(found, fill[stage] + microbatches * work[stage])
        last[stage] = later = found
    idle = _before_backward(costs, own, hops, name)
    ends = []
    for mine, waits in zip(own, idle, strict=True):
        first = min(mine)
        every = sum(costs[stage].forward + costs[stage].input + costs[stage].weight for stage in mine)
        rest = 0.0 if whole else costs[first].weight
        ends.append(max(last[first] + rest, max(fill[first], waits) + microbatches * every))
    for path in paths:
        ends[path.rank] = max(ends[path.rank], path.seconds(costs, hop))
    return ends


def _before_backward(
    costs: Sequence[StageCost], own: Sequence[Sequence[int]], hops: Sequence[float], name: str
) -> list[float]:
    """Rank -> seconds that it is idle at least until a first backward comes to it.

    Until then it can compute no more forwards than the schedule lets it hold activations.
    """
    if name not in MOST_HELD:
        return [0.0] * len(own)
    down = sum(cost.forward for cost in costs) + sum(hops)
    ups = [cost.input + hop for cost, hop in zip(costs[1:], hops, strict=True)]
    comes = [down + up for up in accumulate(reversed(ups), initial=0.0)][::-1]
    most = MOST_HELD[name](len(own))
    return [comes[max(mine)] - most * max(costs[stage].forward for stage in mine) for mine in own]
