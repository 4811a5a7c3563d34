"""Pipeline schedules: how many stages a rank has in each, and what it holds and puts off.

`meshwright.schedule` makes them; they are listed here because the spec is the floor below.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

ScheduleName = Literal[
    "gpipe", "1f1b", "zb-h1", "zb-h2", "interleaved", "bfs", "zb-v", "v-half", "v-min", "dualpipe-v"
]


@dataclass(frozen=True)
class ScheduleKind:
    """A row of the table."""

    stages: int | None
    """Stages of a rank: 1, 2 in a V, or None for any number, in loops."""
    holds_all: bool = False
    """True if ranks hold the activations of all microbatches at a time."""
    splits: bool = False
    """True if it puts gradients of weights off (zero bubble)."""


SCHEDULES: dict[str, ScheduleKind] = {
    "gpipe": ScheduleKind(1, holds_all=True),
    "1f1b": ScheduleKind(1),
    "zb-h1": ScheduleKind(1, splits=True),
    "zb-h2": ScheduleKind(1, splits=True),
    "interleaved": ScheduleKind(None),
    "bfs": ScheduleKind(None, holds_all=True),
    "zb-v": ScheduleKind(2, splits=True),
    "v-half": ScheduleKind(2, splits=True),
    "v-min": ScheduleKind(2, splits=True),
    "dualpipe-v": ScheduleKind(2, splits=True),
}
"""Value of `layout.schedule` -> its row."""
assert tuple(SCHEDULES) == get_args(ScheduleName)
DEFAULT_SCHEDULE: ScheduleName = "zb-h1"
"""The default schedule, but of blocks that are compiled or recomputed."""
WHOLE_SCHEDULE: ScheduleName = "1f1b"
"""The default schedule of blocks that are compiled or recomputed: it does not split backwards."""


def virtual_problem(schedule: str, virtual: int) -> str:
    """Return the reason why a schedule cannot have `virtual` stages per rank, or an empty string."""

    def allows(name: str) -> bool:
        return virtual > 0 and SCHEDULES[name].stages in (None, virtual)

    if allows(schedule):
        return ""
    needed = str(SCHEDULES[schedule].stages or "at least 1")
    others = f", or one of the schedules {', '.join(filter(allows, SCHEDULES))}" if virtual > 0 else ""
    return (
        f"layout.virtual: {virtual} stages a rank do not go with layout.schedule = '{schedule}', which has "
        f"{needed}; give layout.virtual = {needed[-1]}{others}"
    )
