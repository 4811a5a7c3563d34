"""The clocks of a dry run on a faked GPU, in words and tables."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from meshwright.units import percent, seconds

Table = list[dict[str, Any]]


def timeline_line(timed: Mapping[str, Any]) -> str:
    """Return the step's time and rates, beside the planner's."""
    planner = timed["planner"]
    return (
        f"a step takes {seconds(timed['step_seconds'])} on {timed['cluster']}, {_rates(timed)}; the planner "
        f"has {seconds(planner['step_seconds'])}, {_rates(planner)}: {planner['ratio']:.2f} times as long"
    )


def _rates(timed: Mapping[str, Any]) -> str:
    return (
        f"{timed['tokens_per_second_per_gpu']:,.0f} tokens/s on a GPU, MFU {percent(timed['mfu'])} "
        f"({percent(timed['causal_mfu'])} causal)"
    )


def timeline_tables(timed: Mapping[str, Any], prefix: str = "") -> dict[str, Table]:
    """Return the tables of where a step's time goes, by title."""
    step, host = timed["step_seconds"], timed["host"]
    compute = [
        {
            "kind": f"waiting: {row['kind']}" if row["waiting"] else row["kind"],
            "count": f"{row['count']:,}",
            "time": seconds(row["seconds"]),
            "of the step": percent(row["seconds"] / step),
        }
        for row in timed["compute_stream"]
        if row["seconds"]
    ]
    exposed = [
        {
            "axis": row["axis"],
            "operation": row["operation"],
            "group": row["group"],
            "waits": row["waits"],
            "time": seconds(row["seconds"]),
            "of the step": percent(row["seconds"] / step),
        }
        for row in timed["exposed"]
    ]
    longest = [
        {"for": row["what"], "in": row["place"], "at": seconds(row["at"]), "time": seconds(row["seconds"])}
        for row in timed["longest_waits"]
    ]
    clocks = [
        {"clock": "host", "busy": seconds(host["issuing"]), "of the step": percent(host["issuing"] / step)}
    ]
    clocks += [
        {
            "clock": f"{row['name']} (stream {row['stream']})",
            "busy": seconds(row["busy"]),
            "of the step": percent(row["busy"] / step),
        }
        for row in timed["streams"]
    ]
    terms = [
        {
            "term": row["term"],
            "clocks": seconds(row["seconds"]),
            "planner": seconds(row["planner_seconds"]),
            "ratio": "-" if row["ratio"] is None else f"{row['ratio']:.2f}",
            "": "more than 10% apart" if row["apart"] else "",
        }
        for row in timed["planner"]["terms"]
        if row["seconds"] or row["planner_seconds"]
    ]
    titles = {
        "time of the stream that computes": compute,
        "messages that it waits for": exposed,
        "longest waits": longest,
        "clocks": clocks,
        "beside the planner": terms,
    }
    return {f"{prefix}{title}": table for title, table in titles.items()}
