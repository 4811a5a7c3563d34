"""A simulated pipeline step to look at: a page of its own, and a trace for Perfetto or chrome://tracing.

The page opens offline and fetches nothing. It draws on a canvas, so that 64 ranks and 512 microbatches move
as smoothly as two and four: what is narrower than a pixel is drawn as the mean of its colours.
"""

from __future__ import annotations

import base64
import json
import sys
from array import array
from itertools import chain
from pathlib import Path
from typing import Any

from meshwright.report import format as fmt
from meshwright.report.html import asset, document, text
from meshwright.report.record import write_atomically
from meshwright.schedule import Kind, Simulation
from meshwright.units import seconds

# Times in the page are whole numbers of ticks, this many a step: a quarter of a nanosecond for one second.
TICKS = 2**32 - 1
_WORDS = {Kind.F: "forward", Kind.I: "input backward", Kind.W: "weight backward", Kind.B: "backward"}


def write_timeline(simulated: Simulation, path: Path) -> Path:
    """Write the page of a simulated step to `path`, and return it.

    A row a rank, its actions by kind and with their microbatch; the shares of idle time at its end. Raises
    `UserError` where the file can't be written.
    """
    write_atomically(path, render(simulated))
    return path


def write_trace(simulated: Simulation, path: Path) -> Path:
    """Write a simulated step as Chrome trace events (JSON) to `path`, and return it.

    A thread a rank; times in microseconds. Raises `UserError` where the file can't be written.
    """
    trace = {"traceEvents": trace_events(simulated), "displayTimeUnit": "ms"}
    write_atomically(path, json.dumps(trace, separators=(",", ":")))
    return path


def trace_events(simulated: Simulation) -> list[dict[str, Any]]:
    """An event an action, in the order of the lists, after those that name the rows."""
    schedule = simulated.schedule
    events: list[dict[str, Any]] = [
        {"ph": "M", "name": "process_name", "pid": 0, "args": {"name": _title(simulated)}}
    ]
    for rank in range(schedule.ranks):
        named = {"ph": "M", "pid": 0, "tid": rank}
        events.append({**named, "name": "thread_name", "args": {"name": f"rank {rank}"}})
        events.append({**named, "name": "thread_sort_index", "args": {"sort_index": rank}})
    for rank, listed in enumerate(schedule.actions):
        times = zip(listed, simulated.start[rank], simulated.end[rank], strict=True)
        for (kind, stage, microbatch), start, end in times:
            event = _event(f"{kind.name} {microbatch}", _WORDS[kind], rank, start, end)
            events.append({**event, "args": {"stage": stage, "microbatch": microbatch}})
        start, end = simulated.final[rank]
        if end > start:
            events.append(_event("final step", "final step", rank, start, end))
    return events


def _event(name: str, category: str, rank: int, start: float, end: float) -> dict[str, Any]:
    microseconds = {"ts": 1e6 * start, "dur": 1e6 * (end - start)}
    return {"ph": "X", "name": name, "cat": category, "pid": 0, "tid": rank, **microseconds}


def render(simulated: Simulation) -> str:
    """The page, as HTML."""
    title = text(_title(simulated))
    body = _header(simulated, title) + section(simulated)
    style = asset("page.css") + asset("timeline.css")
    return document(title, body, style, asset("timeline.js"))


def section(simulated: Simulation, within: bool = False) -> str:
    """The timeline and its numbers as a part of a page that has `timeline.css` and `timeline.js`.

    `within` a longer page, the wheel scrolls the page, and keys count while the timeline has the focus.
    """
    stage = _STAGE.format(attribute=" data-within" if within else "", wheel=_WHEEL[within])
    return stage + _table(simulated) + _data(simulated)


def _title(simulated: Simulation) -> str:
    schedule = simulated.schedule
    chunks = f" x {schedule.virtual} stages" if schedule.virtual > 1 else ""
    return f"{schedule.name}: {schedule.ranks} ranks{chunks}, {schedule.microbatches} microbatches"


