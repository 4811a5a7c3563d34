"""Layouts of four ranks, dealt in turn from each way to share the ranks among the axes."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from itertools import product
from typing import Any, TypeVar

RANKS = 4
SCHEDULES = ("1f1b", "gpipe", "zb-h1", "interleaved", "bfs", "zb-v", "dualpipe-v")
MODES = ("ring", "ulysses", "gather", "ring+ulysses")

Tree = dict[str, Any]
Made = TypeVar("Made")


def layouts(experts: bool, make: Callable[[Tree], Made | None]) -> Iterator[Made]:
    """Results of `make` for every combination that the rules accept (it returns None for others)."""
    draw = random.Random(0)
    ways = [[made for tree in _options(shape, experts) if (made := make(tree))] for shape in _shapes()]
    for each in ways:
        draw.shuffle(each)
    while any(ways):
        for each in ways:
            if each:
                yield each.pop()


def _shapes() -> Iterator[Tree]:
    axes = ("replicate", "dp", "cp", "tp", "pp")
    for sizes in product((1, 2, 4), repeat=len(axes)):
        whole = 1
        for size in sizes:
            whole *= size
        if whole == RANKS:
            yield dict(zip(axes, sizes, strict=True))


def _options(shape: Tree, experts: bool) -> Iterator[Tree]:
    """The shape with everything that may be chosen within it."""
    shared = shape["dp"] * shape["cp"] > 1
    zeros = (0, 1, 2, 3) if shared and shape["replicate"] == 1 else (1, 2, 3) if shared else (0,)
    modes = MODES if shape["cp"] > 1 else ("ring",)
    schedules = SCHEDULES if shape["pp"] > 1 else ("1f1b",)
    sharded = (True, False) if shape["tp"] > 1 else (True,)
    folds = ((1, 1), (2, 1), (4, 1), (1, 2), (2, 2)) if experts else ((1, 1),)
    for zero, mode, schedule, sequence, (ep, etp) in product(zeros, modes, schedules, sharded, folds):
        yield {
            **shape,
            "zero": zero,
            "context_mode": mode,
            "schedule": schedule,
            "sequence_parallel": sequence,
            "ep": ep,
            "etp": etp,
        }
