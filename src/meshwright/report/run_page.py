"""`report.html`: a run in one file that opens offline and fetches nothing."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from meshwright.report import format as fmt
from meshwright.report import run_facts as facts
from meshwright.report.chart import Chart, Series, moving_mean
from meshwright.report.curves import axes, chart, rows_with, series, with_gaps
from meshwright.report.island_page import island_fields
from meshwright.report.page import render
from meshwright.runs.record import (
    RecordedRun,
    Row,
    now,
    read_run,
    write_atomically,
)

REPORT = "report.html"
"""The page's name in a run's folder."""
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
_PAIR_CURVES = {
    "Rewards of answers": {"rewards_chosen": "chosen", "rewards_rejected": "rejected"},
    "Pairs whose chosen answer has the larger reward": {"rewards_accuracies": "share"},
    "Estimated KL divergence from the reference": {"kl": "nats"},
}
"""Charts of a run on pairs of answers, or on judged ones, with a curve for each key."""
_EXPERT_CURVES = {
    "Load of an expert (1 = even)": {"load_max": "fullest", "load_min": "emptiest"},
    "Router entropy (nats)": {"router_entropy": "entropy"},
    "Balance loss (1 = even)": {"aux_loss": "balance loss"},
    "Router z-loss": {"z_loss": "z-loss"},
    "Copies dropped (share)": {"dropped": "dropped"},
}
"""Title -> the curves by key; a chart whose values are all 0 is left out."""


def write_report(out: Path, path: Path | None = None) -> Path:
    """Write the page of the run in folder `out` to `path`, by default its `report.html`; return the path.

    Works for a run that goes on, or was interrupted, too. Raises `UserError` if `out` is not the folder of a
    run.
    """
    path = out / REPORT if path is None else path
    write_atomically(path, report_html(out))
    return path


def report_html(out: Path) -> str:
    """Return the page of the run in folder `out`, from its record."""
    run = read_run(out)
    info, result = run.info, run.result or {}
    layout = (info.get("spec") or {}).get("layout")
    of_axes = {axis: layout.get(axis, 1) for axis in _AXES} if isinstance(layout, dict) else {}
    of_islands = island_fields(out, result)
    peak = (result.get("memory") or {}).get("peak", result.get("peak_memory_bytes"))
    ranks = facts.rank_rows(result)
    routed = rows_with(run, "load_max")
    return render(
        "run.html",
        title=run.out.resolve().name,
        run=run,
        written=now()[:19].replace("T", " "),
        about=facts.about(run),
        machine=facts.machine(run),
        commands=facts.next_commands(run),
        result=facts.result_so_far(run),
        curves=of_islands.pop("curves") or _curves(run),
        axes=of_islands.pop("axes") or [axes(run)],
        **of_islands,
        experts=[
            chart(routed, title, names, from_zero=True)
            for title, names in _EXPERT_CURVES.items()
            if any(row.get(key) for row in routed for key in names)
        ],
        loads=next((row for row in reversed(routed) if isinstance(row.get("expert_load"), dict)), None),
        memory=facts.memory(result, peak, info.get("device")),
        peak=peak,
        layout=layout if of_axes else result.get("layout", info.get("layout")),
        layout_axes=of_axes,
        axis_names=_AXES,
        world=math.prod(of_axes.values()),
        ways=_ways(layout) if isinstance(layout, dict) else [],
        ranks=ranks[: facts.MOST_RANKS],
        listed_ranks=len(ranks),
        most_rank_memory=max((row.get("peak_memory_bytes") or 0 for row in ranks), default=0),
        sample=result.get("sample"),
        changed=facts.changed_keys(run),
        record=_downloaded(run),
        events=_events(run),
        fingerprints={title: result[key] for key, title in _FINGERPRINTS.items() if result.get(key)},
    )


def _events(run: RecordedRun) -> list[tuple[str, Any, str]]:
    """Return (time, kind, fields in words) of the newest events."""
    return [
        (
            str(event.get("time", ""))[:19].replace("T", " "),
            event.get("kind", ""),
            fmt.fields_text({k: v for k, v in event.items() if k not in ("time", "kind")}, " · "),
        )
        for event in run.events[-MOST_EVENTS:]
    ]


def _downloaded(run: RecordedRun) -> dict[str, Any]:
    """Return what the page gives as JSON: run.json, the result and the newest events."""
    return {"run": run.info, "result": run.result, "events": run.events[-MOST_EVENTS:]}


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

    pairs = rows_with(run, "rewards_chosen")
    unit = "per answer" if rows_with(run, "kl") else "nats per pair" if pairs else "nats per token"

    def single(key: str, title: str, name: str, colour: int, **options: bool) -> Chart:
        return chart(with_gaps(run, rows_with(run, key)), title, {key: name}, colour, **options)

    return [
        Chart("loss", f"Loss ({unit})", curves, log=True, mark_gaps=True, wide=True),
        *_by_source(evaluations),
        *(
            chart(with_gaps(run, rows), title, names)
            for title, names in _PAIR_CURVES.items()
            if (rows := rows_with(run, next(iter(names))))
        ),
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
