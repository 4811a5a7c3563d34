"""The best layouts of a run on a cluster, and no better one left out: best-first branch and bound.

Branches wait in a queue in the order of their least seconds (`planner/cost/lower_bounds.py`), and the first
is split into its choices (`planner/search/tree.py`), until it is a pipeline whose schedule is simulated,
which times all its shardings at once. When the least of the first branch is above the k-th best time so far,
no other can be among the best k (Land & Doig 1960). Branches whose least memory is above the device's are
dropped as they come up, and where that of all layouts is above it, nothing is searched. A first pass over
common layouts finds good plans early, which cut most of the second pass. A last pass finds the layout that
changes least of those near the fastest (`planner/search/simplest.py`): its queue is in the order of changes.
"""

from __future__ import annotations

import gc
import heapq
import time
from collections.abc import Iterable, Sequence
from functools import partial
from itertools import product
from math import inf
from typing import Any

from meshwright.hardware.cluster import Cluster
from meshwright.planner.cost.model import CostModel
from meshwright.planner.layout_space import LayoutSpace
from meshwright.planner.memory.generic import Generic
from meshwright.planner.memory.host import fits_host, offloads
from meshwright.planner.search import simplest
from meshwright.planner.search.least_memory import least_memory
from meshwright.planner.search.results import Progress, SearchCounts, SearchResult, Simplest, TimedLayout
from meshwright.planner.search.tree import Branch, SearchTree
from meshwright.spec import RunSpec


def search(
    spaces: LayoutSpace | Sequence[LayoutSpace],
    costs: CostModel,
    capacity: float,
    top: int = 5,
    progress: Progress | None = None,
    any_will_do: bool = False,
    memory: Generic | None = None,
    counts: SearchCounts | None = None,
) -> SearchResult:
    """The `top` fastest layouts of one or several spaces that need at most `capacity` bytes of a device by
    `memory`.

    `progress` is called with each plan that is better than all before. With `any_will_do` the search ends
    with the first layout that fits. The default of `memory` is the generic model. Work is added to `counts`.
    """
    memory = memory or Generic(costs)
    each = [spaces] if isinstance(spaces, LayoutSpace) else spaces
    known = type(memory) is Generic and not any(offloads(space.base) for space in each)
    exact = None if known else partial(_needs, memory, costs.cluster)
    speedup = costs.shared.speed(1) if costs.shared is not None else 1.0  # of a rank while others wait
    counts = counts or SearchCounts()
    found = SearchResult(top, exact, capacity, progress, speedup, any_will_do, counts)
    trees = [SearchTree(space, costs, memory, capacity, found) for space in each]
    collects = gc.isenabled()
    gc.disable()  # many small objects are made, and few that refer to each other
    try:
        trees = [tree for tree in trees if _may_fit(tree)]
        for common, tree in product((True, False), trees):
            if found.hopeful(0.0):
                _pass(tree.roots(common), found)
        if found.best:
            found.preferred = found.best[0] if any_will_do else _simplest(trees, found)
    finally:
        if collects:
            gc.enable()
    counts.seconds += time.perf_counter() - found.start
    return found


def _needs(memory: Generic, cluster: Cluster, spec: RunSpec) -> float:
    """Bytes of the device on a layout's fullest rank; infinite where its hosts lack memory for the rest."""
    return memory.peak(spec).device if fits_host(spec, cluster) else inf


def _may_fit(tree: SearchTree) -> bool:
    """True if the least that a rank of some layout needs fits."""
    least = least_memory(tree.space, tree.costs, tree.memory, tree.capacity)
    return least is not None and least.device <= tree.capacity


def _simplest(trees: Sequence[SearchTree], found: SearchResult) -> TimedLayout | None:
    """The layout that changes least of those near the fastest, whose branches come up by their changes."""
    most = (1 + simplest.NEAR) * found.best[0].seconds
    ordering = trees[0].ordering
    judge = Simplest(ordering, most, found.exact, found.capacity, found.speedup, found.counts)
    for each in found.best:
        judge.keep(each)
    for tree in trees:
        tree.found = judge
    _pass((branch for common in (True, False) for tree in trees for branch in tree.roots(common)), judge)
    return judge.best


def _pass(roots: Iterable[Branch], found: SearchResult | Simplest) -> None:
    """Search all layouts below some branches."""
    by_changes, counts = isinstance(found, Simplest), found.counts
    queue: list[tuple[Any, int, Branch]] = []

    def push(branches: Iterable[Branch]) -> None:
        for branch in branches:
            bound, changes, _ = branch
            if found.hopeful(bound, changes):
                counts.branches += 1
                key = (changes, bound) if by_changes else bound
                heapq.heappush(queue, (key, counts.branches, branch))

    push(roots)
    while queue:
        _, _, (bound, changes, split) = heapq.heappop(queue)
        if not found.hopeful(bound, changes):
            return
        push(split())
