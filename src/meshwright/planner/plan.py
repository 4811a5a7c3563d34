"""Plans: the best layouts of a run on a cluster, each with its time, its memory and how sure both are."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from math import log
from pathlib import Path
from typing import Any

from meshwright.hardware import find as hardware
from meshwright.hardware.cluster import Cluster
from meshwright.planner.cost.kernels import peak
from meshwright.planner.cost.model import CostModel
from meshwright.planner.cost.software import MESHWRIGHT, SoftwareStack, stack_named
from meshwright.planner.cost.step import step_time
from meshwright.planner.cost.uncertainty import fits_probability, interval, room, spread
from meshwright.planner.explain.explanation import describe
from meshwright.planner.explain.reasons import Reasons, reasons
from meshwright.planner.memory.exact import fullest
from meshwright.planner.memory.generic import Memory
from meshwright.planner.search.branch_and_bound import Progress, SearchCounts, SearchResult
from meshwright.planner.search.infeasible import shortfall
from meshwright.planner.search.objectives import largest_model, longest_context
from meshwright.planner.search.request import (
    Overrides,
    PlanRequest,
    base_run,
    check_count,
    fixed_keys,
    node,
)
from meshwright.spec import ModelSpec, RunSpec, UserError
from meshwright.units import amount

OBJECTIVES = ("time", "cost", "longest-context", "largest-model")
"""Least seconds for a token, least money for a token; the longest sequences, the largest model that fits."""
_NEIGHBOURS = 6
"""Neighbours of the best plan that are told of."""


Finished = Callable[[int, "Plan | None"], None]
"""Hears of a number of devices, and of the best plan on them."""


@dataclass(frozen=True)
class Plan:
    """A run on a cluster, estimated."""

    spec: RunSpec
    cluster: Cluster
    step_seconds: float
    interval: tuple[float, float]
    """In which a step is in 9 of 10 cases."""
    memory: Memory
    fits_probability: float
    mfu: float
    """Model FLOPs of a second over the devices' peak for the format that computes."""
    parts: dict[str, float]
    """Seconds of a step by what they go to."""

    @property
    def tokens_per_second(self) -> float:
        return self.spec.train.batch_tokens / self.step_seconds

    @property
    def cost_per_token(self) -> float | None:
        """USD, where the cluster's price is known."""
        price = self.cluster.price
        return None if price is None else price * self.cluster.count / 3600 / self.tokens_per_second

    def to_json(self, tokens: float | None = None) -> dict[str, Any]:
        """Plain values; with a number of tokens also days and USD of training on them."""
        found = asdict(self.memory)
        rank = found.pop("rank")
        totals = {name: getattr(self.memory, name) for name in ("allocated", "reserved", "device")}
        each = self.cost_per_token
        return {
            "gpus": self.cluster.count,
            "layout": self.spec.layout.model_dump(mode="json"),
            "recompute": self.spec.recompute.model_dump(mode="json"),
            "seq_len": self.spec.data.seq_len,
            "batch_tokens": self.spec.train.batch_tokens,
            "step_seconds": self.step_seconds,
            "interval": list(self.interval),
            "fits_probability": self.fits_probability,
            "mfu": self.mfu,
            "tokens_per_second": self.tokens_per_second,
            "tokens_per_second_per_gpu": self.tokens_per_second / self.cluster.count,
            "usd_per_billion_tokens": None if each is None else 1e9 * each,
            "days": None if tokens is None else tokens / self.tokens_per_second / 86400,
            "usd": None if tokens is None or each is None else tokens * each,
            "memory": {**found, **totals},
            "memory_rank": rank,
            "parts": self.parts,
        }