def _header(simulated: Simulation, title: str) -> str:
    figures = [
        ("time of a step", seconds(simulated.makespan), "until all ranks are done"),
        ("idle", fmt.percent(simulated.bubble, 2), "of all ranks' time"),
        ("idle without synchronisation", fmt.percent(simulated.bubble_without_sync, 2), "between steps"),
        ("stage activations at the peak", fmt.count(max(simulated.peak)), _peak_bytes(simulated)),
    ]
    cells = "".join(
        f'<div><dt>{text(name)}</dt><dd class="value">{text(value)}</dd>'
        f'<dd class="aside">{text(aside)}</dd></div>'
        for name, value, aside in figures
    )
    return f'<header><h1>{title}</h1><p>A simulated step.</p></header><dl class="figures">{cells}</dl>'


def _peak_bytes(simulated: Simulation) -> str:
    most = max(simulated.peak_bytes)
    return f"{fmt.size(most)} on one rank" if most else "of one microbatch in one stage"


_STAGE = """
<section class="card timeline"{attribute}> <div class="bar"><div class="legend" id="legend"></div> <div
class="buttons"><button id="out" aria-label="zoom out">-</button><button id="in" aria-label="zoom
in">+</button> <button id="fit">whole step</button></div></div> <canvas id="axis"></canvas> <div class="rows"
id="frame"><canvas id="rows" tabindex="0" aria-label="timeline, a row a rank"></canvas></div> <p
class="aside">{wheel} or + and - zoom, drag or arrow keys pan, 0 shows the whole step. Pointing at an action
outlines its microbatch on all ranks.</p> <div class="tip" id="tip"></div> </section>
"""
_WHEEL = {False: "Wheel", True: "Ctrl with the wheel"}


def _table(simulated: Simulation) -> str:
    """The ranks in numbers, for reading and for those who can't see the canvas."""
    heads = ("rank", "stages", "busy", "idle", "fill", "computing elsewhere", "links", "drain", "peak")
    rows = []
    for rank, idle in enumerate(simulated.idle):
        times = (simulated.busy[rank], idle.total, idle.fill, idle.compute, idle.link, idle.drain)
        stages = ", ".join(map(str, simulated.schedule.stages_of(rank)))
        cells = (str(rank), stages, *map(seconds, times), str(simulated.peak[rank]))
        rows.append("<tr>" + "".join(f"<td>{text(cell)}</td>" for cell in cells) + "</tr>")
    head = "".join(f"<th>{name}</th>" for name in heads)
    return (
        '<details><summary>Each rank in numbers</summary><div class="scroll">'
        f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table></div></details>"
    )


def _data(simulated: Simulation) -> str:
    """What the script draws: numbers only, the long ones as base64 of little-endian arrays, by action.

    An action's code is 4 times its chunk (the place of its stage among the rank's) plus its kind.
    """
    schedule = simulated.schedule
    stages = [schedule.stages_of(rank) for rank in range(schedule.ranks)]
    chunk_of = {stage: chunk for own in stages for chunk, stage in enumerate(own)}
    actions = list(chain.from_iterable(schedule.actions))
    ticks = TICKS / simulated.makespan
    data = {
        "makespan": simulated.makespan,
        "virtual": schedule.virtual,
        "kinds": [[kind.name, _WORDS[kind]] for kind in Kind],
        "counts": [len(listed) for listed in schedule.actions],
        "stages": stages,
        "bubbles": simulated.bubbles,
        "final": simulated.final,
        "codes": _packed("I", [4 * chunk_of[stage] + kind for kind, stage, _ in actions]),
        "microbatches": _packed("I", [action.microbatch for action in actions]),
        "start": _packed("I", [round(time * ticks) for time in chain.from_iterable(simulated.start)]),
        "end": _packed("I", [round(time * ticks) for time in chain.from_iterable(simulated.end)]),
    }
    return f'<script type="application/json" id="data">{json.dumps(data, separators=(",", ":"))}</script>'


def _packed(code: str, values: list[int]) -> str:
    numbers = array(code, values)
    if sys.byteorder == "big":
        numbers.byteswap()
    return base64.b64encode(numbers.tobytes()).decode()
