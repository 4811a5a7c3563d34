"""The verb dryrun, which runs one rank's step of any world on fake tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

from meshwright import api
from meshwright.cli import output as show
from meshwright.cli.dryrun_timeline import timeline_line, timeline_tables
from meshwright.cli.parser import JSON, Call, verb
from meshwright.cli.runs import FROM, MODEL, spec_of
from meshwright.report.format import size

MOST_KERNELS = 12
"""Kernels that have a row of their own."""
MOST_NAME = 52
"""Characters of a kernel's name, with which a row of a terminal has room for the rest."""


@verb("dryrun", MODEL, FROM, api.dryrun, JSON)
def dryrun(call: Call) -> int:
    """Show what a rank holds and sends in one step."""
    spec = spec_of(call, kind=call.flags["device"], models=True)
    result = api.dryrun(spec, **call.flags)
    show.result(call, result, _show)
    found = [race for row in result["ranks"] for race in row.get("device_work", {}).get("races", ())]
    obstacles = [each for row in result["ranks"] for each in row.get("capturable", {}).get("obstacles", ())]
    if obstacles and spec.train.cuda_graphs:
        show.error(f"train.cuda_graphs: true, but {_captured(result['ranks'][0]['capturable'])}")
        return 1
    if found:
        races = show.count(sum(race["count"] for race in found), "race")
        show.error(f"streams are not in order: {races}, the most of which: {found[0]['race']}")
    return int(bool(found))


def _show(result: Mapping[str, Any]) -> None:
    timed = "timeline" in result["ranks"][0]
    facts = {
        "world": f"{show.count(result['world_size'], 'rank')}: {result['layout']}",
        "step": f"{show.count(result['microbatches'], 'microbatch')} of "
        f"{show.count(result['micro_batch'], 'sequence')} on each rank",
        **({"device": f"{result['gpu']}, faked"} if "gpu" in result else {}),
        "attention": "; ".join([f"by {result['attention']['words']}", *result["attention"]["notes"]]),
        "assumed": "; ".join(result["assumed"]),
        "set-up": _counts(result["counts"]["setup"]),
        "a step's": _counts(result["counts"]["step"]),
        **({"graphs": _captured(result["ranks"][0]["capturable"])} if "gpu" in result else {}),
        **({"timed": timeline_line(result["ranks"][0]["timeline"])} if timed else {}),
        **({"to start": _reads(result["ranks"][0])} if "reads" in result["ranks"][0] else {}),
    }
    show.pairs(facts)
    if len(result["ranks"]) > 1:
        print()
        show.table([_stage(row) for row in result["ranks"]])
        for row in result["ranks"]:
            if "timeline" in row:
                _print_tables(timeline_tables(row["timeline"], f"rank {row['rank']}: "))
        return
    (row,) = result["ranks"]
    names = ("axis", "operation", "calls")
    wire = [{name: sent[name] for name in names} | {"bytes": size(sent["bytes"])} for sent in row["wire"]]
    tables = {"": _components(row), "at the peak": _modules(row), "sent": wire}
    if "device_work" in row:
        tables |= _device_work(row["device_work"])
    if "timeline" in row:
        tables |= timeline_tables(row["timeline"])
    _print_tables(tables)


def _print_tables(tables: Mapping[str, list[dict[str, Any]]]) -> None:
    for title, table in tables.items():
        if table:
            print(f"\n{title}" if title else "")
            show.table(table)


def _captured(found: Mapping[str, Any]) -> str:
    """Return in words whether a CUDA graph can hold a microbatch, with the first reason why not."""
    if found["microbatch"]:
        return "a microbatch can be captured in a CUDA graph"
    first, *others = found["obstacles"]
    more = f", and {show.count(len(others), 'more reason')} (--json)" if others else ""
    return f"a microbatch cannot be captured in a CUDA graph: {first}{more}"


def _device_work(work: Mapping[str, Any]) -> dict[str, list[dict[str, Any]]]:
    """Return the tables of what a step launches, moves and waits for, by title."""
    empty = sum(row["count"] for row in work["empty"])
    messages = [
        {
            "axis": row["axis"],
            "operation": row["name"],
            "ranks": row["ranks"],
            "group": row["group"],
            "stream": row["stream"],
            "calls": row["count"],
            "bytes": size(row["bytes"]),
        }
        for row in work["messages"]
    ]
    graphs = work["graphs"]
    held = f"{graphs['kernels']:,} of them by {show.count(graphs['launches'], 'graph')}, "
    launched = f"launched: {work['launches']:,} kernels, {held if graphs['launches'] else ''}and {empty:,}"
    return {
        f"{launched} operators on nothing": _kernels(work["kernels"]),
        "copied": [row | {"bytes": size(row["bytes"])} for row in work["copies"]],
        "messages by stream": messages,
        "waits of the host": [
            {"in": row["name"], "phase": row["phase"], "count": row["count"]} for row in work["host_waits"]
        ],
        "races of streams": work["races"] or [{"race": "none", "count": 0}],
    }


