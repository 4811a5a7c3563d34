"""Bytes of parameters, gradients and optimiser states that one rank holds, exactly as the program holds them.

A unit (the embedding, a block but for routed experts, these, the head) has its parameters in one buffer, of
which each of n ranks stores a part; rows that n does not divide are padded. Its P numbers, padding included,
take, with b bytes to compute in, r on the wire and m of masters (cf. Rajbhandari et al. 2020, §3):

                    compute copy    stored      gradients               Adam's moments
    n = 1           P b, or none    P m         P r, and P m or none    2 P m
    ZeRO-1          P b             P m / n     P r, or P m             2 P m / n
    ZeRO-2          P b             P m / n     P m / n                 2 P m / n
    ZeRO-3          none            P m / n     P m / n                 2 P m / n

"or none" where both formats are one: then both are the same memory. Gradients of ZeRO-1, and of a pipeline in
ZeRO-2 and 3 too, wait whole for the step's last microbatch, if there are several, and are added up in the
format of the masters: P m instead of P r, also for n = 1, where that is then their only memory. Else they go
as they come.
Adam counts its steps in a number of 4 bytes for each buffer that decays, and for each that does not.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from functools import lru_cache

from meshwright.planner.rank_view import RankView, Widths, part_elements, place_of, widths
from meshwright.planner.traffic.traffic_moe import balance_counts
from meshwright.schedule import Action, Kind, make
from meshwright.spec import RunSpec
from meshwright.spec.parameters import Piece

STEP_COUNT, EXACT_COUNT, BIAS = 4, 8, 4
"""Bytes of Adam's count of steps, of one number that a step counts of its balance, of a router's bias."""


@dataclass(frozen=True)
class States:
    """Bytes on one rank, each at the most that it takes in a step."""

    parameters: int
    """What computes, where that stands through the step; with ZeRO-3 it is a buffer."""
    masters: int
    """What the optimiser updates, where that is not what computes."""
    gradients: int
    optimiser: int
    """Adam's moments and its counts of steps."""
    balance: int
    """Of routed experts: the routers' biases, and what a step counts of their load."""

    @property
    def total(self) -> int:
        """All of them."""
        return sum(getattr(self, field.name) for field in fields(self))


@dataclass(frozen=True, eq=False)
class StateShard:
    """What moves together: its name, and whether it is routed experts; elements of one of `ranks`' parts."""

    name: str
    routed: bool
    ranks: int
    part: int
    decays: int
    """Of these, the elements that decay."""
    zero: int
    """The stage of ZeRO."""

    @property
    def whole(self) -> int:
        """Elements over all ranks, padding included."""
        return self.ranks * self.part

    def aliased(self, width: Widths) -> bool:
        """Whether what computes is what is stored."""
        return self.ranks == 1 and width.compute == width.master


def states(spec: RunSpec, pipeline_rank: int = 0) -> States:
    """What a rank of place `pipeline_rank` in the pipeline holds, to the byte."""
    at = place_of(spec, pipeline_rank)
    return states_at(at, units(at))


def states_at(at: RankView, listed: Sequence[StateShard]) -> States:
    """The same of a rank whose units are known."""
    width = widths(at.spec)
    parameters = masters = optimiser = 0
    for unit in listed:
        stored = unit.part * width.master
        if unit.aliased(width):
            parameters += stored
        else:
            masters += stored
            parameters += 0 if unit.zero == 3 else unit.whole * width.compute
        halves = (unit.decays > 0) + (unit.decays < unit.part)
        optimiser += 2 * stored + STEP_COUNT * halves
    return States(parameters, masters, _gradients(at, listed), optimiser, _balance(at))


def units(at: RankView) -> list[StateShard]:
    """The units of a rank, in the order of its forward; routed experts come after the rest of their block."""
    layout, moe = at.spec.layout, at.spec.model.moe
    experts = layout.expert_data_ranks if moe is not None else 1
    zero = layout.zero if max(layout.shard_ranks, experts) > 1 else 0
    found = []
    for name, listed in at.pieces().items():
        for routed, ranks in ((False, layout.shard_ranks), (True, experts)):
            pieces = [piece for _, piece in listed if (piece.experts is not None) == routed]
            if pieces:
                found.append(_unit(name, routed, ranks if zero else 1, pieces, zero))
    return found


