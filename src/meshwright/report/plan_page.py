"""A plan to look at: one page that opens offline and says what the layout costs, and why not another."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from meshwright.planner.cost.model import CostModel
from meshwright.planner.cost.uncertainty import fits_probability, room
from meshwright.planner.explain.candidate import Candidate
from meshwright.planner.explain.explanation import Explanation, describe, explain
from meshwright.planner.explain.neighbours import TERMS, named
from meshwright.planner.explain.sensitivity import MOST
from meshwright.planner.explain.text import ranked
from meshwright.planner.memory.generic import Memory
from meshwright.report import format as fmt
from meshwright.report.html import asset, details, document, figure, text
from meshwright.report.record import write_atomically
from meshwright.report.timeline import section
from meshwright.report.widgets import Bar, Points, bars, facts, keys, legend, plot, table
from meshwright.spec import RunSpec
from meshwright.units import gigabytes, percent, seconds

Pareto = Sequence[tuple[float, float]]
"""(step seconds, bytes of a device)."""

TIME_COLOURS = {
    "matrix products": "c0",
    "attention": "c4",
    "memory-bound": "c2",
    "recomputation": "c5",
    "host": "c5 pale",
    "tensor axis": "c1",
    "context axis": "c6",
    "expert axis": "c3",
    "pipeline axis": "c6 pale",
    "data axis": "c1 pale",
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


def write_plan_page(path: Path, plans: Sequence[RunSpec], on: CostModel, pareto: Pareto) -> None:
    """Write the page of `plans`, the first of which is the chosen one, to `path`.

    `on` are the engines of the chosen plan's devices; `pareto` has (step seconds, bytes of a device) of what
    nothing else is better than in both. Raises `UserError` where a plan does not have as many ranks as `on`
    has devices, or the file can't be written.
    """
    write_explanation(path, explain(plans[0], on, plans[1:]), plans, pareto)


def write_explanation(
    path: Path, found: Explanation, plans: Sequence[RunSpec] = (), pareto: Pareto = ()
) -> None:
    """The same of a layout that was explained already."""
    write_atomically(path, render(found, plans or [found.spec], pareto))


def render(found: Explanation, plans: Sequence[RunSpec], pareto: Pareto) -> str:
    """The page, as HTML."""
    title = text(f"{_model(found.spec)} on {found.on.cluster.count:,} x {found.on.cluster.device.name}")
    body = "".join(
        [
            _header(found, title),
            _figures(found),
            _time(found),
            _memory(found),
            _timeline(found),
            _communication(found),
            _plans(found, plans, pareto),
            _neighbours(found),
            _assumptions(found),
            _sources(found),
        ]
    )
    style = asset("page.css") + asset("timeline.css") + asset("plan_page.css")
    return document(title, body, style, asset("timeline.js"))


def _model(spec: RunSpec) -> str:
    return spec.model.preset or spec.model.hf or f"{spec.model.family}, {fmt.short(spec.model.parameters)}"


def _header(found: Explanation, title: str) -> str:
    spec = found.spec
    about = (
        f"{fmt.short(spec.model.parameters)} parameters, {spec.train.batch_tokens:,} tokens a step in "
        f"sequences of {spec.data.seq_len:,}; predicted, not measured"
    )
    note = ""
    if not found.fits:
        note = f'<p class="note">{text(_too_large(found))}</p>'
    plan = f'<p class="lead"><b>{text(describe(found.spec))}</b></p>'
    return f"<header><h1>{title}</h1>{plan}<p>{text(about)}</p>{note}</header>"


def _too_large(found: Explanation) -> str:
    over = found.fullest.device - found.capacity
    return f"This layout does not fit: it needs {gigabytes(over)} more than a rank has."


def _figures(found: Explanation) -> str:
    step, cluster = found.time.seconds, found.on.cluster
    rate = found.spec.train.batch_tokens / step
    low, high = found.interval
    cards = [
        ("Step", seconds(step), "", f"9 of 10 cases: {seconds(low)} to {seconds(high)}"),
        ("Throughput", fmt.short(rate), "tokens/s", f"{rate / cluster.count:,.0f} a device"),
        ("MFU", percent(found.mfu), "", "model FLOPs over the devices' peak"),
        (
            "Fullest rank",
            gigabytes(found.fullest.device),
            "",
            f"of {gigabytes(found.capacity)}; {percent(found.fits_probability)} likely to fit",
        ),
    ]
    if cluster.price is not None:
        cost = cluster.price * cluster.count / 3600 / rate * 1e9
        cards.append(
            (
                "Cost",
                f"{fmt.short(cost)} USD",
                "",
                f"a billion tokens, at {cluster.price:g} USD a device-hour",
            )
        )
    return f'<dl class="figures">{"".join(figure(*card) for card in cards)}</dl>'


def _time(found: Explanation) -> str:
    step, rows = found.time.seconds, []
    for rank in range(len(found.time.ranks)):
        parts = found.time.parts_of(rank)
        told = [
            (css, parts[name] / step, f"{name}: {seconds(parts[name])}") for name, css in TIME_COLOURS.items()
        ]
        rows.append(Bar(_rank(rank, found.time.rank), told, f"{percent(1 - parts['bubble'] / step)} busy"))
    amounts = [
        (TIME_COLOURS[name], name, f"{seconds(amount)} · {percent(amount / step)}")
        for name, amount in ranked(found.time.parts)
        if amount > 0
    ]
    aside = f'<p class="aside">Below the bars: pipeline rank {found.time.rank}, the busiest.</p>'
    return f'<h2>Where the time goes</h2><div class="card">{bars(rows)}{legend(amounts)}{aside}</div>'


def _rank(rank: int, most: int) -> str:
    return f"rank {rank}{' *' if rank == most else ''}"


def _memory(found: Explanation) -> str:
    most = max(found.capacity, *(each.device for each in found.memories)) * 1.01
    rows = [
        Bar(
            _rank(each.rank, found.fullest.rank),
            [(css, size / most, f"{named(name)}: {gigabytes(size)}") for name, css, size in _terms(each)],
            gigabytes(each.device),
        )
        for each in found.memories
    ]
    fullest = found.fullest
    amounts = [
        (css, named(name), f"{gigabytes(size)} · {percent(size / fullest.device)}")
        for name, css, size in sorted(_terms(fullest), key=lambda term: -term[2])
        if size > 0
    ]
    line = keys([("line", f"what a rank has: {gigabytes(found.capacity)}")])
    return (
        f'<h2>Memory by pipeline rank</h2><div class="card">{bars(rows, found.capacity / most)}{line}'
        f'{legend(amounts)}<p class="aside">Below the bars: rank {fullest.rank}, the fullest.</p></div>'
    )


def _terms(each: Memory) -> list[tuple[str, str, float]]:
    return [(name, MEMORY_COLOURS[name], getattr(each, name)) for name in TERMS]


def _timeline(found: Explanation) -> str:
    drawn, count = found.time.simulation.schedule.microbatches, found.spec.microbatches
    note = ""
    if drawn < count:
        note = f'<p class="aside">Drawn: {drawn} of {count:,} microbatches; the others take as long.</p>'
    return f"<h2>Timeline of a step</h2>{note}{section(found.time.simulation, within=True)}"


def _communication(found: Explanation) -> str:
    title = "<h2>Communication of one rank in one step</h2>"
    if not found.axes:
        return f'{title}<div class="card">One rank sends nothing.</div>'
    longest = max(each.seconds for each in found.axes) or 1.0
    rows = []
    for each in found.axes:
        css, hidden = AXIS_COLOURS[each.axis], each.seconds - each.exposed
        told = [
            (css, each.exposed / longest, f"the step waits: {seconds(each.exposed)}"),
            (f"{css} pale", hidden / longest, f"beside compute: {seconds(hidden)}"),
        ]
        rows.append(Bar(each.axis.replace("_", " "), told, seconds(each.seconds)))
    meaning = keys([("c7", "the step waits"), ("c7 pale", "hidden beside compute")])
    table_rows = [
        [
            each.axis.replace("_", " "),
            str(each.ranks),
            gigabytes(each.bytes),
            ", ".join(
                f"{name.replace('_', '-')} {gigabytes(size)}" for name, size in each.operations.items()
            ),
            seconds(each.seconds),
            percent(each.hidden),
        ]
        for each in found.axes
    ]
    numbers = table(
        ["axis", "ranks", "sent", "by operation", "seconds", "hidden"],
        table_rows,
        ["", "number", "number", "plain", "number", "number"],
    )
    return (
        f'{title}<div class="card">{bars(rows)}{meaning}</div><h2>Links of one device</h2>'
        f'<div class="card levels">{_levels(found)}</div>{details("Each axis in numbers", numbers)}'
    )


def _levels(found: Explanation) -> str:
    """For each level of the cluster, the share of its link's time that each axis takes."""
    body = ""
    for level in found.on.cluster.levels:
        carried = [
            (each.axis, load) for each in found.axes for load in each.levels if load.level == level.name
        ]
        if not carried:
            continue
        most = max(load.utilisation for _, load in carried)
        rows = [
            Bar(
                axis.replace("_", " "),
                [(AXIS_COLOURS[axis], load.utilisation / most, gigabytes(load.bytes))],
                f"{gigabytes(load.bytes)} · {percent(load.utilisation)}",
            )
            for axis, load in carried
        ]
        used = percent(sum(load.utilisation for _, load in carried))
        about = f"{level.kind}, {level.loaded / 1e9:.4g} GB/s a device, {used} used over the step"
        body += f"<div><h3>{text(level.name)} <small>{text(about)}</small></h3>{bars(rows)}</div>"
    return body


