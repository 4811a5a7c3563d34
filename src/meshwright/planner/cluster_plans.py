"""The best plan of a run on each of several clusters, side by side: the fastest, or the cheapest."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from meshwright.hardware import find as hardware
from meshwright.hardware.cluster import Cluster
from meshwright.planner.plan import Plans, plan
from meshwright.planner.search.request import PlanRequest
from meshwright.planner.search.results import Progress
from meshwright.spec import UserError
from meshwright.spec.errors import did_you_mean

_COUNTED = re.compile(r"(.+):([0-9]+(?:\.\.[0-9]+)?)")
Gpus = int | str | None


class AskedCluster(NamedTuple):
    """A cluster, and its devices: a number, a range such as 64..1024, or None for those of one node."""

    name: str
    cluster: Cluster
    gpus: Gpus


class Refusal(NamedTuple):
    """A cluster that is not compared, and the sentence that says why."""

    cluster: str
    reason: str


@dataclass(frozen=True)
class ClusterPlans:
    """Plans on several clusters, the cluster with the best first plan first."""

    found: Mapping[str, Plans]
    """By the name that the cluster was asked for by, with its devices where several of the name were."""
    refused: tuple[Refusal, ...]

    @property
    def best(self) -> Plans:
        """The plans on the best cluster."""
        return next(iter(self.found.values()))

    @property
    def undecided(self) -> tuple[str, ...]:
        """The clusters whose best plans may be better than the first: their intervals overlap.

        Where lengths or sizes are compared, they are those with as long sequences or as large a model.
        """
        _, most = figure_interval(self.best)
        return tuple(
            name
            for name, plans in self.found.items()
            if plans is not self.best
            and _largest(plans) == _largest(self.best)
            and figure_interval(plans)[0] < most
        )

    def to_json(self, why: bool = True) -> dict[str, Any]:
        """Plain values: those of the best cluster's plans, and `clusters`, `undecided` and `refused`."""
        rows = []
        for name, plans in self.found.items():
            best, low_high = plans.best, list(figure_interval(plans))
            given = {"cluster": name, "device": best.cluster.device.name, "price": best.cluster.price}
            rows.append({**given, **best.to_json(plans.tokens), "objective_interval": low_high})
        told = {"clusters": rows, "undecided": list(self.undecided)}
        return {**self.best.to_json(why), **told, "refused": [each._asdict() for each in self.refused]}


Done = Callable[[str, "Plans | UserError"], None]
"""Called with a cluster's name and its plans, or the reason why there are none."""


def asked_clusters(clusters: str | Sequence[str | Cluster], gpus: Gpus = None) -> list[AskedCluster]:
    """The clusters of a text such as 'h100:16,a100,mine.json', or of a list of such names and of `Cluster`s.

    A number of devices, or a range, may follow each after a colon; the others have `gpus`. Raises `UserError`
    for a name that is unknown, empty or given twice, and for `gpus` that no cluster is left for.
    """
    if isinstance(clusters, str):
        clusters = [clusters] if Path(clusters).is_file() else clusters.split(",")
    asked = [_asked(each, gpus) for each in clusters]
    if gpus is not None and asked and all(_COUNTED.fullmatch(str(each)) for each in clusters):
        raise UserError(f"--gpus: {gpus} is given, and each cluster has a number of its own; leave it out")
    seen: dict[tuple[str, str], str] = {}
    for each in asked:
        key = each.cluster.name, str(each.gpus)
        if key in seen:
            also = "" if seen[key] == each.name else f", the second time as '{each.name}'"
            raise UserError(f"--cluster: '{seen[key]}' is given twice{also}; give each once")
        seen[key] = each.name
    names = [each.cluster.name for each in asked]
    return [
        each._replace(name=f"{each.name}:{each.gpus}")
        if each.gpus is not None and names.count(each.cluster.name) > 1
        else each
        for each in asked
    ]


def _asked(given: str | Cluster, gpus: Gpus) -> AskedCluster:
    if isinstance(given, Cluster):
        return AskedCluster(given.name, given, given.count if gpus is None else gpus)
    name, counted = given.strip(), _COUNTED.fullmatch(given.strip())
    if counted is not None:
        name, gpus = counted.groups()
        _check_counts(given, gpus)
    elif hardware.is_catalogued(before := name.rpartition(":")[0]):
        raise UserError(f"--cluster: '{given}' has no number behind its colon; give such as {before}:8")
    if not name:
        raise UserError("--cluster: a name is missing between commas; give such as h100,a100:16,mine.json")
    return AskedCluster(name, hardware.cluster(name), gpus)


