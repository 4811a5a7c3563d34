"""Messages of a layer in published programs: a coarser list than that of this program's own calls."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

from meshwright.planner.cost.collectives import CollectiveCosts
from meshwright.planner.traffic.layer_shape import LayerShape
from meshwright.planner.traffic.message import Message, Overlap, Phase, Where

_MERGED = 0.9
"""Share of the network's bandwidth that dispatches of merged copies attain. Source: DeepSeek-AI 2025 (DeepEP,
table of its README: 43 to 58 GB/s over interfaces of 50 GB/s)."""


def published_messages(shape: LayerShape, routed: bool, sent: float, merged: float) -> Iterator[Message]:
    """Messages of a layer in published programs, together where large ones cost the same in one call or two.

    Latent attention gathers the residual stream, the backward of gathered keys and values takes two gathers,
    and what accompanies tokens to their experts is left out.
    """
    layout, maps, ring = shape.layout, shape.maps(routed), shape.ring
    keys = 2 * shape.tokens * shape.kv
    where: Where = "moe" if routed else "dense"
    stream = partial(Message, "tensor", elements=shape.stream, width=shape.width, group=shape.groups.tensor)
    context = partial(Message, "context", width=shape.width, where=where)
    for phase, times in ((Phase.FORWARD, 1), (Phase.INPUT, 2)):
        yield stream(shape.reduction, phase=phase, where=where, count=maps, overlaps=Overlap.COMPUTE)
        if layout.sequence_parallel:
            gathered = replace(stream("all_gather", phase=phase, where=where, count=maps), width=sent)
            yield replace(gathered, overlaps=Overlap.COMPUTE)
        moved = 2 * shape.tokens * (shape.q + shape.kv)
        yield context("all_to_all", moved, group=shape.ulysses, phase=phase, count=times)
        if layout.context_mode == "gather":
            yield context("all_gather", keys * ring.ranks, group=ring, phase=phase, count=times)
        elif ring.ranks > 1:
            sends = times * (ring.ranks - 1)
            yield context("send", keys, group=ring, phase=phase, count=sends, overlaps=Overlap.ATTENTION)
        if routed:
            yield dispatch(shape, phase, 2, merged)
    if layout.sequence_parallel:  # inputs, for the gradients of their weights
        again = stream("all_gather", phase=Phase.WEIGHT, where=where, count=maps, overlaps=Overlap.PRODUCT)
        yield replace(again, width=sent)


def dispatch(shape: LayerShape, phase: Phase, count: int, merged: float) -> Message:
    """Tokens to their experts, or back."""
    size = merged * shape.copies * shape.model.hidden, shape.width, shape.groups.expert
    return Message("expert", "all_to_all", *size, phase, "moe", count, Overlap.COMPUTE)


def merged_share(shape: LayerShape, links: CollectiveCosts) -> float:
    """Share of its copies that a token is sent in, once to each node that has experts of it.

    Within one node, once to each rank. Experts are chosen evenly; groups limit the nodes of a token. Between
    nodes the kernels that do so use more of the network than a ring does.
    """
    group, moe = shape.groups.expert, shape.moe
    places, slower = group.ranks, 1.0
    for level, _, inner in links.members(group):
        if level is not links.cluster.levels[0]:
            places, slower = group.ranks // inner, links.cluster.device.rates.network / _MERGED
    distinct = places * (1 - (1 - 1 / places) ** moe.top_k)
    if moe.groups > 1 and places > 1:
        distinct = min(distinct, moe.top_groups)
    return min(1.0, distinct / moe.top_k) * slower