def _plans(found: Explanation, plans: Sequence[RunSpec], pareto: Pareto) -> str:
    rows, others = [], []
    for place, spec in enumerate(plans):
        ranks = spec.layout.world_size
        same = ranks == found.on.cluster.count
        on = found.on if same else CostModel(found.on.cluster.resized(ranks), found.on.stack, found.on.format)
        each = Candidate(spec, on)
        needs = each.memory.device
        rows.append(
            [
                str(place + 1),
                describe(spec),
                f"{ranks:,}",
                seconds(each.seconds),
                fmt.short(spec.train.batch_tokens / each.seconds),
                gigabytes(needs),
                percent(fits_probability(needs, room(on.cluster))),
            ]
        )
        if place:
            others.append((each.seconds, needs / 1e9, describe(spec)))
    heads = ["", "layout", "devices", "step", "tokens/s", "memory", "fits"]
    listed = table(heads, rows, ["number", "plain", *["number"] * 5])
    return f"<h2>Plans</h2>{_scatter(found, others, pareto)}<h2>The plans in numbers</h2>{listed}"


def _scatter(found: Explanation, others: Sequence[tuple[float, float, str]], pareto: Pareto) -> str:
    step, capacity = found.time.seconds, found.capacity
    near = [
        (each.estimate.seconds, each.estimate.memory.device / 1e9, f"{each.change.words}: {each.why}")
        for each in found.neighbours
        if each.estimate.seconds <= _FAR * step
        and each.estimate.memory.device <= _FAR * max(capacity, found.fullest.device)
    ]
    front = [(time, size / 1e9, f"{seconds(time)}, {gigabytes(size)}") for time, size in pareto]
    groups = [
        Points("neighbours", "c7", near),
        Points("other plans", "c0", others),
        Points("Pareto front", "c2 pareto", front, joined=True),
        Points("this layout", "c1 chosen", [(step, found.fullest.device / 1e9, describe(found.spec))]),
    ]
    names = ("step, s,", "fullest rank, GB")
    chart = plot("Time against memory", groups, names, (capacity / 1e9, f"{gigabytes(capacity)} a rank"))
    left = len(found.neighbours) - len(near)
    note = (
        f'<p class="aside">Far outside the plot: {left} of the {len(found.neighbours)} neighbours.</p>'
        if left
        else ""
    )
    return f'<div class="charts">{chart}</div>{note}'


