"""The stages of a pipeline: the units of the model that each holds."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, pairwise

from meshwright.spec.layout import Layout
from meshwright.spec.model import ModelSpec
from meshwright.spec.parameter_groups import run_parameters, trained_names
from meshwright.spec.parameters import Parameter
from meshwright.spec.sections import Sections


@dataclass(frozen=True)
class Stage:
    """Stage `index` in the order in which a forward visits them: blocks `first` to `last` - 1, and the ends.

    The embedding is on the first stage and the head on the last; a stage may hold no block. `beyond` are
    the numbers of layers that predict further tokens, which are on the last.
    """

    index: int
    first: int
    last: int
    embed: bool
    head: bool
    beyond: range = range(0)

    @property
    def blocks(self) -> range:
        """Numbers of the blocks of the stage."""
        return range(self.first, self.last)

    @property
    def layers(self) -> tuple[int, ...]:
        """Numbers of the blocks of the stage, and of those that predict further tokens."""
        return (*self.blocks, *self.beyond)

    @property
    def units(self) -> tuple[str, ...]:
        """Names of the units in order: embed, blocks.0, ..., head, and blocks that predict further tokens;
        ends that are one unit have both their names."""
        blocks, beyond = ([f"blocks.{block}" for block in every] for every in (self.blocks, self.beyond))
        return (*(["embed"] if self.embed else []), *blocks, *(["head"] if self.head else []), *beyond)


def stages(model: ModelSpec, layout: Layout, seq_len: int) -> tuple[Stage, ...]:
    """Return the pp x chunks stages of a layout that the rules accept, cut as `layout.stages` says.

    Sequences have `seq_len` tokens, on which the FLOPs of a balanced cut depend. Without a pipeline there is
    one stage, which holds everything.
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
    return placed(tuple(blocks), model.mtp_layers)


@lru_cache(maxsize=128)  # each rank of a pipeline asks again
def placed(blocks: tuple[int, ...], beyond: range = range(0)) -> tuple[Stage, ...]:
    """Return the stages for the number of blocks in each, in order, the last with the layers `beyond`."""
    ends, last = list(accumulate(blocks)), len(blocks) - 1
    return tuple(
        Stage(
            index, end - blocks[index], end, index == 0, index == last, beyond if index == last else range(0)
        )
        for index, end in enumerate(ends)
    )


def parameters_of(spec: Sections, own: Sequence[Stage]) -> Mapping[str, tuple[Parameter, ...]]:
    """Return the parameters of the units in the stages of one rank; ends that share a weight are two units on
    different ranks, each of which has it."""
    units = {unit for stage in own for unit in stage.units}
    every = run_parameters(spec)
    if spec.model.head_embeds and not units >= {"embed", "head"}:
        weight, *others = every["embed"]
        head = [parameter for parameter in others if parameter.name.startswith("head.")]
        embed = [parameter for parameter in others if parameter not in head]
        every = {**every, "embed": (weight, *embed), "head": (weight, *head)}
    return {name: listed for name, listed in every.items() if name in units}


def first_trained(spec: Sections) -> int:
    """The first module that has a trained parameter: 0 is the embedding, 1 block 0, and so on to the head.

    Modules before it have no backward.
    """
    return 0 if spec.trains_all else _first_of(spec.model, trained_names(spec))


@lru_cache(maxsize=8)
def _first_of(model: ModelSpec, trained: frozenset[str]) -> int:
    kinds = {tuple(name.split(".")[:2]) for name in trained}
    places = {"embed": 0, "head": model.layers + 1}
    return min(places[kind] if kind in places else int(number) + 1 for kind, number in kinds)


def first_trained_stage(spec: Sections, every: Sequence[Stage]) -> int:
    """The stage of `first_trained`; stages before it have no backward."""
    first = first_trained(spec)
    return next(stage.index for stage in every if first <= stage.last or stage.head)


def even(layers: int, count: int) -> list[int]:
    """Return the number of blocks in each of `count` stages, which differ by at most 1.

    The first and the last stage, which hold the embedding and the head, are the last to get one more.
    """
    return _dealt(layers, count, [*range(1, count - 1), 0, count - 1])


def balanced(model: ModelSpec, count: int, seq_len: int) -> list[int]:
    """Return the number of blocks in each of `count` > 1 stages that minimises the most FLOPs of a stage.

    Blocks and what follows them count by their forward FLOPs; the embedding is a lookup, and counts nothing.
    Among cuts that are equally good, the one with most blocks in the stage of the head is taken, whose
    activations are held for the shortest time. Equal blocks are shared evenly by the other stages.
    """
    flops = {kind: model.block_flops(seq_len, kind) for kind in model.kinds}
    costs = tuple(flops[kind] for kind in model.layer_kinds)
    return list(_balanced(costs, model.end_flops(seq_len), count))


@lru_cache(maxsize=512)
def _balanced(costs: tuple[int, ...], head: int, count: int) -> tuple[int, ...]:
    """Cached `balanced` for blocks and a head of these FLOPs, since each rank of a pipeline asks again."""
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
    """Return how many of the costs, in order, each of `count` stages takes for the smallest largest sum."""
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
    """Return how many costs each stage takes if each takes all that fit within `most`."""
    found, held = [0], 0
    for cost in costs:
        if held + cost > most:
            found.append(0)
            held = 0
        found[-1] += 1
        held += cost
    return found


def _dealt(layers: int, count: int, order: Sequence[int]) -> list[int]:
    """Return equal shares; the remainder goes one by one to the stages in `order`."""
    share, rest = divmod(layers, count)
    more = set(order[:rest]) if count > 1 else set()
    return [share + (index in more) for index in range(count)]
