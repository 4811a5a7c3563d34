"""Lower bounds on the seconds of all layouts in a branch of the search.

A step is at least as long as the compute and the messages inside stages, shared evenly by the ranks of a
pipeline (`microbatch_seconds`, with `Floor` and `ExpertMessages` while experts are not dealt out yet); at
least as long as its busiest rank, before which a first microbatch has come down and after which the last one
goes up again (`pace_bound`, and for every rank `rank_ends`); and at least as long as any path through the
schedule's lists. Which path is longest depends little on what stages cost: the path that a simulation has
found is remembered, and bounds every other layout with the same lists.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache
from itertools import accumulate
from operator import mul
from typing import NamedTuple

from meshwright.planner.cost.breakdown import PassSeconds, Product, Seconds
from meshwright.planner.cost.layer import LayerCost
from meshwright.planner.cost.stages import Contents, PlacedStages, parts, together
from meshwright.planner.group_shapes import GroupShape
from meshwright.planner.traffic.message import Message, Phase
from meshwright.schedule import MOST_HELD, Path, StageCost
from meshwright.spec.arithmetic import divisors
from meshwright.spec.layers import LayerKind
from meshwright.spec.pipeline_schedules import SCHEDULES


class Floor(LayerCost):
    """Least costs of blocks, however experts are dealt out: no messages, no product below its best rate.

    It is made for a layout with ep = etp = 1, and for a run without recomputation or offloading.
    """

    def _offloaded(self, passes: PassSeconds, kind: LayerKind) -> PassSeconds:
        return passes  # copies are fewest where most is recomputed

    def _routed_products(self) -> list[Product]:
        return [Product(self.own, self.shape.moe.experts, self.spec.model.hidden)]  # the router

    def _uncovered(self, passes: PassSeconds, listed: Iterable[Message]) -> PassSeconds:
        return passes  # experts' products, which messages may be beside, are added later

    def _launched(self, passes: PassSeconds, kind: LayerKind) -> PassSeconds:
        if not kind.has_experts:
            return super()._launched(passes, kind)
        moe, model = self.shape.moe, self.spec.model
        rows = _fewest_rows(self.tokens / self.spec.layout.tp * moe.top_k, moe.experts, moe.ffn)
        flops = 2.0 * rows * model.hidden * moe.ffn * (self.gates + 1)
        each = flops / self.kernels.large_rate(self.precision.products)
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


def microbatch_seconds(blocks: LayerCost, model: Contents, policy: str | None = None) -> float:
    """Seconds of one microbatch through the whole model, on the ranks of one stage.

    `policy` 'full' adds the recomputation of each block's forward, if `blocks` do not include it.
    """
    total = sum(count * passes.total for count, passes in parts(blocks, model))
    if policy == "full":
        kinds = model.backward(blocks.kinds)
        total += sum(count * blocks.seconds(kind).forward.total for count, kind in kinds)
    return total


class ExpertMessages:
    """Least seconds of a microbatch's messages to experts and back, on the ranks of one stage."""

    def __init__(self, blocks: LayerCost, model: Contents) -> None:
        moe, self._links = blocks.spec.model.moe, blocks.links
        self._routed = [(count, kind) for count, kind in model.by_kind(blocks.kinds) if kind.has_experts]
        if moe is not None and self._routed:
            tokens = blocks.tokens / blocks.spec.layout.tp * moe.top_k
            self._size = tokens * blocks.spec.model.hidden * blocks.width
            self._exposed = 2 * (1 - blocks.stack.overlap("expert"))
            self._hosts = [
                (count, each.host) for count, kind in self._routed for each in blocks.seconds(kind)[:2]
            ]

    def seconds(self, ep: int, etp: int) -> float:
        """Seconds with experts on ep x etp ranks, less those that the device waits for its host."""
        if ep * etp == 1 or not self._routed:
            return 0.0
        group = GroupShape(ep * etp, 1)
        once = self._exposed * self._links.collective("all_to_all", self._size * etp, group)
        return sum(count * max(0.0, once - host) for count, host in self._hosts)


class StageShape(NamedTuple):
    """`Contents.parts` of a rank and of what is before its first stage, and the number of stages before."""

    work: tuple[int, ...]
    before: tuple[int, ...]
    hops: int


def pace_setters(placed: PlacedStages) -> list[StageShape]:
    """The ranks that may set a step's pace: the first, the last, that of the head, and the fullest."""
    held = [together(mine) for mine in placed.by_rank]
    fullest = max(range(len(held)), key=lambda rank: (held[rank].blocks, rank))
    head = next(rank for rank, contents in enumerate(held) if contents.head)
    shapes = []
    for rank in sorted({0, len(held) - 1, head, fullest}):
        first = min(placed.own[rank])
        before = together(placed.contents[:first]).parts if first else ()
        shapes.append(StageShape(held[rank].parts, before, first))
    return shapes


class Pace(NamedTuple):
    """Seconds of a microbatch in each of `Contents`' parts, and of a message between stages."""

    total: tuple[float, ...]
    forward: tuple[float, ...]
    hop: float


def pace(blocks: LayerCost, model: Contents, hop: float) -> Pace:
    """The pace of a mesh whose stages are a message of `hop` seconds apart.

    Where parameters are frozen, it counts forwards only, since backwards differ from module to module.
    """
    listed = zip(model.parts, blocks.parts, strict=True)
    passes = [blocks.seconds(part) if count else PassSeconds() for count, part in listed]
    forward = tuple(part.forward.total for part in passes)
    total = tuple(part.total for part in passes) if model.trained is None else forward
    return Pace(total, forward, hop)


def pace_bound(shapes: Sequence[StageShape], pace: Pace, microbatches: int, whole: bool) -> float:
    """Seconds of a step at least: a rank's work, what comes down to it before, and up from it after.

    `whole` is true if backwards are not split.
    """
    once, hop = (pace.total, 2 * pace.hop) if whole else (pace.forward, pace.hop)
    return max(
        microbatches * sum(map(mul, work, pace.total)) + sum(map(mul, before, once)) + hops * hop
        for work, before, hops in shapes
    )


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
