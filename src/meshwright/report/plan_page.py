"""A plan's page: one file that opens offline and shows what a layout costs, and why not another one."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from markupsafe import Markup

from meshwright.planner.cost.model import CostModel
from meshwright.planner.explain.candidate import Candidate
from meshwright.planner.explain.explanation import Explanation, describe
from meshwright.planner.explain.neighbours import TERMS, named
from meshwright.planner.explain.sensitivity import MOST
from meshwright.report import format as fmt
from meshwright.report.chart import Points, scatter
from meshwright.report.page import render
from meshwright.report.plan_text import offload, ranked, routing
from meshwright.report.timeline import timeline_data
from meshwright.runs.record import write_atomically
from meshwright.spec import RunSpec
from meshwright.units import gigabytes, seconds

Pareto = Sequence[tuple[float, float]]
"""(step seconds, bytes of a device)."""

TIME_COLOURS = {
    "matrix products": "c0",
    "attention": "c4",
    "memory-bound": "c2",
    "recomputation": "c5",
    "host": "c5 pale",
    "forwards ahead": "c0 cross",
    "tensor axis": "c1",
    "context axis": "c6",
    "expert axis": "c3",
    "activation offload": "c0 pale",
    "pipeline axis": "c6 pale",
    "data axis": "c1 pale",
    "exchange": "c4 pale",
    "slowed by messages": "c3 pale",
    "optimiser": "c2 pale",
    "fixed": "c7",
    "bubble": "c7 pale",
}
MEMORY_COLOURS = {
    "parameters": "c0",
    "gradients": "c1",
    "optimiser": "c2",
    "activations": "c3",
    "logits": "c4",
    "buffers": "c5",
    "fragmentation": "c7",
    "context": "c6",
    "communicators": "c6 pale",
}
AXIS_COLOURS = {
    "tensor": "c1",
    "context": "c6",
    "expert": "c3",
    "pipeline": "c4",
    "shard": "c0",
    "replicate": "c5",
    "expert_data": "c2",
}
_FAR = 1.7
"""Neighbours beyond this many times the layout's seconds, or the memory, are not in the plot."""


def write_plan_page(
    path: Path,
    plans: Sequence[RunSpec],
    costs: CostModel,
    pareto: Pareto,
    notes: Sequence[str] = (),
    limit: float | None = None,
) -> None:
    """Write the page of `plans`, the first of which is the chosen one, to `path`.

    `costs` is the cost model of the chosen plan's cluster; `pareto` has (step seconds, bytes of a device) of
    the Pareto front, `notes` are further sentences on the chosen plan, and `limit` is how many bytes of a
    rank a plan may fill, where that is less than it would fit with. Raises `UserError` if a plan does
    not have as many ranks as the cluster has devices, or if the file cannot be written.
    """
    write_explanation(path, Explanation(plans[0], costs, limit), plans, pareto, notes)


def write_explanation(
    path: Path,
    explained: Explanation,
    plans: Sequence[RunSpec] = (),
    pareto: Pareto = (),
    notes: Sequence[str] = (),
) -> None:
    """Write the page of a layout that is explained already to `path`; see `write_plan_page`."""
    spec, cluster = explained.spec, explained.costs.cluster
    model = spec.model.preset or spec.model.hf or f"{spec.model.family}, {fmt.short(spec.model.parameters)}"
    candidates = [_candidate(plan, explained.costs) for plan in plans or [spec]]
    html = render(
        "plan.html",
        title=f"{model} on {cluster.in_words}",
        explained=explained,
        notes=[
            *notes,
            *(
                f"{name}: {words}."
                for name, words in (
                    ("Routing", routing(explained)),
                    ("Sharding", explained.sharding),
                    ("Offload", offload(explained)),
                )
                if words
            ),
        ],
        describe=describe,
        time_colours=TIME_COLOURS,
        memory_colours=MEMORY_COLOURS,
        axis_colours=AXIS_COLOURS,
        named=named,
        time_parts=ranked(explained.time.parts),
        memory_terms=ranked({term: getattr(explained.memory, term) for term in TERMS}),
        timeline_data=timeline_data(explained.time.simulation),
        levels=_levels(explained),
        plans=candidates,
        plot=_plot(explained, candidates[1:], pareto),
        far=sum(not _near(explained, each.estimate) for each in explained.neighbours),
        most=MOST,
        record=explained.to_json(),
    )
    write_atomically(path, html)


def _levels(explained: Explanation) -> list[tuple[Any, list[tuple[str, Any]]]]:
    """Return (level of the cluster, [(axis, its load)]) for the levels whose links carry something."""
    levels = [
        (level, [(a.axis, load) for a in explained.axes for load in a.levels if load.level == level.name])
        for level in explained.costs.cluster.levels
    ]
    return [(level, loads) for level, loads in levels if loads]


def _candidate(spec: RunSpec, costs: CostModel) -> Candidate:
    """Return a plan with its costs on a cluster of as many devices as it has ranks."""
    ranks = spec.layout.world_size
    if ranks != costs.cluster.count:
        costs = CostModel(costs.cluster.resized(ranks), costs.stack, costs.format)
    return Candidate(spec, costs)


def _near(explained: Explanation, estimated: Candidate) -> bool:
    largest = max(explained.capacity, explained.memory.device)
    return estimated.seconds <= _FAR * explained.time.seconds and estimated.memory.device <= _FAR * largest


def _plot(explained: Explanation, others: Sequence[Candidate], pareto: Pareto) -> Markup:
    near = [each for each in explained.neighbours if _near(explained, each.estimate)]

    def point(plan: Candidate, words: str) -> tuple[float, float, str]:
        return plan.seconds, plan.memory.device / 1e9, words

    front = [(time, size / 1e9, f"{seconds(time)}, {gigabytes(size)}") for time, size in pareto]
    groups = [
        Points("neighbours", "c7", [point(each.estimate, f"{each.words}: {each.why}") for each in near]),
        Points("other plans", "c0", [point(plan, describe(plan.spec)) for plan in others]),
        Points("Pareto front", "c2 pareto", front, joined=True),
        Points("this layout", "c1 chosen", [point(explained, describe(explained.spec))]),
    ]
    limit = explained.capacity
    words = f"a rank may fill {gigabytes(limit)}"
    return scatter(
        "Time against memory",
        groups,
        "time of a step, s",
        "memory of the fullest rank, GB",
        limit / 1e9,
        words,
    )
