"""Communication as data: one `Message` for each collective or transfer that `parallel/` starts.

Bytes, seconds (`planner/cost/layer.py`) and the load of links (`planner/explain/link_load.py`) are sums over
these lists; the calls that ranks record in a step are equal to them one by one
(`tests/parallel/test_wire.py`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from math import prod
from typing import TypeVar

from meshwright.planner.group_shapes import GroupShape, axes, step_axes, step_world
from meshwright.planner.rank_view import (
    BlockTraining,
    RankView,
    embedding_is_trained,
    gathered_bytes,
    part_elements,
    place_of,
    share,
    widths,
)
from meshwright.planner.traffic import exchange, preference
from meshwright.planner.traffic.layer_messages import (
    COUNT,
    Copies,
    end_messages,
    expert_messages,
    layer_messages,
)
from meshwright.planner.traffic.layer_shape import LayerShape, balance_counts, layer_shape
from meshwright.planner.traffic.message import Message, Overlap, Phase
from meshwright.schedule import Kind, steps
from meshwright.spec import RunSpec
from meshwright.spec.low_precision_rules import rounded_parameters
from meshwright.spec.parameter_groups import run_parameters
from meshwright.spec.parameters import UNIT_KINDS, Piece
from meshwright.spec.precision import DELAYED
from meshwright.spec.stages import first_trained
from meshwright.spec.training_flops import head_has_gradient

Key = TypeVar("Key")

_TOTALS = 5
"""Numbers that a step sums over all ranks (`train.step.Totals`)."""


def totals(pairs: Iterable[tuple[Key, float]]) -> dict[Key, float]:
    """Key -> the sum of its numbers, in the order in which keys first come."""
    sums: dict[Key, float] = {}
    for key, number in pairs:
        sums[key] = sums.get(key, 0.0) + number
    return sums


def traffic(
    spec: RunSpec,
    pipeline_rank: int = 0,
    copies: Sequence[Copies] | None = None,
    number: int | None = None,
) -> dict[tuple[str, str], float]:
    """(axis, operation) -> bytes that one rank sends in one optimiser step; for arguments see `messages`."""
    listed = messages(spec, pipeline_rank, copies, number=number)
    return totals(((m.axis, m.operation), m.count * m.sent) for m in listed)


def messages(
    spec: RunSpec,
    pipeline_rank: int = 0,
    copies: Sequence[Copies] | None = None,
    on_cpu: bool = False,
    number: int | None = None,
) -> list[Message]:
    """Every message that a rank sends in one optimiser step; `count` is then that of the step.

    `copies` are those of each dispatch of the step, by default as an even router makes them. The ranks of one
    pipeline rank send the same, but for the dispatches. `on_cpu` sets the size of the loss's chunks. Where
    groups of ranks step apart `number` is that of the step, from 1; by default exchanges count in the mean.
    """
    view, shape = place_of(spec, pipeline_rank), layer_shape(spec, on_cpu)
    states, passes = [*_state_messages(view)], partial(_passes, shape=shape, copies=copies)
    listed = [
        *states,
        *passes(view),
        *preference.messages(view, shape, states, passes),
        *_step_messages(view),
    ]
    listed += [*_muon_messages(view), *exchange.messages(view, number)]
    return [m for m in listed if m.count and m.elements and m.group.ranks > 1]


def _passes(view: RankView, shape: LayerShape, copies: Sequence[Copies] | None) -> list[Message]:
    """Messages of the activations of all microbatches, and of their gradients."""
    inside = microbatch_messages(
        view,
        lambda routed, training: layer_messages(replace(shape, training=training), routed),
        partial(end_messages, shape),
    )
    own = [m for m in inside if m.axis != "expert"]
    return [*own, *_dispatches(view, shape, copies), *_edge_messages(view, shape)]


def microbatch_messages(
    view: RankView,
    layer: Callable[[bool, BlockTraining], list[Message]],
    end: Callable[[bool], list[Message]],
) -> list[Message]:
    """Messages inside a rank's stages, in all microbatches of a step.

    `layer` gives those of a layer with routed experts or a dense one, and what is trained in it, `end` those
    of the head or the embedding.
    """
    often, kinds = view.spec.microbatches, view.kinds()
    listed = [m.times(often * kinds[kind]) for kind in sorted(kinds, key=_routed_last) for m in layer(*kind)]
    further = view.spec.model.mtp_num_layers * view.head  # each looks up tokens, and goes through the head
    for passes, head in ((view.embed + further, False), (view.head + further, True)):
        backward = head_has_gradient(view.spec) if head else embedding_is_trained(view.spec)
        for m in end(head) if passes else ():
            if backward or m.phase is Phase.FORWARD:
                listed.append(m.times(often * passes))
    return listed


def _routed_last(kind: tuple[bool, BlockTraining]) -> bool:
    return kind[0]


def _dispatches(view: RankView, shape: LayerShape, copies: Sequence[Copies] | None) -> Iterator[Message]:
    """The dispatches of a step; a microbatch's tokens go in `layout.expert_parts` parts."""
    if copies is not None:
        yield from (m for dispatch in copies for m in expert_messages(shape, dispatch))
    elif view.routed:
        due = share(shape.groups.expert.ranks)
        for rows, parts in Counter(shape.sent(shape.layout.expert_parts)).items():
            dispatch = Copies(rows * due, rows * due)
            for (routed, training), count in view.kinds().items():
                listed = expert_messages(replace(shape, training=training), dispatch) if routed else ()
                yield from (m.times(view.spec.microbatches * count * parts) for m in listed)


