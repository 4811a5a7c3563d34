"""The choices that make a layout, in four levels, from the inside outwards.

`LayerLayout` is what a block's operators depend on; `DataMesh` are the pipeline, data and expert ranks;
`StageSplit` the stages and their schedule; `Sharding` the states that data ranks share.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, get_args

from meshwright.spec.layout import ContextMode, Order, ulysses_ranks
from meshwright.spec.sections import FullRecompute, NoRecompute, RecomputeSpec, SelectiveRecompute

POLICIES: dict[str, RecomputeSpec] = {
    "none": NoRecompute(),
    "selective": SelectiveRecompute(),
    "full": FullRecompute(),
}
"""Recompute policies by name."""
ATTENTION_KEPT = SelectiveRecompute(save=("attention",))
"""Selective recomputation that repeats products, too, but not attention, which grows with the square of the
sequence."""


class LayerLayout(NamedTuple):
    """Axes inside a stage: what a dense block's operators and messages depend on."""

    tp: int
    sequence_parallel: bool
    cp: int
    context_mode: ContextMode
    micro_batch: int
    recompute: RecomputeSpec


class DataMesh(NamedTuple):
    """Pipeline ranks, data ranks (replicate x dp), expert ranks, and the order of the axes."""

    pp: int
    data: int
    ep: int
    etp: int
    order: Order = "pp-replicate-dp-tp"


class StageSplit(NamedTuple):
    """The stages of a pipeline and their schedule."""

    schedule: str
    chunks: int
    """Stages of a rank."""
    stages: str | tuple[int, ...]
    blocks: tuple[int, ...]
    """Blocks of each stage."""


class Sharding(NamedTuple):
    """How data ranks share states."""

    zero: int
    replicate: int


NO_CUT, NO_SHARDING = StageSplit("1f1b", 1, "even", ()), Sharding(0, 1)
"""Placeholders for costs that do not depend on these levels."""


def context_modes(cp: int, local: int, wanted: ContextMode | None = None) -> list[ContextMode]:
    """Modes of a context axis of `cp` ranks with `local` key-value heads on a tensor rank, or `wanted`.

    Those that are another mode's second name are left out.
    """
    if wanted is not None or cp == 1:
        modes: Sequence[ContextMode] = (wanted or "ring",)
    else:
        modes = [
            m for m in get_args(ContextMode) if m != "ring+ulysses" or 1 < ulysses_ranks(cp, local, m) < cp
        ]
    return [mode for mode in modes if mode != "ulysses" or local % cp == 0]
