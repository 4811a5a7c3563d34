"""One way of training a model on some GPUs: the layout that the search finds, its memory, and what else fits.

Where no layout fits, the one that needs least is found by the same search, with as much memory as it takes.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from meshwright.planner.cost.uncertainty import COMFORTABLE, fitting, memory_interval, room, spread
from meshwright.planner.fit.command import train_command
from meshwright.planner.fit.most import largest_micro_batch, longest_sequence
from meshwright.planner.fit.ways import Way
from meshwright.planner.memory.exact import memory_model
from meshwright.planner.memory.host import host_bytes, host_ranks, host_room, offloads, with_host_room
from meshwright.planner.plan import Plan
from meshwright.planner.search.branch_and_bound import search
from meshwright.planner.search.infeasible import shortfall
from meshwright.planner.search.problem import SearchProblem
from meshwright.planner.search.request import PlanRequest
from meshwright.spec import RunSpec, UserError

_GROWTH = 1.05
"""Factor from one size of memory that is tried to the next, where the least that fits is looked for."""


@dataclass(frozen=True)
class TrainingFit:
    """A way of training, and how it fits; `plan` is None where it cannot be had, for the `reason`."""

    way: Way
    request: PlanRequest
    problem: SearchProblem | None = None
    plan: Plan | None = None
    reason: str | None = None

    @property
    def probability(self) -> float:
        """Probability that it fits a GPU."""
        return 0.0 if self.plan is None else self.plan.fits_probability

    @property
    def fits_device(self) -> bool:
        """True if it fits a GPU more likely than not."""
        return self.plan is not None and self.probability >= 0.5

    @property
    def fits(self) -> bool:
        """True if it fits a GPU more likely than not, and the host, where its memory is known."""
        enough = self.host_memory is None or self.host_bytes <= self.host_memory
        return self.fits_device and enough

    @property
    def host_memory(self) -> float | None:
        """Bytes of the host's memory that the run may fill, where they are known."""
        return None if self.problem is None else host_room(self.problem.cluster)

    @property
    def interval(self) -> tuple[float, float]:
        """Bytes between which a GPU's need is in 9 of 10 cases."""
        assert self.plan is not None
        wider = spread(self.plan.cluster, self.plan.costs.stack)
        return memory_interval(self.plan.memory.device, wider)

    @cached_property
    def host_bytes(self) -> float:
        """Bytes in the host's memory, of all GPUs together."""
        if self.plan is None or not offloads(self.plan.spec):
            return 0.0
        return host_bytes(self.plan.spec, host_ranks(self.plan.cluster))

    @property
    def command(self) -> str | None:
        """The command line that trains so; None where it does not fit, and of a `RunSpec`, which has no
        file."""
        if self.plan is None or not self.fits or isinstance(self.request.model, RunSpec):
            return None
        return train_command(self.plan.spec, self.request)

    def to_json(self) -> dict[str, Any]:
        """Plain values; bytes are those of the fullest GPU."""
        found = {"way": self.way.name, "title": self.way.title, "fits": self.fits, "reason": self.reason}
        if self.plan is None or self.problem is None:
            return found
        memory, spec = self.plan.memory, self.plan.spec
        low, high = self.interval
        return found | {
            "bytes": {"low": low, "expected": memory.device, "high": high},
            "fits_probability": self.probability,
            "memory": memory.to_json(),
            "layout": spec.layout.model_dump(mode="json"),
            "layout_words": spec.layout.describe(),
            "recompute": spec.recompute.policy,
            "micro_batch": spec.micro_batch,
            "seq_len": spec.data.seq_len,
            "batch_tokens": spec.train.batch_tokens,
            "longest_seq_len": longest_sequence(self.problem, self.plan.spec),
            "largest_micro_batch": largest_micro_batch(self.problem, self.plan.spec),
            "host_bytes": self.host_bytes,
            "host_is_known": self.host_memory is not None,
            "tokens_per_second": self.plan.tokens_per_second,
            "command": self.command,
        }


def training_fit(way: Way, request: PlanRequest) -> TrainingFit:
    """How a way of training fits the request's GPUs; its reason says why it cannot be had."""
    try:
        request = replace(request, overrides=way.overrides(request))
        (problem,), _ = request.problems()
        return TrainingFit(way, request, problem, _planned(problem))
    except UserError as error:
        return TrainingFit(way, request, reason=str(error))


def _planned(problem: SearchProblem) -> Plan:
    """The fastest plan that fits comfortably, else surely, else more likely than not, else the one that needs
    least. Raises `UserError` where no layout is legal."""
    comfortable = fitting(room(problem.cluster), spread(problem.cluster, problem.stack), COMFORTABLE)
    unbound = replace(problem, cluster=with_host_room(problem.cluster, None))
    for run in [problem, unbound] if offloads(problem.base) else [problem]:
        for each in (replace(run, limit=comfortable), run, replace(run, unsure=True)):
            if best := each.search(1, simplest=False).best:
                return Plan(best[0].spec, problem.costs)
    return _least(unbound)


def _least(problem: SearchProblem) -> Plan:
    """A layout that needs no more than `_GROWTH` times the least, where the bound of that is as near. Raises
    `UserError` where none is legal."""
    bound = problem.least_memory()
    if bound is None:
        raise UserError(shortfall(problem))
    size, memory = _GROWTH * bound.device, memory_model(problem.costs)
    while True:
        if best := search(problem.space(), problem.costs, size, 1, any_will_do=True, memory=memory).best:
            return Plan(best[0].spec, problem.costs)
        size *= _GROWTH
