"""Seconds of Muon's step on the matrices of a block (`optim/muon.py`)."""

from __future__ import annotations

from math import prod

from meshwright.planner.cost.model import CostModel
from meshwright.planner.group_shapes import GroupShape, axes
from meshwright.spec import RunSpec
from meshwright.spec.layers import LayerKind
from meshwright.spec.parameters import block_parameters

_STEPS = 5
"""Newton-Schulz steps, each of three products."""
_MASTER = 4.0
"""Bytes of an element that ranks exchange."""


def muon_seconds(spec: RunSpec, costs: CostModel, kind: LayerKind) -> float:
    """Seconds of a block of a kind on one rank: products, and matrices that are dealt out.

    Ranks that share states are taken to be dealt equal parts.
    """
    layout, groups, model = spec.layout, axes(spec.layout), spec.model
    seconds, dealt, cut = 0.0, {True: 0.0, False: 0.0}, {True: 0.0, False: 0.0}
    for parameter in block_parameters(model, model.layer_kinds.index(kind)):
        if len(parameter.shape) < 2:
            continue
        is_expert = parameter.expert
        inner, ranks = (
            (layout.etp, layout.expert_data_ranks) if is_expert else (layout.tp, layout.shard_ranks)
        )
        ranks = ranks if layout.zero else 1
        *experts, rows, columns = parameter.shape
        count = prod(experts) / (layout.ep if is_expert else 1)
        short, long = sorted((rows, columns))
        product = costs.kernels.matmul
        each = product("bf16", short, short, long) + product("bf16", short, short, short)
        seconds += _STEPS * count / ranks * (each + product("bf16", short, long, short))
        split = parameter.split is not None or is_expert
        size = count * rows * columns * _MASTER / (inner if split else 1)
        dealt[is_expert] += size / ranks
        cut[is_expert] += size / ranks * inner if split else 0.0
    storage = {True: groups.expert_data, False: groups.shard}
    tensor = {True: GroupShape(layout.etp, 1), False: groups.tensor}
    for is_expert in (True, False):
        if layout.zero:
            seconds += 2 * costs.links.collective("all_to_all", dealt[is_expert], storage[is_expert])
        seconds += costs.links.collective("all_gather", cut[is_expert], tensor[is_expert])
    return seconds
