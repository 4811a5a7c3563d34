"""The stages of a pipeline: which of the model's units each holds."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, pairwise

from meshwright.spec.layout import Layout
from meshwright.spec.model import ModelSpec
from meshwright.spec.parameters import Parameter, parameters


@dataclass(frozen=True)
class Stage:
    """Stage `index` in the order in which a forward visits them: blocks `first` to `last` - 1, and the ends.

    The embedding is on the first stage and the head on the last; a stage may hold no block.
    """

    index: int
    first: int
    last: int
    embed: bool
    head: bool

    @property
    def blocks(self) -> range:
        """The numbers of its blocks."""
        return range(self.first, self.last)

    @property
    def units(self) -> tuple[str, ...]:
        """The names of its units in order: embed, blocks.0, ..., head; tied ends have both their names."""
        blocks = (f"blocks.{block}" for block in self.blocks)
        return (*(["embed"] if self.embed else []), *blocks, *(["head"] if self.head else []))


def stages(model: ModelSpec, layout: Layout, seq_len: int) -> tuple[Stage, ...]:
    """The pp x chunks stages of a layout that the rules accept, cut as `layout.stages` says.

    Sequences are of `seq_len` tokens, which a balanced cut's FLOPs depend on. Without a pipeline there is one
    stage, which holds all.
    """
    count = layout.pp * layout.chunks
    if count == 1:
        blocks: Sequence[int] = [model.layers]
    elif layout.stages == "even":
        blocks = even(model.layers, count)
    elif layout.stages == "balanced":
        blocks = balanced(model, count, seq_len)
    else:
        blocks = layout.stages
    return placed(tuple(blocks))


@lru_cache(maxsize=128)  # each rank of a pipeline asks again
def placed(blocks: tuple[int, ...]) -> tuple[Stage, ...]:
    """Return the stages that hold so many blocks each, in order."""
    ends, last = list(accumulate(blocks)), len(blocks) - 1
    return tuple(
        Stage(index, end - blocks[index], end, index == 0, index == last) for index, end in enumerate(ends)
    )


def parameters_of(model: ModelSpec, own: Sequence[Stage]) -> Mapping[str, tuple[Parameter, ...]]:
    """Return the parameters of the units in the stages of one rank; tied ends on different ranks are two."""
    units = {unit for stage in own for unit in stage.units}
    every = parameters(model)
    if model.tied and not units >= {"embed", "head"}:
        every = parameters(model.model_copy(update={"tied": False}))
        every = {**every, "head": (every["embed"][0], *every["head"][1:])}
    return {name: listed for name, listed in every.items() if name in units}


def even(layers: int, count: int) -> list[int]:
    """Blocks of each of `count` stages, no two further apart than 1.

    The first and the last stage, which hold the embedding and the head, are the last to get one more.
    """
    return _dealt(layers, count, [*range(1, count - 1), 0, count - 1])


def balanced(model: ModelSpec, count: int, seq_len: int) -> list[int]:
    """Blocks of each of `count` > 1 stages, so that the stage with most FLOPs has as few as can be.

    Blocks count by their forward FLOPs and so does the head; the embedding is a lookup, and counts nothing.
    Of cuts that are as good, the one with most blocks beside the head is taken: what is there is held for
    the shortest time. Blocks that are alike are shared evenly by the other stages.
    """
    costs = tuple(model.block_flops(seq_len, layer) for layer in range(model.layers))
    return list(_balanced(costs, model.head_flops, count))


@lru_cache(maxsize=512)
def _balanced(costs: tuple[int, ...], head: int, count: int) -> tuple[int, ...]:
    """Blocks of each stage, for blocks and a head of these FLOPs; each rank of a pipeline asks again."""
    layers = len(costs)

    def largest(beside_head: int) -> tuple[int, int]:
        """Return the most FLOPs of the other stages, and those of the last one."""
        ends = accumulate(_shared(costs[: layers - beside_head], count - 1), initial=0)
        others = max(sum(costs[first:last]) for first, last in pairwise(ends))
        return others, sum(costs[layers - beside_head :]) + head

    def last_is_largest(beside_head: int) -> bool:
        others, last = largest(beside_head)
        return last >= others

    # With more blocks beside the head the last stage grows and the largest other does not.
    after = bisect_left(range(layers), True, key=last_is_largest)
    beside_head = min((after, max(0, after - 1)), key=lambda number: max(largest(number)))
    return (*_shared(costs[: layers - beside_head], count - 1), beside_head)


def _shared(costs: Sequence[int], count: int) -> list[int]:
    """Costs in order over `count` stages, so that the largest sum is as small as can be."""
    if len(set(costs)) <= 1:
        return _dealt(len(costs), count, [*range(1, count), 0])
    low, high = max(costs), sum(costs)
    while low < high:
        most = (low + high) // 2
        if len(_filled(costs, most)) <= count:
            high = most
        else:
            low = most + 1
    filled = _filled(costs, low)
    return [*filled, *[0] * (count - len(filled))]


def _filled(costs: Sequence[int], most: int) -> list[int]:
    """How many costs each stage takes, when each takes all that fit within `most`."""
    found, held = [0], 0
    for cost in costs:
        if held + cost > most:
            found.append(0)
            held = 0
        found[-1] += 1
        held += cost
    return found


def _dealt(layers: int, count: int, order: Sequence[int]) -> list[int]:
    """Equal shares; what remains goes one by one to the stages in `order`."""
    share, rest = divmod(layers, count)
    more = set(order[:rest]) if count > 1 else set()
    return [share + (index in more) for index in range(count)]
