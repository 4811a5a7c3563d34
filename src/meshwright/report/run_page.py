"""`report.html`: a run in one file that opens offline and fetches nothing."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from meshwright.report import format as fmt
from meshwright.report.chart import Chart, Series, moving_mean
from meshwright.report.curves import chart, rows_with, series, with_gaps
from meshwright.report.island_page import island_fields
from meshwright.report.page import render
from meshwright.runs.record import (
    RecordedRun,
    Row,
    read_run,
    write_atomically,
)

# A longer history shows its newest part: a page is for reading, events.jsonl for searching.
MOST_EVENTS = 200
# From this many steps on the loss is drawn as a mean over the raw curve.
SMOOTH_FROM = 100
_AXES = {
    "replicate": "copies of the ZeRO group",
    "dp": "data parallel",
    "cp": "context parallel",
    "tp": "tensor parallel",
    "pp": "pipeline stages",
}
_ZERO = {
    0: "ZeRO 0: every data rank keeps parameters, gradients and optimiser states",
    1: "ZeRO 1: optimiser states sharded",
    2: "ZeRO 2: optimiser states and gradients sharded",
    3: "ZeRO 3: optimiser states, gradients and parameters sharded",
}
_FINGERPRINTS = {"parameters_sha256": "Parameters, SHA-256", "samples_sha256": "Samples consumed, SHA-256"}
_EXPERT_CURVES = {
    "Load of an expert (1 = even)": {"load_max": "fullest", "load_min": "emptiest"},
    "Router entropy (nats)": {"router_entropy": "entropy"},
    "Balance loss (1 = even)": {"aux_loss": "balance loss"},
    "Router z-loss": {"z_loss": "z-loss"},
    "Copies dropped (share)": {"dropped": "dropped"},
}
"""Title -> the curves by key; a chart whose values are all 0 is left out."""


def write_report(out: Path) -> Path:
    """Write `report.html` into the run's folder `out` from its record, and return its path.

    Works for an interrupted run, too. Raises `UserError` if `out` is not the folder of a run.
    """
    run = read_run(out)
    info, result = run.info, run.result or {}
    layout = (info.get("spec") or {}).get("layout")
    axes = {axis: layout.get(axis, 1) for axis in _AXES} if isinstance(layout, dict) else {}
    about = [
        f"Meshwright {info['version']}" if "version" in info else "",
        f"{fmt.short(info['parameters'])} parameters" if "parameters" in info else "",
        f"on {info['device']}" if "device" in info else "",
        f"started {str(info['started'])[:16].replace('T', ' ')} UTC" if "started" in info else "",
    ]
    routed = rows_with(run, "load_max")
    of_islands = island_fields(out, result)
    peak = (result.get("memory") or {}).get("peak", result.get("peak_memory_bytes"))
    html = render(
        "run.html",
        title=run.out.resolve().name,
        run=run,
        about=[part for part in about if part],
        result=_result_so_far(run),
        curves=of_islands.pop("curves") or _curves(run),
        **of_islands,
        experts=[
            chart(routed, title, names, from_zero=True)
            for title, names in _EXPERT_CURVES.items()
            if any(row.get(key) for row in routed for key in names)
        ],
        loads=next((row for row in reversed(routed) if isinstance(row.get("expert_load"), dict)), None),
        memory=_memory(result, peak),
        peak=peak,
        layout=layout if axes else result.get("layout", info.get("layout")),
        axes=axes,
        axis_names=_AXES,
        world=math.prod(axes.values()),
        ways=_ways(layout) if isinstance(layout, dict) else [],
        sample=result.get("sample"),
        events=[
            (
                str(event.get("time", ""))[:19].replace("T", " "),
                event.get("kind", ""),
                fmt.fields_text({k: v for k, v in event.items() if k not in ("time", "kind")}, " · "),
            )
            for event in run.events[-MOST_EVENTS:]
        ],
        fingerprints={title: result[key] for key, title in _FINGERPRINTS.items() if result.get(key)},
    )
    path = out / "report.html"
    write_atomically(path, html)
    return path


def _result_so_far(run: RecordedRun) -> dict[str, Any]:
    """Return the result; for a run without one, the figures that follow from its rows."""
    if run.result is not None:
        return run.result
    train, evaluations = rows_with(run, "loss"), rows_with(run, "val_loss")
    result: dict[str, Any] = {"steps": train[-1]["step"] if train else 0}
    for key in ("tokens_per_second", "mfu"):
        values = [row[key] for row in train if fmt.is_number(row.get(key))]
        result[key] = statistics.median(values) if values else None
    if train:
        result["final_loss"] = train[-1]["loss"]
        memory = [row["memory_bytes"] for row in train if fmt.is_number(row.get("memory_bytes"))]
        result["peak_memory_bytes"] = max(memory, default=None)
    if evaluations:
        result |= {key: evaluations[-1].get(key) for key in ("val_loss", "val_bits_per_byte")}
    return result


def _curves(run: RecordedRun) -> list[Chart]:
    train, evaluations = with_gaps(run, rows_with(run, "loss")), rows_with(run, "val_loss")
    loss = series("training", train, "loss")
    curves = [loss]
    if len(train) >= SMOOTH_FROM:
        window = len(train) // 50 | 1
        curves = [replace(loss, css="faint")]
        means = zip(loss.x, moving_mean(loss.y, window), strict=True)
        mean = [None if step in loss.lost else value for step, value in means]
        curves.append(replace(loss, name=f"mean of {window:,} rows", y=mean))
    if evaluations:
        curves.append(series("validation", evaluations, "val_loss", 1, "dots"))

    def single(key: str, title: str, name: str, colour: int, **options: bool) -> Chart:
        return chart(with_gaps(run, rows_with(run, key)), title, {key: name}, colour, **options)

    return [
        Chart("loss", "Loss (nats per token)", curves, log=True, mark_gaps=True, wide=True),
        *_by_source(evaluations),
        single("tokens_per_second", "Throughput (tokens/s)", "tokens/s", 2, from_zero=True),
        single("grad_norm", "Gradient norm", "grad norm", 3, log=True, mark_gaps=True),
        single("lr", "Learning rate", "lr", 4, from_zero=True),
    ]


def _by_source(evaluations: Sequence[Row]) -> list[Chart]:
    """Return a chart of the held-out text's bits per byte, with a curve for each source of a mixture."""
    rows = [row for row in evaluations if isinstance(row.get("val_sources"), dict)]
    names = dict.fromkeys(name for row in rows for name in row["val_sources"])
    steps = [row["step"] for row in rows]
    curves = [
        Series(name, steps, [_bits(row["val_sources"].get(name)) for row in rows], colour, "dots")
        for colour, name in enumerate(names)
    ]
    return [Chart("val-sources", "Held-out bits per byte by source", curves)] if curves else []


