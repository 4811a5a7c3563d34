"""Size and stride of the process groups of a layout's axes."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from meshwright.spec import RunSpec
from meshwright.spec.layout import Layout, Order


class GroupShape(NamedTuple):
    """`ranks` ranks, each `stride` from the next."""

    ranks: int
    stride: int


class Axes(NamedTuple):
    """The groups of a layout's axes, as `comm/mesh.py` makes them; tensor ranks are neighbours."""

    tensor: GroupShape
    context: GroupShape
    shard: GroupShape
    """dp x cp ranks, over which ZeRO shards."""
    replicate: GroupShape
    pipeline: GroupShape
    expert: GroupShape
    expert_data: GroupShape


def axes(layout: Layout) -> Axes:
    """The groups of `layout`."""
    sizes = layout.replicate, layout.dp, layout.cp, layout.tp, layout.pp, layout.ep, layout.etp
    return _axes(sizes, layout.order)


@lru_cache(maxsize=65536)  # layouts that are compared with each other have few different sizes
def _axes(sizes: tuple[int, ...], order: Order) -> Axes:
    replicate, dp, cp, tp, pp, ep, etp = sizes
    layout = Layout(replicate=replicate, dp=dp, cp=cp, tp=tp, pp=pp, ep=ep, etp=etp, order=order)
    stride = layout.strides
    data, folded = stride["dp"], layout.ep * layout.etp
    near = data == layout.tp or layout.dp * layout.cp == 1  # ranks of a stage follow each other
    return Axes(
        tensor=GroupShape(layout.tp, stride["tp"]),
        context=GroupShape(layout.cp, data),
        shard=GroupShape(layout.shard_ranks, data),
        replicate=GroupShape(layout.replicate, stride["replicate"]),
        pipeline=GroupShape(layout.pp, stride["pp"]),
        expert=GroupShape(folded, 1 if near or folded <= layout.tp else data),
        expert_data=GroupShape(
            layout.expert_data_ranks, folded if near else data * max(1, folded // layout.tp)
        ),
    )


def step_axes(spec: RunSpec) -> Axes:
    """The groups that exchange numbers in each step: the layout's, without replicas that step apart."""
    groups = axes(spec.layout)
    if spec.step_groups == 1:
        return groups
    return groups._replace(replicate=GroupShape(1, groups.replicate.stride))


def step_world(spec: RunSpec) -> GroupShape:
    """The ranks that sum a step's totals: those that step together."""
    ranks = spec.layout.world_size // spec.step_groups
    between = spec.layout.strides["replicate"] < ranks  # ranks of other groups are between
    return GroupShape(ranks, spec.step_groups if between else 1)
