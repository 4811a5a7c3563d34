"""The best layouts of a run on a cluster, and no better one left out: best-first branch and bound.

Branches wait in a queue in the order of their least seconds (`planner/cost/lower_bounds.py`), and the first
is split into its choices (`planner/search/nodes.py`), until it is a pipeline whose schedule is simulated,
which times all its shardings at once. When the least of the first branch is above the k-th best time so far,
no other can be among the best k (Land & Doig 1960). Branches whose least memory is above the device's are
dropped as they come up. A first pass over common layouts finds good plans early, which cut most of the second
pass.
"""

from __future__ import annotations

import gc
import heapq

from meshwright.planner.cost.model import CostModel
from meshwright.planner.layout_space import LayoutSpace
from meshwright.planner.memory.generic import Generic, MemoryModel
from meshwright.planner.search.nodes import Node, Scope, roots
from meshwright.planner.search.results import BestLayouts, Progress, SearchResult
from meshwright.spec import RunSpec


def search(
    space: LayoutSpace,
    costs: CostModel,
    capacity: float,
    top: int = 5,
    progress: Progress | None = None,
    any_will_do: bool = False,
    memory: MemoryModel | None = None,
) -> SearchResult:
    """The `top` fastest layouts of `space` that need at most `capacity` bytes of a device by `memory`.

    `progress` is called with each plan that is better than all before. With `any_will_do` the search ends
    with the first layout that fits. The default of `memory` is the generic model.
    """
    memory = memory or Generic(costs)

    def accept(spec: RunSpec) -> bool:
        return memory.peak(spec).device <= capacity

    exact = memory is not memory.generic
    speedup = costs.shared.speed(1) if costs.shared is not None else 1.0  # of a rank while others wait
    best = BestLayouts(1 if any_will_do else top, accept if exact else None, progress, speedup)
    scope = Scope(space, costs, memory, capacity, best)
    collects = gc.isenabled()
    gc.disable()  # many small objects are made, and few that refer to each other
    try:
        for common in (True, False):
            _pass(scope, common, any_will_do)
            if best.best and any_will_do:
                break
    finally:
        if collects:
            gc.enable()
    return best.result()


def _pass(scope: Scope, common: bool, any_will_do: bool) -> None:
    """Search the common layouts, or the others."""
    best, queue = scope.best, list[tuple[float, int, Node]]()

    def push(node: Node) -> None:
        if best.hopeful(node.bound):
            best.counts.branches += 1
            heapq.heappush(queue, (node.bound, best.counts.branches, node))

    for root in roots(scope, common):
        push(root)
    while queue:
        bound, _, node = heapq.heappop(queue)
        if not best.hopeful(bound) or (best.best and any_will_do):
            return
        for child in node.expand(scope):
            push(child)