def _neighbours(found: Explanation) -> str:
    rows = [
        [
            each.change.words,
            each.verdict,
            each.why,
            seconds(each.estimate.seconds),
            gigabytes(each.estimate.memory.device),
        ]
        for each in found.neighbours
    ]
    heads = ["one change", "", "why", "step", "memory"]
    return f"<h2>Neighbours</h2>{table(heads, rows, ['plain', 'judged', 'plain', 'number', 'number'])}"


def _assumptions(found: Explanation) -> str:
    if not found.assumptions:
        return ""
    rows = []
    for each in found.assumptions:
        stands = [["", f"no change within {MOST}% either way"]]
        turns = [
            [
                f"{turn.percent:+d}%",
                "nothing here fits" if turn.candidate is None else found.candidates[turn.candidate],
            ]
            for turn in each.turns
        ]
        for place, turn in enumerate(turns or stands):
            rows.append([*((each.name, each.value) if place == 0 else ("", "")), *turn])
    heads = ["figure", "taken as", "changed by", "then preferred"]
    return f"<h2>What would change the choice</h2>{table(heads, rows, ['plain', 'plain', 'number', 'plain'])}"


def _sources(found: Explanation) -> str:
    cluster, stack = found.on.cluster, found.on.stack
    device, rates = cluster.device, cluster.device.rates
    peaks = ", ".join(f"{name} {rate / 1e12:.4g}" for name, rate in device.peak.items())
    levels = "; ".join(
        f"{level.name} of {level.devices:,}: {level.kind}, {level.link.bandwidth / 1e9:.4g} GB/s a device, "
        f"{seconds(level.link.latency)}"
        + (f", shared by {level.oversubscription:g}" if level.oversubscription > 1 else "")
        for level in cluster.levels
    )
    rows = {
        "Device": f"{device.name}: {gigabytes(device.memory)} at {gigabytes(device.bandwidth)}/s",
        "Peaks, dense TFLOP/s": peaks,
        "Attained": f"{rates.matmul:.0%} in matrix products, {rates.attention:.0%} and "
        f"{rates.attention_backward:.0%} in attention's forward and backward, {rates.memory:.0%} of the "
        f"memory's bandwidth, {rates.link:.0%} of links in a node, {rates.network:.0%} of the network",
        "Links": levels,
        "Program": f"{stack.name}: {stack.describes}",
        "Source of the device": device.source,
        "Source of the cluster": cluster.source,
    }
    return f"<h2>Assumptions and sources</h2>{facts(rows)}"
