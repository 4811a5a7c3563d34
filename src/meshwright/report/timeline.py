"""Timelines of simulated steps: HTML pages, and a trace for Perfetto or chrome://tracing.

A step of a pipeline has a row for each rank; that of a dry run on a faked GPU one for each clock.

The pages open offline. They draw on a canvas, so that 64 ranks and 512 microbatches move smoothly: actions
that share a pixel are drawn in the mean of their colours.
"""

from __future__ import annotations

import base64
import json
import sys
from array import array
from collections.abc import Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

from meshwright.report.page import render
from meshwright.runs.record import write_atomically
from meshwright.schedule import Kind, Simulation

# Times in the page are whole ticks; a step has this many, so a tick of a one-second step is 0.23 ns.
TICKS = 2**32 - 1
_WORDS = {Kind.F: "forward", Kind.I: "input backward", Kind.W: "weight backward", Kind.B: "backward"}
_KIND_COLOURS = ("k-forward", "k-input", "k-weight", "k-backward")
CLOCK_COLOURS = {
    "products": "c0", "attention": "c4", "loss": "c5", "elementwise": "c2", "copies": "c3",
    "copies over the bus": "c3", "optimiser": "c6", "messages": "c1", "calls of the host": "c7",
}  # fmt: skip
"""Kinds of work in a timeline of clocks, with the colour of each."""


class ClockSpan(NamedTuple):
    """From `start` to `end`, in seconds, a clock is at work of a kind of `CLOCK_COLOURS`."""

    start: float
    end: float
    kind: str
    name: str


def write_clocks(
    path: Path, result: Mapping[str, Any], rows: Sequence[tuple[str, Sequence[ClockSpan]]]
) -> Path:
    """Write the page of a step's clocks, a row for each of `rows` (name, spans), and return its path.

    `result` is the dry run's with the figures of `timeline`. Raises `UserError` if the file is not writable.
    """
    timed = next(row["timeline"] for row in result["ranks"])
    rank, world = result["ranks"][0]["rank"], result["world_size"]
    title = f"rank {rank} of {world:,} on {timed['device']}: {result['layout']}"
    data = clocks_data(timed["step_seconds"], rows)
    write_atomically(path, render("clocks.html", title=title, ranks=result["ranks"], timed=timed, data=data,
                                  assumed=result["assumed"], colours=CLOCK_COLOURS))  # fmt: skip
    return path


def clocks_data(step: float, rows: Sequence[tuple[str, Sequence[ClockSpan]]]) -> dict[str, Any]:
    """Return the data of `timeline.js` for rows of clocks: a span's microbatch is the place of its name."""
    kinds, ticks = list(CLOCK_COLOURS), TICKS / step
    spans = [span for _, listed in rows for span in listed]
    names = {name: place for place, name in enumerate(dict.fromkeys(span.name for span in spans))}
    busy = [sum(span.end - span.start for span in listed) for _, listed in rows]
    return {
        "makespan": step,
        "virtual": 1,
        "kinds": [[kind, kind] for kind in kinds],
        "colours": list(CLOCK_COLOURS.values()),
        "rows": [name for name, _ in rows],
        "names": list(names),
        "counts": [len(listed) for _, listed in rows],
        "bubbles": [max(0.0, 1 - each / step) for each in busy],
        "final": [[0.0, 0.0]] * len(rows),
        "codes": _packed("I", [kinds.index(span.kind) for span in spans]),
        "microbatches": _packed("I", [names[span.name] for span in spans]),
        "start": _packed("I", [min(TICKS, round(span.start * ticks)) for span in spans]),
        "end": _packed("I", [min(TICKS, round(span.end * ticks)) for span in spans]),
    }


def write_timeline(simulated: Simulation, path: Path) -> Path:
    """Write the page of a simulated step to `path`, and return the path.

    It has a row for each rank with its actions, and a table of idle times. Raises `UserError` if the file is
    not writable.
    """
    data = timeline_data(simulated)
    write_atomically(path, render("timeline.html", title=_title(simulated), simulated=simulated, data=data))
    return path


def write_trace(simulated: Simulation, path: Path) -> Path:
    """Write a simulated step as Chrome trace events (JSON) to `path`, and return the path.

    Each rank is a thread; times are in microseconds. First are the events that name the rows, then one for
    each action, in the order of the lists. Raises `UserError` if the file is not writable.
    """
    schedule = simulated.schedule
    events: list[dict[str, Any]] = [
        {"ph": "M", "name": "process_name", "pid": 0, "args": {"name": _title(simulated)}}
    ]
    for rank in range(schedule.ranks):
        thread = {"ph": "M", "pid": 0, "tid": rank}
        events.append({**thread, "name": "thread_name", "args": {"name": f"rank {rank}"}})
        events.append({**thread, "name": "thread_sort_index", "args": {"sort_index": rank}})
    for rank, listed in enumerate(schedule.actions):
        times = zip(listed, simulated.start[rank], simulated.end[rank], strict=True)
        for (kind, stage, microbatch), start, end in times:
            event = _event(f"{kind.name} {microbatch}", _WORDS[kind], rank, start, end)
            events.append({**event, "args": {"stage": stage, "microbatch": microbatch}})
        start, end = simulated.final[rank]
        if end > start:
            events.append(_event("final step", "final step", rank, start, end))
    trace = {"traceEvents": events, "displayTimeUnit": "ms"}
    write_atomically(path, json.dumps(trace, separators=(",", ":")))
    return path


def _event(name: str, category: str, rank: int, start: float, end: float) -> dict[str, Any]:
    microseconds = {"ts": 1e6 * start, "dur": 1e6 * (end - start)}
    return {"ph": "X", "name": name, "cat": category, "pid": 0, "tid": rank, **microseconds}


def _title(simulated: Simulation) -> str:
    schedule = simulated.schedule
    chunks = f" x {schedule.virtual} stages" if schedule.virtual > 1 else ""
    return f"{schedule.name}: {schedule.ranks} ranks{chunks}, {schedule.microbatches} microbatches"


def timeline_data(simulated: Simulation) -> dict[str, Any]:
    """Return the data that `timeline.js` draws: numbers, the long lists as base64 of little-endian arrays.

    An action's code is 4 times its chunk (the place of its stage among the rank's) plus its kind.
    """
    schedule = simulated.schedule
    stages = [schedule.stages_of(rank) for rank in range(schedule.ranks)]
    chunk_of = {stage: chunk for own in stages for chunk, stage in enumerate(own)}
    actions = list(chain.from_iterable(schedule.actions))
    ticks = TICKS / simulated.makespan
    return {
        "makespan": simulated.makespan,
        "virtual": schedule.virtual,
        "kinds": [[kind.name, _WORDS[kind]] for kind in Kind],
        "colours": _KIND_COLOURS,
        "counts": [len(listed) for listed in schedule.actions],
        "stages": stages,
        "bubbles": simulated.bubbles,
        "final": simulated.final,
        "codes": _packed("I", [4 * chunk_of[stage] + kind for kind, stage, _ in actions]),
        "microbatches": _packed("I", [action.microbatch for action in actions]),
        "start": _packed("I", [round(time * ticks) for time in chain.from_iterable(simulated.start)]),
        "end": _packed("I", [round(time * ticks) for time in chain.from_iterable(simulated.end)]),
    }


def _packed(code: str, values: list[int]) -> str:
    numbers = array(code, values)
    if sys.byteorder == "big":
        numbers.byteswap()
    return base64.b64encode(numbers.tobytes()).decode()
