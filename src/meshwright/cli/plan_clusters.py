"""Several clusters at once in the verb plan: their flags, and the table that compares them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from meshwright import api
from meshwright.api.options import number
from meshwright.cli import output as show
from meshwright.cli.parser import Flag
from meshwright.planner.cluster_plans import ClusterPlans, asked_clusters, figure_interval, priced
from meshwright.planner.plan import Finished, Plans
from meshwright.spec import RunSpec, UserError
from meshwright.units import short

_USD = number(1e-6, 1e6)
Words = Callable[[RunSpec], str]
"""Puts a layout in words."""


def _price(text: str) -> float | dict[str, float]:
    """Read one price, or prices by cluster, such as h100=3,a100=1.8."""
    if "=" not in text:
        return _USD(text)
    found: dict[str, float] = {}
    for pair in text.split(","):
        name, _, usd = (part.strip() for part in pair.partition("="))
        if not (name and usd):
            raise ValueError(f"'{pair.strip()}' is not NAME=USD; give such as h100=3,a100=1.8")
        if name in found:
            raise ValueError(f"{name} has two prices; give one")
        found[name] = _USD(usd)
    return found


CLUSTER = Flag(
    "cluster",
    "a cluster by name, or a hardware file; several are compared, each with its devices if given: "
    "h100:16,a100:32,mi300x",
    "NAME",
    str,
    required=True,
)
PRICE = Flag(
    "price", "USD for a device and hour, or by cluster: h100=3,a100=1.8; default the cluster's", "USD", _price
)


def planned(
    model: str,
    words: Words,
    *,
    cluster: str,
    gpus: str | None,
    price: float | Mapping[str, float] | None,
    finished: Finished,
    **wish: Any,
) -> Plans | ClusterPlans:
    """Plan on one cluster, or on each of several; `wish` are further keywords of `api.plan`.

    Raises `UserError`.
    """
    asked = asked_clusters(cluster, gpus)
    if len(asked) == 1:
        prices = price if isinstance(price, Mapping) else {}
        (only,) = priced(asked, prices)
        usd = None if isinstance(price, Mapping) else price
        return api.plan(model, only.cluster, gpus=only.gpus, price=usd, finished=finished, **wish)
    if isinstance(price, float):
        each = ",".join(f"{one.name}={price:g}" for one in asked)
        raise UserError(f"--price: {price:g} is given for {len(asked)} clusters; give each its own: {each}")
    return api.plan_clusters(model, cluster, gpus=gpus, prices=price, done=_told(words), **wish)


def _told(words: Words) -> Callable[[str, Plans | UserError], None]:
    def tell(name: str, outcome: Plans | UserError) -> None:
        """Print on stderr how the search on one cluster ended; why without a plan is told at the end."""
        said = "no plan"
        if isinstance(outcome, Plans):
            best = outcome.best
            devices = show.count(best.cluster.count, "device")
            said = f"{devices}, {best.step_seconds:.4g} s a step, {words(best.spec)}"
        print(f"{name}: {said}", file=sys.stderr, flush=True)

    return tell


def show_clusters(found: ClusterPlans, words: Words) -> None:
    """Print the best plan of each cluster, and why the others are not among them."""
    show.table(
        [_row(place, name, plans, words) for place, (name, plans) in enumerate(found.found.items(), 1)]
    )
    print()
    for sentence in _remarks(found):
        show.line(sentence)
    for refusal in found.refused:
        show.line(f"Not on {refusal.cluster}: {refusal.reason}.")
    print()


def _row(place: int, name: str, plans: Plans, words: Words) -> dict[str, Any]:
    best = plans.best
    row = {"#": place, "cluster": name, "GPUs": best.cluster.count, "step s": show.text(best.step_seconds)}
    if plans.objective == "longest-context":
        row["tokens"] = best.spec.data.seq_len
    if plans.objective == "largest-model":
        row["parameters"] = short(best.spec.model.parameters)
    row |= {"tok/s": f"{best.tokens_per_second:,.0f}", "GB": f"{best.memory.device / 1e9:.1f}"}
    if plans.tokens is not None:
        training = best.training(plans.tokens)
        usd = training.usd
        row |= {"days": show.text(training.days), "USD": "-" if usd is None else short(usd)}
    else:
        cost = best.cost_per_token
        row["USD/1B"] = "-" if cost is None else show.text(1e9 * cost)
    low, high = _shown_interval(plans)
    return {**row, "low": low, "high": high, "layout": words(best.spec)}


def _shown_interval(plans: Plans) -> tuple[str, str]:
    """Low and high of money for the objective 'cost', and else of the seconds of a step."""
    if plans.objective != "cost":
        low, high = plans.best.interval
    else:
        low, high = figure_interval(plans)
        if plans.tokens is not None:
            return short(low), short(high)
    return show.text(low), show.text(high)


def _remarks(found: ClusterPlans) -> Iterator[str]:
    """Yield what the interval is of, which clusters may be better, and what their predictions rest on."""
    best, first = found.best, next(iter(found.found))
    of = "the seconds of a step"
    if best.objective == "cost":
        of = "USD for 1B tokens" if best.tokens is None else f"USD for {short(best.tokens)} tokens"
    yield f"Low and high are of {of}, in 9 of 10 cases."
    if found.undecided:
        better = "cheaper" if best.objective == "cost" else "faster"
        *others, last = found.undecided
        names = f"{', '.join(others)} or {last}" if others else last
        yield f"Within these intervals {names} may be {better} than {first}."
    known = set(best.best.never_measured)
    for name, plans in found.found.items():
        if more := [clause for clause in plans.best.never_measured if clause not in known]:
            yield f"Of {name}: {'; '.join(more)}."
