"""The best layouts of a run on a cluster, and no better one left out: best-first branch and bound.

Branches wait in a queue in the order of their least seconds (`planner/cost/lower_bounds.py`), and the first
is split into its choices (`planner/search/tree.py`), until it is a pipeline whose schedule is simulated,
which times all its shardings at once. When the least of the first branch is above the k-th best time so far,
no other can be among the best k (Land & Doig 1960). Branches whose least memory is above the device's are
dropped as they come up, and where that of all layouts is above it, nothing is searched. A first pass over
common layouts finds good plans early, which cut most of the second pass. A last pass finds the layout that
changes least of those near the fastest (`planner/search/simplest.py`): its queue is in the order of changes.
It looks at layouts that fit comfortably first, and at others where none of these is near.
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
from meshwright.planner.cost.uncertainty import COMFORTABLE, fitting, room, spread
from meshwright.planner.layout_space import LayoutSpace
from meshwright.planner.memory.generic import Generic
from meshwright.planner.memory.host import fits_host, offloads
from meshwright.planner.search import simplest
from meshwright.planner.search.least_memory import least_memory
from meshwright.planner.search.results import Progress, SearchCounts, SearchResult, Simplest, TimedLayout
from meshwright.planner.search.tree import Branch, SearchTree, with_rounding
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
    simplest: bool = True,
) -> SearchResult:
    """The `top` fastest layouts of one or several spaces that need at most `capacity` bytes of a device by
    `memory`.

    `progress` is called with each plan that is better than all before. With `any_will_do` the search ends
    with the first layout that fits. The default of `memory` is the generic model. Work is added to `counts`.
    Without `simplest` no other layout is preferred to the fastest.
    """
    memory = memory or Generic(costs)
    each = [spaces] if isinstance(spaces, LayoutSpace) else spaces
    if costs.counted:
        each = [part for space in each for part in space.by_backward()]
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
            found.preferred = _simplest(trees, found) if simplest and not any_will_do else found.best[0]
    finally:
        if collects:
            _age_objects()
            gc.enable()
    counts.seconds += time.perf_counter() - found.start
    return found


def _age_objects() -> None:
    """Put what was made meanwhile among the oldest objects: a collection of the young ones would go through
    all of it, and nearly all is still in use."""
    if not gc.get_freeze_count():
        gc.freeze()
        gc.unfreeze()


def _needs(memory: Generic, cluster: Cluster, spec: RunSpec) -> float:
    """Bytes of the device on a layout's fullest rank; infinite where its hosts lack memory for the rest."""
    return memory.peak(spec).device if fits_host(spec, cluster) else inf


def _may_fit(tree: SearchTree) -> bool:
    """True if the least that a rank of some layout needs fits."""
    least = least_memory(tree.space, tree.costs, tree.memory, tree.capacity)
    return least is not None and least.device <= tree.capacity


def _simplest(trees: Sequence[SearchTree], found: SearchResult) -> TimedLayout | None:
    """The layout that changes least of those near the fastest, whose branches come up by their changes: of
    those that fit comfortably, or where none does, of all."""
    most = (1 + simplest.NEAR) * found.best[0].seconds
    ordering = trees[0].ordering
    for capacity in sorted({min(comfortable(trees[0].costs), found.capacity), found.capacity}):
        judge = Simplest(ordering, most, found.exact, capacity, found.speedup, found.counts)
        for each in found.best:
            if each.memory <= capacity:
                judge.keep(each)
        for tree in trees:
            tree.found, tree.capacity = judge, with_rounding(capacity)
        _pass((branch for common in (True, False) for tree in trees for branch in tree.roots(common)), judge)
        if judge.best is not None:
            break
    return judge.best


def comfortable(costs: CostModel) -> float:
    """Most bytes of a device that a layout may need to fit comfortably."""
    return fitting(room(costs.cluster), spread(costs.cluster, costs.stack), COMFORTABLE)


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