def _check_counts(given: str, counts: str) -> None:
    """Raise `UserError` for a number of devices below 1, or a range that ends before it begins."""
    numbers = [int(each) for each in counts.split("..")]
    if numbers[0] < 1 or numbers != sorted(numbers):
        raise UserError(
            f"--cluster: '{given.strip()}' has no number of devices behind its colon; give 1 or more, or a "
            f"range such as 8..64"
        )


def priced(asked: Sequence[AskedCluster], prices: Mapping[str, float]) -> list[AskedCluster]:
    """The clusters with prices, in USD for a device and hour, by their names or those of the catalogue.

    Raises `UserError` for the price of a cluster that is not among them.
    """
    known = {name for each in asked for name in (each.name.partition(":")[0], each.cluster.name)}
    for name in prices:
        if name not in known:
            hint = did_you_mean(name, known) or f"; the clusters are {', '.join(each.name for each in asked)}"
            raise UserError(f"--price: '{name}' is none of the clusters{hint}")
    found = []
    for each in asked:
        price = prices.get(each.name.partition(":")[0], prices.get(each.cluster.name, each.cluster.price))
        found.append(each._replace(cluster=replace(each.cluster, price=price)))
    return found


def plan_clusters(
    request: PlanRequest,
    asked: Sequence[AskedCluster],
    progress: Progress | None = None,
    done: Done | None = None,
) -> ClusterPlans:
    """The best plans of `request` on each of the clusters, which take the place of its own.

    A cluster that the run cannot be planned on is `refused`, with the reason. `progress` is called as by
    `plan`, `done` after each cluster. Raises `UserError` where none is left.
    """
    found, refused = dict[str, Plans](), list[Refusal]()
    for name, cluster, gpus in asked:
        outcome: Plans | UserError
        try:
            outcome = _plan_on(replace(request, cluster=cluster, gpus=gpus, price=None), name, progress)
            found[name] = outcome
        except UserError as error:
            outcome = error
            refused.append(Refusal(name, str(error)))
        if done is not None:
            done(name, outcome)
    if not found:
        reasons = dict.fromkeys(each.reason for each in refused)
        alike = len(reasons) == 1
        raise UserError(next(iter(reasons)) if alike else "; ".join(f"{a}: {b}" for a, b in refused))
    order = sorted(found, key=lambda name: _order(found[name]))
    return ClusterPlans({name: found[name] for name in order}, tuple(refused))


def _plan_on(request: PlanRequest, name: str, progress: Progress | None) -> Plans:
    assert isinstance(request.cluster, Cluster)
    if request.objective == "cost" and request.cluster.price is None:
        raise UserError(
            f"no price is known of {request.cluster.name}; give --price {name}=USD for a device and hour"
        )
    return plan(request, progress)


def figure(plans: Plans) -> float:
    """The figure of the first plan that the objective compares.

    That is USD of the tokens that are asked about, or of 10^9, for the objective 'cost', and else seconds of
    10^9 tokens.
    """
    best = plans.best
    if plans.objective != "cost":
        return 1e9 / best.tokens_per_second
    usd = 1e9 * (best.cost_per_token or 0.0) if plans.tokens is None else best.training(plans.tokens).usd
    return usd or 0.0


def figure_interval(plans: Plans) -> tuple[float, float]:
    """Low and high of `figure` in 9 of 10 cases: it grows with the seconds of a step."""
    best = plans.best
    low, high = (figure(plans) * seconds / best.step_seconds for seconds in best.interval)
    return low, high


def _order(plans: Plans) -> tuple[float, ...]:
    """Sort key, the best first: the longest sequences or the largest model, then `figure`, and memory."""
    return -_largest(plans), figure(plans), plans.best.memory.device


def _largest(plans: Plans) -> int:
    """Tokens of the longest sequences, or parameters of the largest model, where the objective is that."""
    spec = plans.best.spec
    most = {"longest-context": spec.data.seq_len, "largest-model": spec.model.parameters}
    return most.get(plans.objective, 0)
