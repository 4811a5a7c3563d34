"""Least bytes of all layouts of a space: where even these are too many, there is nothing to search."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from meshwright.planner.cost.layer import LayerCost
from meshwright.planner.cost.model import CostModel
from meshwright.planner.cost.stages import model_contents
from meshwright.planner.layout_levels import DataMesh, LayerLayout
from meshwright.planner.layout_space import LayoutSpace
from meshwright.planner.memory.generic import Generic, Memory
from meshwright.spec.arithmetic import divisors


def least_memory(space: LayoutSpace, costs: CostModel, memory: Generic, enough: float = 0.0) -> Memory | None:
    """Bytes that a rank needs at least, in the layout that needs least, or the first with at most `enough`.

    They are those of equal shares of the model and of a microbatch. None if no layout is legal, or if states
    alone are above `enough` in all.
    """
    model, best = model_contents(space.base), None
    stored: dict[tuple[int, int, int], LayerCost] = {}  # by what a rank's parameters depend on
    for inner, smallest, mesh in _smallest(space):
        for sharding in space.shardings(inner, mesh, most_shared=True):
            spec = space.spec(inner, mesh, sharding)
            if enough:
                parts = inner.tp, mesh.ep, mesh.etp
                if parts not in stored:
                    stored[parts] = costs.blocks(spec)
                if memory.least_states(spec, stored[parts], model).device > enough:
                    continue
            for each in dict.fromkeys((smallest, inner)):  # activations of the smallest are known, and less
                blocks = costs.blocks(space.spec(each, mesh, sharding))
                needs = memory.lower_bound(spec, blocks, model)
                if best is not None and needs.device >= best.device:
                    break
            else:
                best = needs
            if best is not None and best.device <= enough:
                return best
    return best


def _smallest(space: LayoutSpace) -> Iterator[tuple[LayerLayout, LayerLayout, DataMesh]]:
    """Meshes with the recompute policy that saves most, whole experts and the smallest microbatch that they
    take; and with other microbatches, beside the smallest, where these are so few that gradients may not wait
    for the last.

    Experts are cut only where there are no more whole ones to deal out, or where all of them are, which takes
    no communicator, or where a program has rules on that.
    """
    saving = {inner[:5]: inner for inner in space.inner()}.values()  # policies come from none to full
    least: dict[tuple[Any, ...], LayerLayout] = {}
    pairs = space.experts(space.ranks)
    most = max((ep for ep, _ in pairs), default=1)
    cut = "etp" in space.fixed or any(rule.key == "etp" for rule in space.program.rules)
    for inner in sorted(saving, key=lambda inner: inner.micro_batch):
        for ep, etp in pairs:
            if etp == 1 or ep in (1, most) or cut:
                for mesh in space.meshes(inner, ep, etp):
                    if mesh.pp > 1 and inner.context_mode != space.fixed.get("context_mode", "ring"):
                        continue  # in a pipeline no mode is bounded by less than a ring
                    smallest = least.setdefault((inner[:4], mesh), inner)
                    if inner == smallest or inner.micro_batch in _large(space, mesh):
                        yield inner, smallest, mesh


def _large(space: LayoutSpace, mesh: DataMesh) -> tuple[int, ...]:
    """Microbatches larger than the smallest with which gradients may take less memory.

    They are all of a rank's sequences; half of them without a pipeline; and in a pipeline the smallest
    that keeps gradients of its stages from meeting (`planner/memory/states.py`).
    """
    share = space.base.shared_sequences // mesh.data
    most = 2 if mesh.pp == 1 else 2 * mesh.pp - 1
    return share, share // max(count for count in divisors(share) if count <= most)
