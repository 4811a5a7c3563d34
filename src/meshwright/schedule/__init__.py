"""Pipeline schedules as data: lists of actions, by rank; made, checked and timed without torch.

`actions` are the type, `registry` the names, `builders` and `v_half_min` make the lists. `validate` checks
them, `posting` turns them into messages over `lanes`, and `replay` finds ranks that would hang. `simulate`
times them, `bubble_formulas` are their closed forms, and `in_flight` counts microbatches that are under
way.
"""

from meshwright.schedule.actions import Action, Kind, Schedule, ScheduleError, steps
from meshwright.schedule.lanes import Lane, lane_rule, lanes_of
from meshwright.schedule.posting import Operation, PostedKind, Posting, forward_only, posting, postings
from meshwright.schedule.registry import NAMES, make, schedule_of
from meshwright.schedule.replay import replay
from meshwright.schedule.simulate import Path, Simulation, StageCost, StageLink, ends, simulate
from meshwright.schedule.v_half_min import MOST_HELD
from meshwright.schedule.validate import check

__all__ = [
    "MOST_HELD",
    "NAMES",
    "Action",
    "Kind",
    "Lane",
    "Operation",
    "Path",
    "PostedKind",
    "Posting",
    "Schedule",
    "ScheduleError",
    "Simulation",
    "StageCost",
    "StageLink",
    "check",
    "ends",
    "forward_only",
    "lane_rule",
    "lanes_of",
    "make",
    "posting",
    "postings",
    "replay",
    "schedule_of",
    "simulate",
    "steps",
]