def _edge_messages(view: RankView, shape: LayerShape) -> Iterator[Message]:
    """Activations and their gradients to the neighbouring stages, as the schedule lists them."""
    listed = steps(view.schedule)[view.schedule.rank_of[view.own[0].index]]
    for phase, forward in ((Phase.FORWARD, True), (Phase.INPUT, False)):
        count = sum(step.target is not None and (step.action.kind is Kind.F) == forward for step in listed)
        size = shape.own * shape.model.hidden, shape.width, shape.groups.pipeline
        yield Message("pipeline", "send", *size, phase, "edge", count, Overlap.COMPUTE)


def _state_messages(view: RankView) -> Iterator[Message]:
    """Parameters and gradients of each ZeRO unit; routed experts are units of their own."""
    gathers = _gathers(view)
    for name, listed in view.pieces().items():
        for kind in UNIT_KINDS:
            pieces = [piece for _, piece in listed if piece.kind == kind]
            if pieces:
                yield from _unit_messages(view.spec, pieces, gathers.get(name, 1))


def _gathers(view: RankView) -> dict[str, int]:
    """Unit -> all-gathers in a step under ZeRO-3 without a pipeline; elsewhere each unit has one.

    A block is gathered for its forward and for its backward. The head, the last block and layers that predict
    further tokens stay whole in between, the first block from its backward to the next microbatch's forward;
    the backward of the embedding reads no weight. Ends that share a weight stay whole through the step.
    Blocks before the first trained module have no backward.
    """
    often, blocks = view.spec.microbatches, view.spec.model.layers
    if view.spec.layout.zero < 3 or view.spec.layout.pp > 1:
        return {}
    gathers = dict.fromkeys(view.pieces(), 2 * often)
    gathers |= {"embed": 1 if view.spec.model.head_embeds else often, "head": often}
    gathers["blocks.0"] = often + 1
    gathers[f"blocks.{blocks - 1}"] = often if blocks > 1 else 1
    gathers |= {f"blocks.{layer}": often for layer in view.spec.model.mtp_layers}
    forward_only = range(min(blocks, first_trained(view.spec) - 1))
    return gathers | {f"blocks.{layer}": often for layer in forward_only}


