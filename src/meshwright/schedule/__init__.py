"""Pipeline schedules as data: lists of actions, by rank; made, checked and timed without torch."""

from meshwright.schedule.actions import Action, Kind, Schedule, ScheduleError, Step, steps
from meshwright.schedule.catalogue import NAMES, make, schedule_of
from meshwright.schedule.check import Report, check
from meshwright.schedule.controllable import MOST_HELD
from meshwright.schedule.simulate import Idle, Link, Path, Simulation, StageCost, ends, simulate

__all__ = [
    "MOST_HELD",
    "NAMES",
    "Action",
    "Idle",
    "Kind",
    "Link",
    "Path",
    "Report",
    "Schedule",
    "ScheduleError",
    "Simulation",
    "StageCost",
    "Step",
    "check",
    "ends",
    "make",
    "schedule_of",
    "simulate",
    "steps",
]
