"""Where the ranks of each axis of a layout are: how many, and how far apart."""

from __future__ import annotations

from typing import NamedTuple

from meshwright.spec.layout import Layout


class Group(NamedTuple):
    """`ranks` ranks, each `stride` from the next."""

    ranks: int
    stride: int


class Axes(NamedTuple):
    """The groups of a layout, as `parallel/mesh.py` makes them: tensor ranks are neighbours."""

    tensor: Group
    context: Group
    shard: Group
    """dp x cp: what ZeRO shards over."""
    replicate: Group
    pipeline: Group
    expert: Group
    expert_data: Group


def axes(layout: Layout) -> Axes:
    """The groups of `layout`."""
    stride = layout.strides
    data, folded = stride["dp"], layout.ep * layout.etp
    near = data == layout.tp or layout.dp * layout.cp == 1  # ranks of a stage follow each other
    return Axes(
        tensor=Group(layout.tp, stride["tp"]),
        context=Group(layout.cp, data),
        shard=Group(layout.shard_ranks, data),
        replicate=Group(layout.replicate, stride["replicate"]),
        pipeline=Group(layout.pp, stride["pp"]),
        expert=Group(folded, 1 if near or folded <= layout.tp else data),
        expert_data=Group(layout.expert_data_ranks, folded if near else data * max(1, folded // layout.tp)),
    )
