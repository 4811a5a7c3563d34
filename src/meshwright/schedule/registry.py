"""The schedules by name, and what each asks of a layout."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

from meshwright.schedule.actions import Lists, Schedule, ScheduleError, looped, v_shape
from meshwright.schedule.dualpipe_v import dualpipe_v
from meshwright.schedule.gpipe_bfs import breadth_first, gpipe
from meshwright.schedule.one_f_one_b import interleaved, one_f_one_b
from meshwright.schedule.v_half_min import v_half, v_min
from meshwright.schedule.zb_v import zb_v
from meshwright.schedule.zero_bubble import zb_h1, zb_h2
from meshwright.spec import Layout


@dataclass(frozen=True)
class _Family:
    """Schedules that take the same number of stages a rank, and so serve the same layouts."""

    virtual: str
    """Requirement on `layout.virtual`, as text."""
    allows: Callable[[int], bool]
    place: Callable[[int, int], tuple[int, ...]]
    """(ranks, virtual) -> the rank of each stage."""
    lists: dict[str, Callable[[int, int, int], Lists]]
    """Name -> lists of (ranks, virtual, microbatches)."""


def _alone(generate: Callable[[int, int], Lists]) -> Callable[[int, int, int], Lists]:
    """A generator that has one number of stages a rank, called as the others are."""
    return lambda ranks, virtual, microbatches: generate(ranks, microbatches)


_ONE = _Family(
    "1",
    lambda virtual: virtual == 1,
    looped,
    {"gpipe": _alone(gpipe), "1f1b": _alone(one_f_one_b), "zb-h1": _alone(zb_h1), "zb-h2": _alone(zb_h2)},
)
_LOOPED = _Family(
    "at least 1", lambda virtual: virtual >= 1, looped, {"interleaved": interleaved, "bfs": breadth_first}
)
_V = _Family(
    "2",
    lambda virtual: virtual == 2,
    lambda ranks, virtual: v_shape(ranks),
    {
        "zb-v": _alone(zb_v),
        "v-half": _alone(v_half),
        "v-min": _alone(v_min),
        "dualpipe-v": _alone(dualpipe_v),
    },
)
_FAMILIES = {name: family for family in (_ONE, _LOOPED, _V) for name in family.lists}

NAMES: tuple[str, ...] = tuple(_FAMILIES)
"""Values of `layout.schedule`."""


@lru_cache(maxsize=64)  # layouts that are compared with each other share schedules
def make(name: str, ranks: int, virtual: int, microbatches: int) -> Schedule:
    """The schedule `name` (one of `NAMES`) for p ranks, v stages on each, and m microbatches.

    Raises `ScheduleError` for an unknown name, for a `virtual` that the schedule is not made for, and for
    fewer than one rank or microbatch. Any m >= 1 is served; below what a schedule is made for (2p - 1 for
    zb-h2 and zb-v, 2p for dualpipe-v) it is the same schedule without the microbatches that are not there.
    """
    family = _FAMILIES.get(name)
    if family is None:
        raise ScheduleError(f"layout.schedule is '{name}', which is not known; one of {', '.join(NAMES)} is")
    if ranks < 1:
        raise ScheduleError(f"layout.pp is {ranks}, but a pipeline has at least 1 rank; 1 would work")
    if not family.allows(virtual):
        raise ScheduleError(_other_virtual(name, family, virtual))
    if microbatches < 1:
        raise ScheduleError(
            f"there are {microbatches} microbatches (batch sequences / (layout.micro_batch x data ranks)), "
            f"but layout.schedule '{name}' needs at least 1; a larger batch, a smaller layout.micro_batch "
            f"or fewer data ranks would work"
        )
    lists = family.lists[name](ranks, virtual, microbatches)
    placed = family.place(ranks, virtual)
    return Schedule(name, ranks, virtual, microbatches, placed, tuple(tuple(listed) for listed in lists))


def schedule_of(layout: Layout, microbatches: int) -> Schedule:
    """The schedule of a layout; without a pipeline one rank with one stage, whatever schedule is named."""
    return _made(layout.schedule if layout.pp > 1 else "1f1b", layout.pp, layout.chunks, microbatches)


@lru_cache(maxsize=4)
def _made(name: str, ranks: int, virtual: int, microbatches: int) -> Schedule:
    """The last ones are kept, since each rank of a pipeline is asked about in turn."""
    return make(name, ranks, virtual, microbatches)


def _other_virtual(name: str, family: _Family, virtual: int) -> str:
    needs = f"layout.virtual is {virtual}, but layout.schedule '{name}' needs it to be {family.virtual}"
    others = [other for other, its in _FAMILIES.items() if its.allows(virtual)]
    instead = f", or with {virtual} stages a rank one of {', '.join(others)}" if others else ""
    return f"{needs}; layout.virtual={family.virtual.split()[-1]} works{instead}"
