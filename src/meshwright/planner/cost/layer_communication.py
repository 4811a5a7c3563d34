"""Seconds of this program's messages within a block, call by call as `parallel/` makes them.

`planner/cost/layer.py` takes messages of published programs together, as rings of large messages cost the
same in one call or two. Where a machine's collectives were measured, each kind of call and size has its own
time: a reduce-scatter on gloo takes several times what the all-gather of as many bytes does, and a small
message what its latency does.
"""

from __future__ import annotations

from math import ceil
from typing import TYPE_CHECKING

from meshwright.planner.group_shapes import GroupShape
from meshwright.spec.tiling import loss_rows

if TYPE_CHECKING:
    from meshwright.planner.cost.layer import LayerCost

_EXACT = 4.0
"""Bytes of a number that is summed: weights of copies, log-sum-exps, gradients of keys and values."""
_NUMBER = 8.0
"""Bytes of a count."""


def tensor(blocks: LayerCost, routed: bool, maps: int, backward: bool) -> float:
    """Around `maps` parallel regions: gathered, and reduced (`parallel/tensor_linears.py`)."""
    layout = blocks.spec.layout
    if layout.tp == 1:
        return 0.0
    gather, scatter, total = _around(blocks)
    if layout.sequence_parallel:
        return maps * (gather * (2 if backward else 1) + scatter)
    return maps * total + (gather if routed else 0.0)


def tensor_end(blocks: LayerCost) -> float:
    """Around the embedding or the head, forward and backward together."""
    if blocks.spec.layout.tp == 1:
        return 0.0
    gather, scatter, total = _around(blocks)
    return gather + scatter if blocks.spec.layout.sequence_parallel else total


def loss(blocks: LayerCost) -> float:
    """What tensor ranks tell each other of each chunk of the loss: two numbers a token."""
    layout = blocks.spec.layout
    if layout.tp == 1:
        return 0.0
    rows = min(loss_rows(blocks.rows, blocks.on_cpu), blocks.tokens)
    told = blocks.links.collective("all_gather", 2 * _EXACT * rows * layout.tp, blocks.tensor)
    return ceil(blocks.tokens / rows) * told


def _around(blocks: LayerCost) -> tuple[float, float, float]:
    """(all-gather, reduce-scatter, all-reduce) of the residual stream."""
    whole = blocks.tokens * blocks.spec.model.hidden * blocks.width
    return (
        blocks.links.collective("all_gather", whole, blocks.tensor),
        blocks.links.collective("reduce_scatter", whole, blocks.tensor),
        blocks.links.collective("all_reduce", whole, blocks.tensor),
    )


def context(blocks: LayerCost, core: float, backward: bool) -> float:
    """Seconds of keys and values, or heads, between context ranks (`ring_attention.py`, `ulysses.py`)."""
    layout, links = blocks.spec.layout, blocks.links
    if layout.cp == 1:
        return 0.0
    n, u = layout.cp, layout.ulysses(blocks.spec.model.kv_heads)
    elements = 2 * blocks.tokens * blocks.kv
    if layout.context_mode == "gather":
        if backward:
            return links.collective("reduce_scatter", elements * n * _EXACT, blocks.context)
        return links.collective("all_gather", elements * n * blocks.width, blocks.context)
    found = 0.0
    if u > 1:
        heads = GroupShape(u, layout.tp)
        for channels in (blocks.q + 2 * blocks.kv, blocks.q):
            found += links.collective("all_to_all", blocks.tokens * channels * blocks.width, heads)
    ring = n // u
    if ring > 1:
        around = GroupShape(ring, layout.tp * u)
        shifts = (ring - 1) * links.collective("shift", elements * blocks.width, around)
        if backward:
            shifts += ring * links.collective("shift", elements * _EXACT, around)
        beside = min(shifts, core * (ring - 1) / ring / links.slowed) * (1 - links.contention("shift"))
        found += shifts - beside
    return found


def expert(blocks: LayerCost, backward: bool) -> float:
    """Seconds of tokens to their experts and back, with weights and counts (`expert_parallel.py`)."""
    layout, moe = blocks.spec.layout, blocks.spec.model.moe
    if moe is None or blocks.expert.ranks == 1:
        return balance(blocks, backward)
    rows = blocks.tokens / layout.tp * moe.top_k * layout.etp
    sizes = [rows * blocks.spec.model.hidden * blocks.width] * 2 + [rows * _EXACT]
    if not backward:
        sizes.append(_NUMBER * moe.experts * layout.etp)
    return balance(blocks, backward) + sum(
        blocks.links.collective("all_to_all", size, blocks.expert) for size in sizes
    )


def balance(blocks: LayerCost, backward: bool) -> float:
    """What ranks that share sequences agree on for the loss that balances experts."""
    layout, moe = blocks.spec.layout, blocks.spec.model.moe
    if backward or moe is None or not moe.aux_loss:
        return 0.0
    size = blocks.spec.micro_batch * moe.experts * 4
    return blocks.links.collective("all_reduce", size, GroupShape(layout.cp * layout.tp, 1))
