"""Plans: the best layouts of a run on a cluster, each with its time, its memory and their uncertainty."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property, partial
from math import log
from typing import Any

from meshwright.hardware.cluster import Cluster
from meshwright.planner.cost.model import CostModel
from meshwright.planner.cost.software import MESHWRIGHT, SoftwareStack
from meshwright.planner.explain.candidate import Candidate
from meshwright.planner.explain.explanation import Explanation, explain
from meshwright.planner.search.infeasible import shortfall
from meshwright.planner.search.objectives import largest_model, longest_context
from meshwright.planner.search.request import PlanRequest
from meshwright.planner.search.results import Progress, SearchCounts, TimedLayout
from meshwright.spec import ModelSpec, RunSpec, UserError
from meshwright.spec.rules import check

_NEIGHBOURS = 6
"""Neighbours of the best plan that are listed."""
Finished = Callable[[int, "Plan | None"], None]
"""Called with a number of devices, and the best plan on them."""


class Plan(Candidate):
    """A layout with its time, memory and cost."""

    step_seconds = Candidate.seconds
    """Seconds of a step, by the name that JSON has."""

    @property
    def cost_per_token(self) -> float | None:
        """USD for a token; None where the cluster's price is not known."""
        price = self.cluster.price
        return None if price is None else price * self.cluster.count / 3600 / self.tokens_per_second

    def to_json(self, tokens: float | None = None) -> dict[str, Any]:
        """Plain values; with a number of tokens also days and USD of training on them."""
        cost = self.cost_per_token
        return {
            "gpus": self.cluster.count,
            **self.figures(),
            "seq_len": self.spec.data.seq_len,
            "batch_tokens": self.spec.train.batch_tokens,
            "tokens_per_second_per_gpu": self.tokens_per_second / self.cluster.count,
            "usd_per_billion_tokens": None if cost is None else 1e9 * cost,
            "days": None if tokens is None else tokens / self.tokens_per_second / 86400,
            "usd": None if tokens is None or cost is None else tokens * cost,
            "memory": self.memory.to_json(),
            "memory_rank": self.memory.rank,
            "parts": self.parts,
        }


@dataclass(frozen=True)
class Plans:
    """The best plans, best first."""

    plans: tuple[Plan, ...]
    objective: str
    stack: SoftwareStack
    note: str | None
    """The batch in words, where it was rounded."""
    tokens: float | None
    searched: SearchCounts
    pareto: tuple[tuple[float, float], ...]
    """Pareto front (step seconds, bytes of a device) of all timed layouts, fastest first."""
    capacity: float
    """Bytes of a device that a plan may need."""

    @property
    def best(self) -> Plan:
        """The first plan."""
        return self.plans[0]

    @property
    def model_found(self) -> ModelSpec | None:
        """The model, where the largest was asked for."""
        return self.best.spec.model if self.objective == "largest-model" else None

    @cached_property
    def reasons(self) -> Explanation:
        """Why the best plan, and not its nearest neighbours or the other plans on as many devices."""
        others = [plan.spec for plan in self.plans[1:]]
        return explain(self.best.spec, self.best.costs, others, self.capacity, _NEIGHBOURS)

    def to_json(self, why: bool = True) -> dict[str, Any]:
        """Plain values, for `meshwright plan --json`; the reasons are left out unless `why`."""
        plans = [plan.to_json(self.tokens) for plan in self.plans]
        if why:
            plans[0] |= self.reasons.reasons()
        model = self.best.spec.model
        return {
            "model": model.preset or model.hf or model.family,
            "cluster": self.best.cluster.name,
            "device": self.best.cluster.device.name,
            "stack": self.stack.name,
            "objective": self.objective,
            "note": self.note,
            "parameters": model.parameters,
            "model_found": None if self.model_found is None else self.model_found.model_dump(mode="json"),
            "best": plans[0],
            "plans": plans,
            "searched": asdict(self.searched),
            "pareto": [list(point) for point in self.pareto],
        }


def estimate(spec: RunSpec, cluster: Cluster, stack: SoftwareStack = MESHWRIGHT) -> Plan:
    """Time and memory of one layout on a cluster with as many devices as it has ranks. Raises `UserError`."""
    return Plan(spec, CostModel(cluster, stack))


def plan(request: PlanRequest, progress: Progress | None = None, finished: Finished | None = None) -> Plans:
    """The best layouts that a request asks for.

    Where keys of the layout are fixed and nothing fits with the probability that a plan should have, those
    are found that fit with one half or more: published runs were as tight.
    `progress` is called with each plan that is the best so far, and `finished`, if there are several numbers
    of devices, after the search for each: with the number, and the best plan or None. Raises `UserError`,
    also where nothing fits.
    """
    problems, note = request.problems()
    if request.objective == "longest-context":
        problems, note = [longest_context(problems[-1])], None
    if request.objective == "largest-model":
        problems = [largest_model(problems[-1])]
    rank, plans, counts = partial(_rank, request.objective), list[Plan](), list[SearchCounts]()
    front: Sequence[TimedLayout] = ()
    for problem in problems:
        result = problem.search(request.top, progress)
        if not result.best and problem.fixed:
            problem = replace(problem, unsure=True)
            result = problem.search(request.top, progress)
        for timed in result.best:
            check(timed.spec)
        fitting = sorted((Plan(timed.spec, problem.costs) for timed in result.best), key=rank)
        if finished is not None and len(problems) > 1:
            finished(problem.ranks, fitting[0] if fitting else None)
        plans += fitting
        counts.append(result.counts)
        front = result.front or front
    if not plans:
        raise UserError(shortfall(problems[-1]))
    return Plans(
        plans=tuple(sorted(plans, key=rank)[: request.top]),
        objective=request.objective,
        stack=problems[-1].stack,
        note=note,
        tokens=request.total_tokens,
        searched=_total(counts),
        pareto=tuple((timed.seconds, timed.memory) for timed in front),
        capacity=problem.capacity,
    )


def _rank(objective: str, plan: Plan) -> tuple[int, float]:
    """Sort key: time, or cost; where they are equal but for rounding, memory."""
    value = plan.cost_per_token or 0.0 if objective == "cost" else 1 / plan.tokens_per_second
    return round(1e9 * log(value)) if value else 0, plan.memory.device


def _total(counts: Sequence[SearchCounts]) -> SearchCounts:
    """The work of all searches."""
    return SearchCounts(
        sum(each.branches for each in counts),
        sum(each.simulated for each in counts),
        sum(each.timed for each in counts),
        sum(each.seconds for each in counts),
        min((each.first_seconds for each in counts if each.first_seconds is not None), default=None),
    )
