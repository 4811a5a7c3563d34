"""Pipeline schedules as data: lists of actions, by rank; made, checked and timed without torch."""

from meshwright.schedule.actions import Action, Kind, Schedule, ScheduleError, Step, steps
from meshwright.schedule.lanes import Lane, lane_rule, lanes_of
from meshwright.schedule.posting import Operation, Posting, Verb, forward_only, posting, postings
from meshwright.schedule.registry import NAMES, make, schedule_of
from meshwright.schedule.replay import replay
from meshwright.schedule.simulate import Idle, Link, Path, Simulation, StageCost, ends, simulate
from meshwright.schedule.v_half_min import MOST_HELD
from meshwright.schedule.validate import Report, check

__all__ = [
    "MOST_HELD",
    "NAMES",
    "Action",
    "Idle",
    "Kind",
    "Lane",
    "Link",
    "Operation",
    "Path",
    "Posting",
    "Report",
    "Schedule",
    "ScheduleError",
    "Simulation",
    "StageCost",
    "Step",
    "Verb",
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