def _bits(source: Any) -> float | None:
    bits = source.get("bits_per_byte") if isinstance(source, dict) else None
    return bits if fmt.is_number(bits) else None


def _memory(result: dict[str, Any], peak: Any) -> dict[str, float]:
    """Return bytes by component; the rest of the peak, which no component explains, is the last one."""
    parts = {
        name: size
        for name, size in (result.get("memory") or {}).items()
        if name != "peak" and fmt.is_number(size) and size > 0
    }
    rest = peak - sum(parts.values()) if fmt.is_number(peak) else 0
    if parts and rest > 0.005 * sum(parts.values()):
        named = any("activation" in name for name in parts)
        parts["not attributed" if named else "activations and other"] = rest
    return parts


def _ways(layout: dict[str, Any]) -> list[str]:
    """Return a phrase for ZeRO and for each axis that is used: how it splits the work."""
    zero = layout.get("zero", 0)
    ways = [_ZERO.get(zero, f"ZeRO {zero}")]
    if layout.get("pp", 1) > 1:
        cut = layout.get("stages", "even")
        blocks = cut if isinstance(cut, str) else ", ".join(map(str, cut)) + " blocks"
        virtual = layout.get("virtual")
        chunks = f", {virtual} on a rank" if virtual else ""
        ways.append(f"Pipeline {layout.get('schedule')}: stages cut {blocks}{chunks}")
    if layout.get("tp", 1) > 1:
        shared = "shared" if layout.get("sequence_parallel", True) else "whole"
        ways.append(f"Tensor ranks: tokens {shared} between the layers' insides")
    if layout.get("cp", 1) > 1:
        ways.append(f"Context ranks: attention crosses by {layout.get('context_mode')}")
    ep, etp = layout.get("ep", 1), layout.get("etp", 1)
    if ep * etp > 1:
        slices = f", each in {etp} slices" if etp > 1 else ""
        ways.append(f"Experts: over {ep} ranks folded out of dp x cp x tp{slices}")
    return ways
