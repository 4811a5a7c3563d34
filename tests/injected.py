"""A rank that goes through phases under a plan of faults, and trains nothing."""

from __future__ import annotations

from dataclasses import dataclass, field

from meshwright.chaos.faults import Fault, FaultPlan
from meshwright.chaos.inject import Injection
from meshwright.comm.heartbeat import Heartbeat
from meshwright.rank.env import Supervision, Worker

STEP = ("data", "forward", "forward", "backward", "reduce", "optimiser")


@dataclass
class Rank:
    """A rank that goes through phases and trains nothing."""

    plan: FaultPlan
    rank: int = 0
    generation: int = 0
    done: int = 0
    snapshots: tuple[int, ...] = ()
    heartbeat: Heartbeat = field(default_factory=Heartbeat)

    def __post_init__(self) -> None:
        supervision = Supervision(self.generation, 0.0, -1, self.snapshots, **self.plan.given)
        self.injection = Injection(supervision, Worker(self.rank, 2, self.rank, 2))
        self.injection.attach(self)  # type: ignore[arg-type]
        self.heartbeat.phase("start")

    def step(self) -> None:
        self.heartbeat.phase("data", self.done)
        for phase in STEP[1:]:
            self.heartbeat.phase(phase)
        self.done += 1

    def steps(self, number: int) -> None:
        for _ in range(number):
            self.step()
        self.heartbeat.phase("end", self.done)


def arm(plan: FaultPlan) -> None:
    for number in range(len(plan.hits.faults)):
        plan.hits.write(number, armed=1)


class ActedError(Exception):
    pass


def raising(injection: Injection, number: int, fault: Fault, done: int) -> None:
    injection.acted(number)
    raise ActedError