@dataclass(frozen=True)
class Plans:
    """The best plans, best first."""

    plans: tuple[Plan, ...]
    objective: str
    stack: SoftwareStack
    note: str | None
    """What was taken for what was said, in words."""
    tokens: float | None
    searched: SearchCounts
    pareto: tuple[tuple[float, float], ...]
    """(step seconds, bytes of a device) of what nothing else timed is better than in both, fastest first."""
    capacity: float
    """Bytes of a device that a plan may need."""

    @property
    def best(self) -> Plan:
        return self.plans[0]

    @property
    def model_found(self) -> ModelSpec | None:
        """The model, where the largest was asked for."""
        return self.best.spec.model if self.objective == "largest-model" else None

    @cached_property
    def reasons(self) -> Reasons:
        """Why the best plan, and not its nearest neighbours or the other plans on as many devices."""
        best = self.best
        alike = [each.spec for each in self.plans[1:] if each.cluster.count == best.cluster.count]
        others = {describe(each): each for each in alike}
        return reasons(best.spec, CostModel(best.cluster, self.stack), self.capacity, others, _NEIGHBOURS)

    def to_json(self, why: bool = True) -> dict[str, Any]:
        """Plain values, for `meshwright plan --json`; unless `why` counts, without the reasons."""
        plans = [each.to_json(self.tokens) for each in self.plans]
        if why:
            plans[0] |= self.reasons.to_json()
        return {
            "model": self.best.spec.model.preset or self.best.spec.model.hf or self.best.spec.model.family,
            "cluster": self.best.cluster.name,
            "device": self.best.cluster.device.name,
            "stack": self.stack.name,
            "objective": self.objective,
            "note": self.note,
            "parameters": self.best.spec.model.parameters,
            "model_found": None if self.model_found is None else self.model_found.model_dump(mode="json"),
            "best": plans[0],
            "plans": plans,
            "searched": asdict(self.searched),
            "pareto": [list(point) for point in self.pareto],
        }


def estimate(spec: RunSpec, cluster: Cluster, stack: SoftwareStack = MESHWRIGHT) -> Plan:
    """What one layout takes on a cluster with as many devices as it has ranks. Raises `UserError`."""
    if spec.layout.world_size != cluster.count:
        raise UserError(
            f"layout: {spec.layout.describe()} has {spec.layout.world_size:,} ranks, but the cluster has "
            f"{cluster.count:,} devices; give as many"
        )
    on = CostModel(cluster, stack)
    timed = step_time(spec, on)
    needs = fullest(spec, on)
    wider, model = spread(cluster, stack), spec.model
    flops = model.flops_per_token(spec.data.seq_len) * spec.train.batch_tokens
    rate = peak(cluster.device, spec.precision.compute) * cluster.count
    if cluster.device.kind == "cpu":
        rate /= cluster.sharing
    return Plan(
        spec=spec,
        cluster=cluster,
        step_seconds=timed.seconds,
        interval=interval(timed.seconds, wider),
        memory=needs,
        fits_probability=fits_probability(needs.device, room(cluster), wider),
        mfu=flops / timed.seconds / rate,
        parts=timed.parts,
    )


def plan(
    model: str | Path | RunSpec,
    cluster: str | Cluster,
    *,
    gpus: int | str | None = None,
    seq_len: int | None = None,
    batch_tokens: int | str | None = None,
    top: int = 5,
    objective: str = "time",
    stack: str = "meshwright",
    price: float | None = None,
    tokens: float | str | None = None,
    max_memory: float | None = None,
    overrides: Overrides = (),
    progress: Progress | None = None,
    finished: Finished | None = None,
) -> Plans:
    """The `top` best layouts of a model on a cluster.

    `model` is a preset, an HF folder or config.json, a run file or folder, or a `RunSpec` whose layout does
    not count; `cluster` a name of the catalogue, a hardware file or a `Cluster`, of `gpus` devices or of
    any power-of-two number of nodes within '64..1024'. `batch_tokens` may be '16M'. `max_memory` is in bytes
    of a device, `price` in USD for a device and hour, `tokens` what is trained on in all. `overrides` are
    dotted keys with their texts: those of the layout and `recompute.policy` are kept fixed. `progress` hears
    of each plan that is the best so far, and `finished`, where there are several numbers of devices, of each
    when its search is done: the number, and the best plan or None. Raises `UserError`, also where nothing
    fits.
    """
    chosen, kind = stack_named(stack), _cluster(cluster, price)
    _check(objective, top, kind, seq_len)
    sizes = _sizes(gpus, kind)
    base, note = base_run(model, kind, seq_len, batch_tokens, overrides)
    whole = _total(tokens)
    base = _trained_on(base, whole)
    fixed = fixed_keys(overrides)
    wishes = [PlanRequest(base, kind.resized(count), chosen, fixed, max_memory) for count in sizes]
    if objective == "longest-context":
        wishes = [longest_context(wishes[-1])]
    if objective == "largest-model":
        wishes = [largest_model(wishes[-1])]
    found = []
    for wish in wishes:
        found.append((wish, *_best(wish, top, objective, progress)))
        if finished is not None and len(wishes) > 1:
            finished(wish.ranks, next(iter(found[-1][-1]), None))
    plans = [each for _, _, listed in found for each in listed]
    if not plans:
        raise UserError(shortfall(wishes[-1]))
    plans.sort(key=lambda each: _rank(each, objective))
    return Plans(
        plans=tuple(plans[:top]),
        objective=objective,
        stack=chosen,
        note=None if objective == "longest-context" else note,
        tokens=whole,
        searched=_together(found),
        pareto=_front(found),
        capacity=wishes[-1].capacity,
    )