def _unit(name: str, routed: bool, ranks: int, pieces: Sequence[Piece], zero: int) -> StateShard:
    sizes = [(part_elements(piece, ranks), len(piece.global_shape) >= 2) for piece in pieces]
    decays = sum(size for size, decay in sizes if decay)
    return StateShard(name, routed, ranks, sum(size for size, _ in sizes), decays, zero)


def _balance(at: RankView) -> int:
    moe = at.spec.model.moe
    if moe is None:
        return 0
    biases = at.routed * moe.experts if moe.bias else 0
    return EXACT_COUNT * balance_counts(at.spec.model, moe) + BIAS * biases


# Gradients, in the order in which a step finds them and gives them away -----------------------------------


def waits(spec: RunSpec, unit: StateShard) -> bool:
    """Whether a unit's gradients wait whole for the last microbatch's."""
    several = spec.microbatches > 1
    return unit.ranks == 1 or (several and (unit.zero < 2 or spec.layout.pp > 1))


def packed_width(at: RankView, unit: StateShard) -> int:
    """Bytes of an element of gradients before they are sent: several are added up in the masters' format."""
    width, spec = widths(at.spec), at.spec
    both_ends = spec.layout.pp > 1 and spec.model.tied and at.embed and at.head and unit.name == "embed"
    several = waits(spec, unit) and (spec.microbatches > 1 or both_ends)
    return width.master if several else width.reduce


def _gradients(at: RankView, listed: Sequence[StateShard]) -> int:
    """The most bytes of gradients at a time. A reduction is waited for one block later."""
    spec, width = at.spec, widths(at.spec)
    found, waiting = list(_events(at, listed)), {unit for unit in listed if waits(spec, unit)}
    left, depth = Counter(found), Counter(unit.name for unit in listed)
    held = most = 0
    begun: set[StateShard] = set()
    summed: set[StateShard] = set()
    pending: deque[StateShard] = deque()

    def finish(unit: StateShard) -> None:
        nonlocal held, most
        if unit not in summed and (unit.ranks > 1 or packed_width(at, unit) != width.master):
            held += unit.part * width.master
        summed.add(unit)
        most = max(most, held)

    for unit in found:
        if unit not in begun and unit in waiting:
            held += unit.whole * packed_width(at, unit)
        begun.add(unit)
        most = max(most, held)
        left[unit] -= 1
        if left[unit] and unit in waiting:
            continue
        if unit.ranks > 1 and unit in waiting:
            held -= unit.whole * packed_width(at, unit)
        pending.append(unit)
        while len(pending) > depth[unit.name]:
            finish(pending.popleft())
    for unit in pending:
        finish(unit)
    return most


@lru_cache(maxsize=4096)
def _turning(name: str, ranks: int, virtual: int, microbatches: int, rank: int) -> tuple[Action, ...]:
    """Of a rank's backwards of each kind in each stage the first two and the last: others hold no more."""
    actions = make(name, ranks, virtual, microbatches).actions[rank]
    total = Counter((kind, stage) for kind, stage, _ in actions if kind is not Kind.F)
    seen: Counter[tuple[Kind, int]] = Counter()
    found = []
    for action in actions:
        if action.kind is Kind.F:
            continue
        of = action.kind, action.stage
        seen[of] += 1
        if seen[of] <= 2 or seen[of] == total[of]:
            found.append(action)
    return tuple(found)


def _events(at: RankView, listed: Sequence[StateShard]) -> Iterator[StateShard]:
    """The units of a rank, each whenever an action of its schedule finds gradients of it, if that matters."""
    own = {stage.index: stage for stage in at.own}
    by_name: dict[str, list[StateShard]] = {}
    for unit in listed:
        by_name.setdefault(unit.name, []).insert(0, unit)  # a backward finds routed experts' first
    lists = at.schedule
    rank = lists.rank_of[at.own[0].index]
    for action in _turning(lists.name, lists.ranks, lists.virtual, lists.microbatches, rank):
        stage = own[action.stage]
        ends_too = action.kind is not Kind.W
        if stage.head and ends_too:
            yield from by_name["head" if "head" in by_name else "embed"]
        for block in reversed(stage.blocks):
            of_block = by_name[f"blocks.{block}"]
            yield from (unit for unit in of_block if not (unit.routed and action.kind is Kind.I))
        if stage.embed and ends_too:
            yield from by_name["embed"]
