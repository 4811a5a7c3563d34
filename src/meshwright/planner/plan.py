"""Plans: the best layouts of a run on a cluster, each with its time, its memory and their uncertainty."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property, partial
from itertools import pairwise
from math import log
from typing import Any

from meshwright.hardware.cluster import Cluster
from meshwright.planner.cost.model import CostModel
from meshwright.planner.cost.software import MESHWRIGHT, SoftwareStack
from meshwright.planner.cost.uncertainty import COMFORTABLE
from meshwright.planner.explain.alternatives import alternatives
from meshwright.planner.explain.candidate import Candidate
from meshwright.planner.explain.explanation import Explanation
from meshwright.planner.island_plans import IslandChoice, choose_islands
from meshwright.planner.memory.states import checkpoint_bytes
from meshwright.planner.search.infeasible import shortfall
from meshwright.planner.search.objectives import largest_model, longest_context
from meshwright.planner.search.problem import SearchProblem
from meshwright.planner.search.request import PlanRequest
from meshwright.planner.search.results import Progress, SearchCounts, TimedLayout, kind
from meshwright.planner.search.simplest import NEAR, Ordering, simpler
from meshwright.reliability.goodput import DAY
from meshwright.reliability.training_time import TrainingTime, training_time
from meshwright.spec import ModelSpec, RunSpec, UserError
from meshwright.spec.rules import check
from meshwright.units import short

_NEIGHBOURS = 6
"""Neighbours of the best plan that are listed."""
Finished = Callable[[int, "Plan | None"], None]
"""Called with a number of devices, and the best plan on them."""


class Plan(Candidate):
    """A layout with its time, memory and cost."""

    step_seconds = Candidate.seconds
    """Seconds of a step, by the name that JSON has."""

    @property
    def is_comfortable(self) -> bool:
        """True if it fits with a probability of `COMFORTABLE`."""
        return self.fits_probability >= COMFORTABLE

    @property
    def cost_per_token(self) -> float | None:
        """USD for a token; None where the cluster's price is not known."""
        price = self.cluster.price
        return None if price is None else price * self.cluster.count / 3600 / self.tokens_per_second

    def training(self, tokens: float) -> TrainingTime:
        """Days and USD of training on so many tokens, with failures and the batch's warm-up. Raises
        `UserError`."""
        size, train = checkpoint_bytes(self.spec), self.spec.train
        longer = tokens + self._lost_in_warmup(tokens)
        return training_time(
            size, self.cluster.count, self.step_seconds, train.batch_tokens, longer, self.cluster.price
        )

    def _lost_in_warmup(self, tokens: float) -> float:
        """Tokens that whole batches would train on in the time that smaller ones take longer for theirs."""
        stages, lost = self.spec.train.batch_stages, 0.0
        for stage, following in pairwise(stages):
            trained = min(tokens, following.tokens_before) - stage.tokens_before
            if trained > 0:
                spec = self.spec.at_step(stage.steps_before + 1)
                slower = Candidate(spec, self.costs, self.times).tokens_per_second
                lost += trained * (self.tokens_per_second / slower - 1)
        return lost

    def to_json(self, tokens: float | None = None) -> dict[str, Any]:
        """Plain values; with a number of tokens also days and USD of training on them, with failures."""
        cost, training = self.cost_per_token, None if tokens is None else self.training(tokens)
        return {
            "gpus": self.cluster.count,
            **self.figures(),
            "seq_len": self.spec.data.seq_len,
            "batch_tokens": self.spec.train.batch_tokens,
            "tokens_per_second_per_gpu": self.tokens_per_second / self.cluster.count,
            "usd_per_billion_tokens": None if cost is None else 1e9 * cost,
            "days": training and training.days,
            "usd": training and training.usd,
            "failures": training and training.to_json(),
            "memory": self.memory.to_json(),
            "memory_rank": self.memory.rank,
            "parts": self.parts,
        }


@dataclass(frozen=True)
class Plans:
    """The best plans, best first; but one that is nearly as fast as the fastest, and fits more surely or is
    simpler, is before it."""

    plans: tuple[Plan, ...]
    faster: Plan | None
    """The fastest plan, where another is before it."""
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
    exchange_choice: IslandChoice | None = None
    """How islands of the first plan were chosen, where they were."""
    policy_given: bool = False
    """True if the recompute policy was not to be chosen."""

    @property
    def best(self) -> Plan:
        """The first plan."""
        return self.plans[0]

    @property
    def is_surer(self) -> bool:
        """True if the first plan is before the fastest because it fits comfortably, which that does not."""
        return self.faster is not None and self.best.is_comfortable and not self.faster.is_comfortable

    @property
    def simpler(self) -> str | None:
        """Why the first plan is before the fastest, in words; None where it is the fastest."""
        if self.faster is None:
            return None
        words = simpler(self.best.spec, self.faster.spec, Ordering(self.best.cluster))
        if not self.is_surer:
            return words
        surer = f"fits with {self.best.fits_probability:.0%} instead of {self.faster.fits_probability:.0%}"
        return f"{surer}; {words}" if words else surer

    @property
    def model_found(self) -> ModelSpec | None:
        """The model, where the largest was asked for."""
        return self.best.spec.model if self.objective == "largest-model" else None

    @cached_property
    def alternatives(self) -> list[str]:
        """Sentences on what besides the layout would be more than 10% better."""
        return alternatives(self.best, self.capacity, self.policy_given)

    @cached_property
    def reasons(self) -> Explanation:
        """Why the best plan, and not its nearest neighbours."""
        return Explanation(self.best.spec, self.best.costs, self.capacity, _NEIGHBOURS)

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
            "faster": None if self.faster is None else self.faster.figures() | {"simpler": self.simpler},
            "alternatives": self.alternatives,
            "never_measured": self.best.never_measured,
            "parameters": model.parameters,
            "model_found": None if self.model_found is None else self.model_found.model_dump(mode="json"),
            "best": plans[0],
            "plans": plans,
            "searched": asdict(self.searched),
            "islands": self.exchange_choice and self.exchange_choice.to_json(),
            "pareto": [list(point) for point in self.pareto],
        }