def _trained_on(base: RunSpec, tokens: float | None) -> RunSpec:
    """The run with so many tokens in all; None leaves it as it is."""
    if tokens is None:
        return base
    train = base.train.model_copy(update={"steps": None, "tokens": int(tokens)})
    return base.model_copy(update={"train": train})


def _check(objective: str, top: int, kind: Cluster, seq_len: int | None) -> None:
    if objective not in OBJECTIVES:
        raise UserError(f"--objective: '{objective}' is not one of {', '.join(OBJECTIVES)}")
    if top < 1:
        raise UserError(f"--top: {top} plans are none; give 1 or more")
    if objective == "longest-context" and seq_len is not None:
        raise UserError(
            f"--seq-len: {seq_len:,} is given, but the objective 'longest-context' looks for the longest; "
            f"leave one of them out"
        )
    if objective == "cost" and kind.price is None:
        raise UserError(
            f"--objective: 'cost' needs a price, and none is known of {kind.name}; give --price USD for a "
            f"device and hour"
        )


def _rank(each: Plan, objective: str) -> tuple[int, float]:
    """By time, or cost; where that is the same but for rounding, by memory."""
    value = each.cost_per_token or 0.0 if objective == "cost" else 1 / each.tokens_per_second
    return round(1e9 * log(value)) if value else 0, each.memory.device


def _best(
    wish: PlanRequest, top: int, objective: str, progress: Progress | None
) -> tuple[SearchResult, list[Plan]]:
    """The `top` plans of a wish that fit, best first."""
    result = wish.search(top, progress)
    specs = [RunSpec.model_validate(each.spec.to_json()) for each in result.best]
    plans = [estimate(spec, wish.cluster, wish.stack) for spec in specs]
    return result, sorted(plans, key=lambda each: _rank(each, objective))


def _cluster(given: str | Cluster, price: float | None) -> Cluster:
    found = hardware.cluster(given) if isinstance(given, str) else given
    return found if price is None else replace(found, price=price)


def _sizes(gpus: int | str | None, kind: Cluster) -> list[int]:
    """The numbers of devices to plan for, ascending."""
    if gpus is None:
        if kind.device.kind == "cpu" and kind.sharing == kind.count:
            raise UserError("--gpus: is missing (ranks that share the host); give it, such as --gpus 2")
        return [kind.count]
    parts = re.fullmatch(r"([0-9]+)(?:\.\.([0-9]+))?", str(gpus))
    if parts is None or int(parts[1]) < 1 or (parts[2] and int(parts[2]) < int(parts[1])):
        raise UserError(
            f"--gpus: '{gpus}' is not valid: it should be a number of devices, or a range such as 64..1024"
        )
    low = int(parts[1])
    if parts[2] is None:
        check_count(kind, low)
        return [low]
    high, each = int(parts[2]), node(kind)
    found = [each << power for power in range(32) if low <= each << power <= high]
    if not found:
        raise UserError(
            f"--gpus: from {low} to {high} there is no power-of-two number of nodes of {each} devices; give "
            f"one number, or a wider range"
        )
    return found


def _total(tokens: float | str | None) -> float | None:
    if tokens is None:
        return None
    try:
        return amount(str(tokens))
    except ValueError as error:
        raise UserError(f"--tokens: '{tokens}' is not valid: {error}") from None


def _together(found: Sequence[tuple[PlanRequest, SearchResult, list[Plan]]]) -> SearchCounts:
    """What all searches did."""
    counts = [result.counts for _, result, _ in found]
    first = [each.first_seconds for each in counts if each.first_seconds is not None]
    return SearchCounts(
        sum(each.branches for each in counts),
        sum(each.simulated for each in counts),
        sum(each.timed for each in counts),
        sum(each.seconds for each in counts),
        min(first, default=None),
    )


def _front(found: Sequence[tuple[PlanRequest, SearchResult, list[Plan]]]) -> tuple[tuple[float, float], ...]:
    """The Pareto front of the largest cluster's search."""
    seen = [result.seen for _, result, _ in found if result.seen]
    return tuple((each.seconds, each.memory) for each in seen[-1]) if seen else ()
