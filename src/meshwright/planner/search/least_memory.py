"""The least memory of layouts: what a rank with a fair share of a model and of a microbatch needs."""

from __future__ import annotations

from collections.abc import Iterator
from math import inf
from typing import Any

from meshwright.planner.cost.data_parallel import StoredParameters
from meshwright.planner.cost.layer import LayerCost
from meshwright.planner.cost.lower_bounds import Kinds, kinds
from meshwright.planner.cost.model import CostModel
from meshwright.planner.layout_space import NO_CUT, DataMesh, LayerLayout, LayoutSpace
from meshwright.planner.memory.generic import Memory, block_activations, rank_memory


def fair_shares(
    space: LayoutSpace,
    on: CostModel,
    of: Kinds,
    inner: LayerLayout,
    mesh: DataMesh,
    blocks: LayerCost,
    capacity: float = inf,
) -> Iterator[Memory]:
    """What a rank with a fair share of the model and of one microbatch needs, by stage of ZeRO.

    The fullest rank of any layout of the mesh needs at least the least of them. There are none where
    activations alone are more than `capacity`.
    """
    model, pp = space.base.model, mesh.pp
    dense = routed = kept = 0.0
    for count, wanted in of:
        mine = blocks.held(wanted)
        dense, routed = dense + count * mine[0] / pp, routed + count * mine[1] / pp
        kept += count * block_activations(blocks, wanted) / pp
    if kept > capacity:
        return
    dense += (1 if model.tied else 2) * blocks.largest_unit / pp
    held = StoredParameters(dense, routed, model.layers + 2, 1)
    for sharding in space.most_shared(inner, mesh):
        spec = space.spec(inner, mesh, NO_CUT, sharding)
        yield rank_memory(spec, blocks, on, held, kept, False, 0)


def least_memory(space: LayoutSpace, on: CostModel) -> Memory | None:
    """What a rank needs at least, where it needs least; None where `space` has no layout.

    Of microbatches only the smallest are looked at, of recomputation what saves most, and experts are cut
    only where there are no more whole ones to deal out.
    """
    best, of = None, kinds(space.base.model)
    least: dict[tuple[Any, ...], LayerLayout] = {}
    for inner in space.inner():  # in the order of microbatches, and of policies from none to full
        key = inner[:3]
        if key not in least or inner.micro_batch <= least[key].micro_batch:
            least[key] = inner
    pairs = space.experts(space.ranks)
    most = max((ep for ep, _ in pairs), default=1)
    for inner in least.values():
        for ep, etp in pairs:
            if etp > 1 and ep < most and "etp" not in space.fixed:
                continue
            for mesh in space.meshes(inner, ep, etp):
                sharding = next(space.shardings(inner, mesh), None)
                if sharding is None:
                    continue
                blocks = on.blocks(space.spec(inner, mesh, NO_CUT, sharding))
                for needs in fair_shares(space, on, of, inner, mesh, blocks):
                    if best is None or needs.device < best.device:
                        best = needs
    return best