def estimate(spec: RunSpec, cluster: Cluster, stack: SoftwareStack = MESHWRIGHT, documents: int = 1) -> Plan:
    """Time and memory of one layout on a cluster with as many devices as it has ranks.

    A packed sample is taken for so many `documents`. Raises `UserError`.
    """
    return Plan(spec, CostModel(cluster, stack, documents=documents))


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
    problems, choices = _with_islands(problems, request)
    rank = partial(_rank, request.objective, request.total_tokens)
    plans, simple, counts = list[Plan](), list[Plan](), SearchCounts()
    front: Sequence[TimedLayout] = ()
    for problem in problems:
        result = problem.search(request.top, progress=progress, counts=counts)
        if not result.best and problem.fixed:
            problem = replace(problem, unsure=True)
            result = problem.search(request.top, progress=progress, counts=counts)
        timed = result.best if result.preferred is None else [*result.best, result.preferred]
        for each in timed:
            check(each.spec)
        fitting = [Plan(each.spec, problem.costs) for each in timed]
        if finished is not None and len(problems) > 1:
            finished(problem.ranks, _simplest(fitting, rank) if fitting else None)
        plans += fitting[: len(result.best)]
        simple += fitting[len(result.best) :]
        front = result.front or front
    if not plans:
        raise UserError(shortfall(problems[-1]))
    if (tokens := request.total_tokens) is not None and request.within is not None:
        plans = _in_time(plans, tokens, request.most_seconds)
        simple = [each for each in simple if each.training(tokens).days * DAY <= request.most_seconds]
    first, best = min(plans, key=rank), _simplest([*plans, *simple], rank)
    faster = first if first.beats(best) else None
    others = [each for each in plans if each is faster or kind(each.spec) != kind(best.spec)]
    shown = best, *(each for each in sorted(others, key=rank) if each is not best)
    choice = choices.get(best.cluster.count)
    return Plans(
        plans=shown[: request.top],
        faster=faster,
        objective=request.objective,
        stack=problems[-1].stack,
        note=note,
        tokens=request.total_tokens,
        searched=counts,
        pareto=tuple((timed.seconds, timed.memory) for timed in front),
        capacity=problem.capacity,
        exchange_choice=choice and choice.of(best),
        policy_given="policy" in problems[-1].fixed,
    )


def _with_islands(
    problems: list[SearchProblem], request: PlanRequest
) -> tuple[list[SearchProblem], dict[int, IslandChoice]]:
    """The searches with the islands that are asked for, and how they were chosen by number of devices."""
    if request.islands is None:
        return problems, {}
    wanted, keys, limit = request.islands, request.given_in("outer"), request.max_exposed / 100
    chosen = [choose_islands(problem, wanted, keys, limit) for problem in problems]
    return [problem for problem, _ in chosen], {problem.ranks: choice for problem, choice in chosen}


def _simplest(plans: Sequence[Plan], rank: Callable[[Plan], tuple[int, float]]) -> Plan:
    """The plan that changes least of those near the first by `rank`, on as many devices, and fits comfortably
    if one of them does."""
    first = min(plans, key=rank)
    slowest, count = (1 + NEAR) * first.step_seconds, first.cluster.count
    near = [each for each in plans if each.cluster.count == count and each.step_seconds <= slowest]
    ordering = Ordering(first.cluster)
    return min(near, key=lambda each: (not each.is_comfortable, ordering.of(each.spec), rank(each)))


def _in_time(plans: Sequence[Plan], tokens: float, most: float) -> list[Plan]:
    """The plans that train on all tokens within `most` seconds. Raises `UserError` where there are none."""
    days = {each: each.training(tokens).days for each in plans}
    if found := [each for each in plans if days[each] * DAY <= most]:
        return found
    best = min(plans, key=days.__getitem__)
    raise UserError(
        f"--within: {most / DAY:.4g} days are too short for {short(tokens)} tokens: the fastest plan, on "
        f"{best.cluster.count:,} devices, takes {days[best]:.4g} with failures; more devices or time would do"
    )


def _rank(objective: str, tokens: float | None, plan: Plan) -> tuple[int, float]:
    """Sort key: time, or money, with failures if tokens are given; memory where equal but for rounding."""
    value = 1 / plan.tokens_per_second
    if objective == "cost":
        value = (plan.cost_per_token if tokens is None else plan.training(tokens).usd) or 0.0
    return round(1e9 * log(value)) if value else 0, plan.memory.device
