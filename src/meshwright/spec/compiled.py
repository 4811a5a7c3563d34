"""`train.compile` where a run, or a plan for one, leaves it open on GPUs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from meshwright.spec.errors import UserError
from meshwright.spec.load import Overrides, from_tree
from meshwright.spec.pipeline_schedules import SCHEDULES

COMPILE = "train.compile"
COMPILED_ON = ("cuda",)
"""Kinds of devices on which runs compile blocks by default; on processors the kernels in C++ are faster."""


def is_open(key: str, tree: Mapping[str, Any], overrides: Overrides) -> bool:
    """True if neither the run file's tables nor the flags give a dotted key of a table."""
    table, name = key.split(".")
    given = tree.get(table)
    return key not in dict(overrides) and not (isinstance(given, Mapping) and name in given)


def with_compiled_blocks(tree: dict[str, Any], overrides: Overrides) -> Overrides:
    """The flags, with `train.compile = true` where it is open and goes with the run.

    It goes with dense models, and with what no rule refuses. Of a block with experts, for whose numbers of
    tokens the host waits, little could be compiled.
    """
    if not is_open(COMPILE, tree, overrides):
        return overrides
    compiled = [*overrides, (COMPILE, "true")]
    try:
        spec = from_tree(tree, compiled)
    except UserError:  # a mistake is told where the run is read without it
        return overrides
    # A schedule that is given and splits backwards would be refused with a pipeline, which may come yet.
    return overrides if spec.model.moe or SCHEDULES[spec.layout.schedule].splits else compiled
