"""Lower bounds on the seconds of all layouts in a branch of the search.

A step is at least as long as the compute and the messages inside stages, shared evenly by the ranks of a
pipeline (`microbatch_seconds`, with `Floor` and `ExpertFloor` while experts are not dealt out yet); at
least as long as its busiest rank, before which a first microbatch has come down and after which the last one
goes up again (`pace_bound`, and for every rank `rank_ends`); and at least as long as any path through the
schedule's lists. Which path is longest depends little on what stages cost: the path that a simulation has
found is remembered, and bounds every other layout with the same lists.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache
from itertools import accumulate, chain
from operator import add, le, mul, sub
from statistics import fmean
from typing import Any, NamedTuple, Protocol, Self, TypeVar

from meshwright.planner.cost.breakdown import PassSeconds, Product, Seconds
from meshwright.planner.cost.layer import LayerCost
from meshwright.planner.cost.stages import Contents, PlacedStages, parts, together
from meshwright.planner.group_shapes import GroupShape
from meshwright.planner.traffic.message import Message, Phase
from meshwright.schedule import MOST_HELD, Path, StageCost
from meshwright.spec.arithmetic import divisors
from meshwright.spec.layers import LayerKind
from meshwright.spec.pipeline_schedules import SCHEDULES


class RoutedCost(LayerCost):
    """Costs of blocks, and which of them depend on the ranks that experts are dealt out to."""

    def routed(self, kind: LayerKind) -> tuple[float, float, float]:
        """Seconds of the products of routed experts in the forward and in both halves of the backward, and of
        all memory-bound operators."""
        products = [p for p in self.products(kind) if p.experts]
        turned = (p._replace(n=p.k, k=p.n) for p in products)
        weights = (p._replace(m=p.n, n=p.k, k=p.m) for p in products)
        forward, input, weight = (sum(map(self._product, each)) for each in (products, turned, weights))
        moved, moved_back = map(self.kernels.moved, self._bytes(kind))
        return forward + moved, input + moved_back, weight


class Floor(RoutedCost):
    """Least costs of blocks, however experts are dealt out: no messages, no product below its best rate.

    It is made for a layout with ep = etp = 1, and for a run without recomputation or offloading.
    """

    def _offloaded(self, passes: PassSeconds, kind: LayerKind) -> PassSeconds:
        return passes  # copies are fewest where most is recomputed

    def _routed_products(self) -> list[Product]:
        return [Product(self.own, self.shape.moe.experts, self.spec.model.hidden)]  # the router

    def routed(self, kind: LayerKind) -> tuple[float, float, float]:
        forward, input, weight = super().routed(kind)
        each = self._experts_product()
        return forward + each, input + each, weight + each

    def _uncovered(self, passes: PassSeconds, listed: Iterable[Message]) -> PassSeconds:
        return passes  # experts' products, which messages may be beside, are added later

    def _experts_product(self) -> float:
        """Seconds of the products of routed experts in one pass."""
        moe, model = self.shape.moe, self.spec.model
        rows = _fewest_rows(self.shape.copies, moe.experts, moe.ffn)
        flops = 2.0 * rows * model.hidden * moe.ffn * (self.gates + 1)
        return flops / self.kernels.large_rate(self.precision.products)

    def _launched(self, passes: PassSeconds, kind: LayerKind) -> PassSeconds:
        if not kind.has_experts:
            return super()._launched(passes, kind)
        each = self._experts_product()
        with_experts = (seconds._replace(matmul=seconds.matmul + each) for seconds in passes[:3])
        return super()._launched(PassSeconds(*with_experts), kind)


class SharedFloor(Floor):
    """Least costs of blocks, however sequences are shared too: with the same number of tokens on a rank."""

    def _exposed(self, listed: Iterable[Message], core: float, *phases: Phase) -> Seconds:
        return super()._exposed(listed, core, *phases)._replace(context=0.0, expert=0.0)

    def _ring_bytes(self) -> float:
        return 0.0

    def packed(self, block: bool) -> float:
        if block and self.counted and not self.spec.train.compile:
            return 0.0  # as of one context rank
        return super().packed(block)


@lru_cache(maxsize=1024)
def _fewest_rows(tokens: float, experts: int, channels: int) -> float:
    """Rows of whole experts, each expert's rounded to whole ones, in the best case."""
    return min(
        max(1, round(tokens * etp / local)) * local / etp
        for local in (experts // ep for ep in divisors(experts))
        for etp in divisors(channels)
    )


def repeats_forward(blocks: LayerCost, policy: str | None) -> bool:
    """True if each block's forward is computed again, whole.

    A program that keeps outputs by name leaves a part of it out, and has none of it in bounds.
    """
    return policy == "full" and blocks.stack.selective != "named"


def microbatch_seconds(blocks: LayerCost, model: Contents, policy: str | None = None) -> float:
    """Seconds of one microbatch through the whole model, on the ranks of one stage.

    `policy` 'full' adds the recomputation of each block's forward, if `blocks` do not include it.
    """
    total = sum(count * passes.total for count, passes in parts(blocks, model))
    if repeats_forward(blocks, policy):
        kinds = model.backward(blocks.kinds)
        total += sum(count * blocks.seconds(kind).forward.total for count, kind in kinds)
    return total


class ExpertFloor:
    """Least seconds of a microbatch's experts and of the messages to them and back, beyond those of a floor,
    on the ranks of one stage.

    `known` are seconds of work that floors with the same tokens on a rank share.
    """

    def __init__(
        self, blocks: Floor, model: Contents, known: dict[tuple[Any, ...], tuple[float, ...]]
    ) -> None:
        moe, self._blocks, self._known = blocks.spec.model.moe, blocks, known
        self._routed = [(count, kind) for count, kind in model.by_kind(blocks.kinds) if kind.has_experts]
        self._passes = 3 if model.trained is None else 1
        """Those in which experts are known to compute: frozen ones may have no backward."""
        if moe is not None and self._routed:
            self._size = blocks.shape.copies * blocks.spec.model.hidden * blocks.width
            self._exposed = 2 * (1 - blocks.stack.overlap("expert"))
            self._hosts = {kind: [each.host for each in blocks.seconds(kind)[:3]] for _, kind in self._routed}

    def seconds(self, ep: int, etp: int) -> float:
        """Seconds with experts on ep x etp ranks, less those that the device waits for its host."""
        if not self._routed:
            return 0.0
        once = 0.0
        if ep * etp > 1:
            group = GroupShape(ep * etp, 1)
            once = self._exposed * self._blocks.links.collective("all_to_all", self._size * etp, group)
        found = 0.0
        for count, kind in self._routed:
            sent = (once, once, 0.0)
            each = zip(sent, self._work(kind, ep, etp), self._hosts[kind], strict=True)
            found += count * sum(max(0.0, message + work - host) for message, work, host in each)
        return found

    def _work(self, kind: LayerKind, ep: int, etp: int) -> tuple[float, ...]:
        """Seconds of products and memory-bound operators in each pass, beyond those of the floor."""
        blocks, layout = self._blocks, self._blocks.spec.layout
        key = layout.tp, layout.sequence_parallel, blocks.tokens, ep, etp, kind
        if key not in self._known:
            folded = layout.model_copy(update={"ep": ep, "etp": etp})
            spec = blocks.spec.model_copy(update={"layout": folded})
            cost = RoutedCost(spec, blocks.format, blocks.stack, blocks.kernels, blocks.links, blocks.dense)
            pairs = enumerate(zip(cost.routed(kind), blocks.routed(kind), strict=True))
            self._known[key] = tuple(
                max(0.0, more - least) if place < self._passes else 0.0 for place, (more, least) in pairs
            )
        return self._known[key]


class StageShape(NamedTuple):
    """`Contents.parts` of a stage or a rank and of what is before its first stage, and the messages to it."""

    work: tuple[float, ...]
    before: tuple[float, ...]
    hops: float


class MeanShape(NamedTuple):
    """`Contents.parts` that bound when the mean rank's last backward ends: those of each microbatch, those of
    one forward before, and of one backward after; and messages."""

    work: tuple[float, ...]
    down: tuple[float, ...]
    up: tuple[float, ...]
    hops: float


class CutShape(NamedTuple):
    """The shapes that bound a step under a pipeline's stages and schedule."""

    whole: bool
    """True if backwards are not split."""
    setters: tuple[StageShape, ...]
    """The ranks that may set a step's pace, and the last stage."""
    means: tuple[MeanShape, ...]

    def within(self, other: CutShape) -> bool:
        """True if `pace_bound` of it is never above that of another."""
        if self.whole > other.whole:
            return False
        pairs = (self.setters, other.setters), (self.means, other.means)
        return all(any(_within(one, each) for each in more) for mine, more in pairs for one in mine)


def _within(one: StageShape | MeanShape, other: StageShape | MeanShape) -> bool:
    """True if a shape takes no longer than another, whatever parts and messages take."""
    *mine, hops = one
    *more, most = other
    return hops <= most and all(map(le, chain(*mine), chain(*more)))


def cut_shape(placed: PlacedStages, whole: bool) -> CutShape:
    """The shape of stages on their ranks: of ranks the first, the last, that of the head, and the fullest."""
    held = [together(mine) for mine in placed.by_rank]
    fullest = max(range(len(held)), key=lambda rank: (held[rank].blocks, rank))
    head = next(rank for rank, contents in enumerate(held) if contents.head)
    before = _before(placed)
    ranks = [StageShape(held[rank].parts, *before[min(mine)]) for rank, mine in enumerate(placed.own)]
    setters = [ranks[rank] for rank in sorted({0, len(held) - 1, head, fullest})]
    if len(placed.contents) > len(held):
        setters.append(StageShape(placed.contents[-1].parts, *before[-1]))
    nothing = (0.0,) * len(ranks[0].work)
    means = [_mean(MeanShape(work, down, nothing, hops) for work, down, hops in ranks)]
    if whole:  # the last rank's backward goes up to the others
        last = ranks[-1]
        rest = ((tuple(map(sub, last.before, down)), last.hops - hops) for _, down, hops in ranks)
        means.append(_mean(MeanShape(last.work, last.before, up, last.hops + more) for up, more in rest))
    return CutShape(whole, tuple(setters), tuple(means))


def _before(placed: PlacedStages) -> list[tuple[tuple[int, ...], int]]:
    """Parts before each stage, and messages between ranks on the way to it."""
    rank_of = {stage: rank for rank, mine in enumerate(placed.own) for stage in mine}
    parts, hops = (0,) * len(placed.contents[0].parts), 0
    found = [(parts, hops)]
    for stage, contents in enumerate(placed.contents[:-1]):
        parts, hops = tuple(map(add, parts, contents.parts)), hops + (rank_of[stage] != rank_of[stage + 1])
        found.append((parts, hops))
    return found


def _mean(shapes: Iterable[MeanShape]) -> MeanShape:
    *parts, hops = zip(*shapes, strict=True)
    work, down, up = (tuple(map(fmean, zip(*each, strict=True))) for each in parts)
    return MeanShape(work, down, up, fmean(hops))


class _Ordered(Protocol):
    """Something that may be within another: never above it, whatever the seconds of their parts are."""

    def within(self, other: Self, /) -> bool: ...


_Bound = TypeVar("_Bound", bound=_Ordered)


def minimal(bounds: Iterable[_Bound]) -> list[_Bound]:
    """The bounds that are needed for the least of all: those that no other one is within."""
    found: list[_Bound] = []
    for bound in bounds:
        if not any(each.within(bound) for each in found):
            found = [*(each for each in found if not bound.within(each)), bound]
    return found


class Pace(NamedTuple):
    """Seconds of a microbatch in each of `Contents`' parts, and of a message between stages."""

    total: tuple[float, ...]
    forward: tuple[float, ...]
    path: tuple[float, ...]
    """Without the gradients of weights, which a split backward puts off."""
    hop: float


def pace(blocks: LayerCost, model: Contents, hop: float, policy: str | None = None) -> Pace:
    """The pace of a mesh whose stages are a message of `hop` seconds apart; `policy` as in
    `microbatch_seconds`.

    Where parameters are frozen, it counts forwards only, since backwards differ from module to module.
    """
    listed = zip(model.parts, blocks.parts, strict=True)
    passes = [blocks.seconds(part) if count else PassSeconds() for count, part in listed]
    forward = tuple(part.forward.total for part in passes)
    if model.trained is not None:
        return Pace(forward, forward, forward, hop)
    repeated = repeats_forward(blocks, policy)
    again = [seconds if repeated else 0.0 for seconds in (*forward[:-2], 0.0, 0.0)]
    total = tuple(part.total + more for part, more in zip(passes, again, strict=True))
    path = tuple(each - part.weight.total for each, part in zip(total, passes, strict=True))
    return Pace(total, forward, path, hop)


def pace_bound(shape: CutShape, pace: Pace, microbatches: int, data: float = 0.0) -> float:
    """Seconds of a step at least: a rank's work, what comes down to it before, and up from it after.

    `data` are seconds of the mean rank beside its parts, and after its last backward.
    """
    setters, mean = pace_bounds(shape, pace, microbatches)
    return max(setters, mean + data)


def pace_bounds(shape: CutShape, pace: Pace, microbatches: int) -> tuple[float, float]:
    """`pace_bound` by the ranks that may set the pace, and by the mean rank without `data`."""
    found = 0.0
    for work, before, hops in shape.setters:
        every, down = sum(map(mul, work, pace.total)), hops * pace.hop
        if shape.whole:
            found = max(found, microbatches * every + sum(map(mul, before, pace.total)) + 2 * down)
            continue
        found = max(found, microbatches * every + sum(map(mul, before, pace.forward)) + down)
        both = microbatches * sum(map(mul, work, pace.path)) + sum(map(mul, before, pace.path))
        found = max(found, both + 2 * down)
    back = tuple(map(sub, pace.total, pace.forward))
    mean = 0.0
    for work, ahead, up, hops in shape.means:
        each = microbatches * sum(map(mul, work, pace.total)) + sum(map(mul, ahead, pace.forward))
        mean = max(mean, each + sum(map(mul, up, back)) + hops * pace.hop)
    return found, mean


def rank_ends(
    costs: Sequence[StageCost],
    own: Sequence[Sequence[int]],
    hop: float,
    name: str,
    microbatches: int,
    paths: Sequence[Path] = (),
) -> list[float]:
    """Earliest seconds at which each rank's last action can end.

    `own` are each rank's stages, `hop` the seconds of a message between ranks, `name` the schedule's, and
    `paths` the known ones through its lists.
    """
    whole = not SCHEDULES[name].splits
    back = [cost.input + cost.weight if whole else cost.input for cost in costs]
    rank_of = {stage: rank for rank, mine in enumerate(own) for stage in mine}
    hops = [hop * (rank_of[stage] != rank_of[stage + 1]) for stage in range(len(costs) - 1)]
    fill = list(accumulate((cost.forward + hop for cost, hop in zip(costs, hops, strict=False)), initial=0.0))
    work = {min(mine): sum(costs[stage].forward + back[stage] for stage in mine) for mine in own}
    last, later = [0.0] * len(costs), 0.0
    for stage in reversed(range(len(costs))):
        end = later + (hops[stage] if stage < len(hops) else 0.0) + back[stage]
        if stage in work:
            end = max(end, fill[stage] + microbatches * work[stage])
        last[stage] = later = end
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
    """Least idle seconds of each rank before a first backward reaches it.

    Until then it can compute no more forwards than the schedule lets it hold activations.
    """
    if name not in MOST_HELD:
        return [0.0] * len(own)
    down = sum(cost.forward for cost in costs) + sum(hops)
    ups = [cost.input + hop for cost, hop in zip(costs[1:], hops, strict=True)]
    comes = [down + up for up in accumulate(reversed(ups), initial=0.0)][::-1]
    most = MOST_HELD[name](len(own))
    return [comes[max(mine)] - most * max(costs[stage].forward for stage in mine) for mine in own]
