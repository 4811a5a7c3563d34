"""The layout of a space that needs least memory, by equal shares of the model and of a microbatch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from meshwright.planner.cost.model import CostModel
from meshwright.planner.layout_space import NO_CUT, DataMesh, LayerLayout, LayoutSpace
from meshwright.planner.memory.generic import Generic, Memory


def least_memory(space: LayoutSpace, costs: CostModel) -> Memory | None:
    """Bytes that a rank needs at least, in the layout that needs least; None if `space` has no layout."""
    model, best = Generic(costs), None
    for inner, mesh in _smallest(space):
        blocks = None
        for sharding in space.most_shared(inner, mesh):
            spec = space.spec(inner, mesh, NO_CUT, sharding)
            blocks = blocks or costs.blocks(spec)  # which do not depend on the sharding
            needs = model.lower_bound(spec, blocks)
            if best is None or needs.device < best.device:
                best = needs
    return best


def _smallest(space: LayoutSpace) -> Iterator[tuple[LayerLayout, DataMesh]]:
    """Meshes with the smallest microbatch, the recompute policy that saves most, and whole experts.

    Experts are cut only where there are no more whole ones to deal out.
    """
    least: dict[tuple[Any, ...], LayerLayout] = {}
    for inner in space.inner():  # in the order of microbatches, and of policies from none to full
        key = inner[:3]
        if key not in least or inner.micro_batch <= least[key].micro_batch:
            least[key] = inner
    pairs = space.experts(space.ranks)
    most = max((ep for ep, _ in pairs), default=1)
    for inner in least.values():
        for ep, etp in pairs:
            if etp == 1 or ep == most or "etp" in space.fixed:
                for mesh in space.meshes(inner, ep, etp):
                    yield inner, mesh