def _unit_messages(spec: RunSpec, pieces: Sequence[Piece], gathers: int) -> Iterator[Message]:
    """Messages of one unit (`parallel/data_parallel.py`); in a pipeline it moves once a step."""
    layout, width, zero, groups = spec.layout, widths(spec), spec.layout.zero, step_axes(spec)
    trainable = pieces[0].trainable
    axis, group = ("expert_data", groups.expert_data) if pieces[0].routed else ("shard", groups.shard)
    parts = group.ranks if layout.shards(trainable) else 1
    part = sum(part_elements(piece, parts) for piece in pieces)
    call = partial(Message, where="unit", overlaps=Overlap.NEXT_UNIT)
    if parts == 1 and not trainable:
        return
    if parts == 1:
        axis, group = (axis, group) if groups.replicate.ranks == 1 else ("replicate", groups.replicate)
        yield call(axis, "all_reduce", part, width.reduce, group, Phase.STEP)
        return
    each_microbatch = [layout.pp == 1 and zero >= stage for stage in (3, 2)]
    gathered, reduced = (Phase.MICROBATCH if often else Phase.STEP for often in each_microbatch)
    reductions = spec.microbatches if each_microbatch[1] else 1
    sent = gathered_bytes(spec, pieces, parts) / width.compute
    yield call(axis, "all_gather", parts * sent, width.compute, group, gathered, count=gathers)
    if not trainable:
        return
    yield call(axis, "reduce_scatter", parts * part, width.reduce, group, reduced, count=reductions)
    yield call("replicate", "all_reduce", part, width.exact, groups.replicate, Phase.STEP)


def _muon_messages(view: RankView) -> Iterator[Message]:
    """Rows of the matrices of blocks to the ranks that they are dealt to, and back, and pieces of those to
    tensor ranks (`optim/muon.py`): the mean over ranks, which are dealt unequal parts.
    """
    spec, groups = view.spec, axes(view.spec.layout)
    if not spec.train.optimiser_kind.orthogonalises:
        return
    call = partial(Message, width=widths(spec).exact, phase=Phase.STEP, where="step")
    kinds = (
        (False, "shard", groups.shard, "tensor", groups.tensor),
        (True, "expert_data", groups.expert_data, "expert", GroupShape(spec.layout.etp, 1)),
    )
    for name, listed in view.pieces().items():
        for routed, axis, group, inner_axis, inner in kinds if name.startswith("blocks.") else ():
            pieces = [
                piece for _, piece in listed if piece.routed == routed and piece.trainable and piece.is_matrix
            ]
            ranks = group.ranks if spec.layout.zero else 1
            rows = sum(part_elements(piece, ranks) for piece in pieces)
            cut = sum(prod(piece.local_shape) for piece in pieces if piece.parts > 1)
            yield call(axis, "all_to_all", rows, group=group._replace(ranks=ranks), count=2)
            yield call(inner_axis, "all_gather", inner.ranks * cut / ranks, group=inner)


def _step_messages(view: RankView) -> Iterator[Message]:
    """Sums once a step: gradients of parameters that several ranks hold, and numbers that all ranks need."""
    spec, groups, moe = view.spec, axes(view.spec.layout), view.spec.model.moe
    call, exact = partial(Message, phase=Phase.STEP, where="step"), widths(spec).exact
    summed, tied = Counter[tuple[bool, int]](), 0
    ranks = {False: spec.layout.shard_ranks, True: spec.layout.expert_data_ranks}
    held = (each for unit in view.pieces().values() for each in unit if each[1].trainable)
    for parameter, piece in held:
        size = part_elements(piece, ranks[piece.routed] if spec.layout.zero else 1)
        summed[piece.routed, piece.copies] += size * piece.summed
        tied += size * (spec.model.head_embeds and parameter.name == "embed.weight")
    for (routed, copies), elements in summed.items():
        axis, stride = ("expert", groups.expert.stride) if routed else ("tensor", groups.tensor.stride)
        yield call(axis, "all_reduce", elements, exact, GroupShape(copies, stride))
    if view.embed != view.head:
        ends = GroupShape(2, groups.pipeline.stride * (spec.layout.pp - 1))
        yield call("pipeline", "all_reduce", tied, exact, ends)
    numbers = _TOTALS + 2 * (spec.model.mtp_num_layers > 0)
    numbers += balance_counts(spec.model, moe) if moe is not None else 0
    numbers += moe is not None and spec.layout.bounds_dispatch
    if spec.train.clip_parameter is not None:
        numbers += sum(len(unit) for unit in run_parameters(spec).values())
    world = step_world(spec)
    numbers += spec.preference.numbers if spec.preference is not None else 0
    yield call("world", "scalars", numbers, COUNT, world)
    if spec.precision.compute in DELAYED:
        yield call("world", "amax", 3 * len([*rounded_parameters(spec)]), 4, world)
