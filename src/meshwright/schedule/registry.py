"""The schedules by name, and the number of stages per rank that each needs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache

from meshwright.schedule import builders
from meshwright.schedule.actions import Action, Lists, Schedule, ScheduleError, looped, v_shape
from meshwright.schedule.v_half_min import v_half, v_min
from meshwright.spec import Layout
from meshwright.spec.pipeline_schedules import SCHEDULES, virtual_problem

NAMES = tuple(SCHEDULES)
"""Values of `layout.schedule`."""

_PATTERNS: dict[str, Callable[[builders.ScheduleBuilder], None]] = {
    "gpipe": builders.gpipe,
    "1f1b": builders.one_f_one_b,
    "zb-h1": builders.zb_h1,
    "zb-h2": builders.zb_h2,
    "interleaved": builders.interleaved,
    "bfs": builders.breadth_first,
    "zb-v": builders.zb_v,
    "dualpipe-v": builders.dualpipe_v,
}
"""Schedules that are written rank by rank."""
_BLOCKS: dict[str, Callable[[int, int], Lists]] = {"v-half": v_half, "v-min": v_min}
"""Schedules that are made for all ranks at once, from (ranks, microbatches)."""


@lru_cache(maxsize=64)  # layouts that are compared with each other share schedules
def make(name: str, ranks: int, virtual: int, microbatches: int) -> Schedule:
    """The schedule `name` (one of `NAMES`) for p ranks, v stages on each, and m microbatches.

    Raises `ScheduleError` for an unknown name, for a `virtual` that the schedule is not made for, and for
    fewer than one rank or microbatch. Any m >= 1 is accepted; below the number that a schedule is made for
    (2p - 1 for zb-h2 and zb-v, 2p for dualpipe-v) it is the schedule for that number without the missing
    microbatches.
    """
    if name not in NAMES:
        raise ScheduleError(f"layout.schedule is '{name}', which is not known; one of {', '.join(NAMES)} is")
    if ranks < 1:
        raise ScheduleError(f"layout.pp is {ranks}, but a pipeline has at least 1 rank; 1 would work")
    if problem := virtual_problem(name, virtual):
        raise ScheduleError(problem)
    if microbatches < 1:
        raise ScheduleError(
            f"there are {microbatches} microbatches (batch sequences / (layout.micro_batch x data ranks)), "
            f"but layout.schedule '{name}' needs at least 1; a larger batch, a smaller layout.micro_batch "
            f"or fewer data ranks would work"
        )
    if name in _BLOCKS:
        lists = _BLOCKS[name](ranks, microbatches)
    else:
        lists = [_written(name, ranks, virtual, microbatches, rank) for rank in range(ranks)]
    return Schedule(
        name, ranks, virtual, microbatches, _placed(name, ranks, virtual), tuple(map(tuple, lists))
    )


def actions_of(name: str, ranks: int, virtual: int, microbatches: int, rank: int) -> Sequence[Action]:
    """The list of one rank of a schedule that `make` makes; of others only where it is not made without."""
    if name in _BLOCKS:
        return make(name, ranks, virtual, microbatches).actions[rank]
    return _written(name, ranks, virtual, microbatches, rank)


def stages_of(name: str, ranks: int, virtual: int, rank: int) -> list[int]:
    """The stages of one rank of a schedule, ascending."""
    return [stage for stage, owner in enumerate(_placed(name, ranks, virtual)) if owner == rank]


def _placed(name: str, ranks: int, virtual: int) -> tuple[int, ...]:
    """Stage -> the rank that computes it."""
    return v_shape(ranks) if SCHEDULES[name].stages == 2 else looped(ranks, virtual)


def _written(name: str, ranks: int, virtual: int, microbatches: int, rank: int) -> list[Action]:
    tape = builders.ScheduleBuilder(rank, _placed(name, ranks, virtual), microbatches)
    _PATTERNS[name](tape)
    return tape.actions


def schedule_of(layout: Layout, microbatches: int) -> Schedule:
    """The schedule of a layout; without a pipeline one rank with one stage, whatever schedule is named."""
    return make(layout.schedule if layout.pp > 1 else "1f1b", layout.pp, layout.chunks, microbatches)