def _kernels(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the kernels that move the most bytes or compute, and the others in one row; --json has all."""
    ordered = sorted(rows, key=lambda row: (row["flops"], row["bytes"]), reverse=True)
    shown, others = ordered[:MOST_KERNELS], ordered[MOST_KERNELS:]
    if others:
        sums = {key: sum(row[key] for row in others) for key in ("count", "bytes", "flops")}
        shown.append({"name": f"{len(others)} others (--json)", **sums})
    return [
        {
            "kernel": _shortened(row["name"]),
            "count": f"{row['count']:,}",
            "bytes": size(row["bytes"]),
            "TFLOP": f"{row['flops'] / 1e12:.4g}" if row["flops"] else "",
        }
        for row in shown
    ]


def _shortened(name: str) -> str:
    """Return a name without its middle if it is longer than `MOST_NAME`; compilers give such to kernels."""
    if len(name) <= MOST_NAME:
        return name
    end = MOST_NAME // 3
    return f"{name[: MOST_NAME - end - 3]}...{name[-end:]}"


def _reads(row: dict[str, Any]) -> str:
    """Return in words what a rank reads of the weights that the run starts from."""
    return (
        f"rank {row['rank']} reads {size(row['reads']['bytes'])} of the weights' files, at most "
        f"{size(row['reads']['at_a_time'])} of it in memory at a time beside what it holds"
    )


def _counts(counts: dict[str, float]) -> str:
    """Return counts of the set-up or of one step as words, the largest of all ranks shown."""
    text = (
        f"{counts['groups']} groups made, {counts['host_collectives']} host collectives, "
        f"{counts['collectives']} device collectives, {counts['device_waits']} waits for the device"
    )
    if "kernels" in counts:
        text += f", {counts['kernels']} kernels ({counts['kernels_a_block']:g} a block and microbatch)"
    return text


def _stage(row: dict[str, Any]) -> dict[str, Any]:
    components = row["components"]
    sizes = {
        "peak": row["peak"],
        "states": row["states"],
        "activations": components["activations"],
        "buffers": components["buffers"] + components["messages"],
        "temporaries": components["temporaries"],
        "sent": sum(sent["bytes"] for sent in row["wire"]),
        **({"read": row["reads"]["bytes"]} if "reads" in row else {}),
    }
    return {
        "rank": row["rank"],
        "units": _span(row["units"]),
        **{name: size(value) for name, value in sizes.items()},
        **({"launches": row["device_work"]["launches"]} if "device_work" in row else {}),
    }


def _components(row: dict[str, Any]) -> list[dict[str, Any]]:
    rows = [
        {"component": kind, "at the peak": size(row["components"][kind]), "most": size(most)}
        for kind, most in row["most"].items()
        if most
    ]
    if away := row["offloaded_activations"]:
        rows.append({"component": "in the host's memory", "at the peak": "-", "most": size(away)})
    return [{"component": f"rank {row['rank']}", "at the peak": size(row["peak"]), "most": "-"}, *rows]


def _modules(row: dict[str, Any]) -> list[dict[str, Any]]:
    """Return a row for each unit of the model; consecutive units with equal memory share a row."""
    runs = groupby(["", *row["units"]], key=lambda unit: row["modules"].get(unit, {}))
    return [
        {
            "part": _span(list(units)) or "no unit",
            "each": size(sum(held.values())),
            "of which": ", ".join(f"{kind} {size(held[kind])}" for kind in held if held[kind]),
        }
        for held, units in runs
        if held
    ]


def _span(units: list[str]) -> str:
    """Return names of units with runs of blocks shortened: embed, blocks.0 to blocks.7."""
    runs: list[list[str]] = []
    for unit in units:
        name, _, number = runs[-1][-1].rpartition(".") if runs else ("", "", "")
        if number.isdecimal() and unit == f"{name}.{int(number) + 1}":
            runs[-1].append(unit)
        else:
            runs.append([unit])
    return ", ".join(run[0] if len(run) == 1 else f"{run[0]} to {run[-1]}" for run in runs)
