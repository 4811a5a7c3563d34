"""The verb simulate, which times a pipeline's step; it imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from meshwright import api
from meshwright.api.options import number, positive
from meshwright.cli import output as show
from meshwright.cli.parser import JSON, Call, Flag, verb
from meshwright.cli.runs import MODEL, spec_of
from meshwright.report.format import percent, size
from meshwright.spec import UserError
from meshwright.units import seconds

MOST_RANKS = 16
"""Pipelines of more ranks are shown without a row for each."""


@verb(
    "simulate",
    MODEL,
    api.simulate,
    Flag("tflops", "attained TFLOP/s of a device, to time FLOPs; default 400", "RATE", positive),
    Flag("forward", "milliseconds of a stage's forward, instead of FLOPs", "MS", positive),
    Flag("input", "milliseconds of input backward; default as --forward", "MS", positive),
    Flag("weight", "milliseconds of weight backward; default as --forward", "MS", positive),
    Flag("latency", "microseconds of a message between stages", "US", number(0, 1e9), default=5.0),
    Flag("bandwidth", "GB/s of a link between stages, one way", "RATE", positive, default=50.0),
    JSON,
)
def simulate(call: Call) -> None:
    """Time one step of a run's pipeline and show it."""
    spec = spec_of(call, models=True)
    flags, durations = call.flags, _durations(call.flags)
    from meshwright.planner.simulated_pipeline import Machine

    result = api.simulate(
        spec,
        durations=durations,
        flops=1e12 * flags["tflops"] if flags["tflops"] else Machine.flops,
        latency=flags["latency"] / 1e6,
        bandwidth=1e9 * flags["bandwidth"],
        out=flags["out"],
        trace=flags["trace"],
    )
    show.result(call, result, _show, wrote=(flags["out"], flags["trace"]))


def _durations(flags: dict[str, Any]) -> tuple[float, float, float] | None:
    """Return the seconds of F, I and W that the flags give in milliseconds; None if FLOPs are counted."""
    forward, input, weight = (flags[name] for name in ("forward", "input", "weight"))
    if forward is None and (input or weight):
        name = "input" if input else "weight"
        raise UserError(f"--{name}: is given without --forward; give --forward MS too")
    if forward is None:
        return None
    if flags["tflops"] is not None:
        raise UserError(
            f"--tflops: {flags['tflops']:g} has no effect with --forward, which replaces counted FLOPs; give "
            f"one of them"
        )
    return forward / 1e3, (input or forward) / 1e3, (weight or forward) / 1e3


def _show(result: Mapping[str, Any]) -> None:
    bubbles, ideal, flops = result["bubbles"], result["closed_form_bubble"], result["flops"]
    peak, held = max(result["peak_activations"]), max(result["peak_activation_bytes"])
    counted = (
        f"FLOPs at {result['flops'] / 1e12:g} TFLOP/s a device" if flops else "as given, equal in every stage"
    )
    apart = f"; by rank from {percent(min(bubbles), 2)} to {percent(max(bubbles), 2)}"
    facts = {
        "schedule": f"{result['schedule']}: {show.count(result['ranks'], 'rank')}, "
        f"{show.count(result['virtual'], 'stage')} each, {show.count(result['microbatches'], 'microbatch')}",
        "durations": counted,
        "links": f"{seconds(result['latency'])} a message, and {size(result['message_bytes'])} of it at "
        f"{result['bandwidth'] / 1e9:g} GB/s",
        "step": seconds(result["step_seconds"]),
        "bubble": f"{percent(result['bubble'], 2)} of all ranks' time" + apart * (len(bubbles) > 1),
        "bubble_is": _causes(result["bubble_by_cause"]),
        "bubble_by_formula": "none holds for these durations and microbatches"
        if ideal is None
        else f"{percent(ideal, 2)} if ranks were equal and links free",
        "bubble_without_sync": percent(result["bubble_without_sync"], 2)
        + " if no rank waited for the others at a step's end",
        "peak_activations": f"{peak:g} of a rank's microbatches, {size(held)} on one device",
    }
    show.pairs(facts)
    if result["ranks"] <= MOST_RANKS:
        print()
        show.table(_rows(result))


def _causes(parts: Mapping[str, float]) -> str:
    """Return in words what a bubble is made of; parts of less than 0.01% of all time are left out."""
    words = {
        "schedule": "the schedule itself",
        "stages": "stages that differ (of whole blocks, one with the head)",
        "links": "messages",
    }
    said = [f"{percent(share, 2)} {words[name]}" for name, share in parts.items() if abs(share) >= 1e-4]
    return ", ".join(said) or "nothing"


def _rows(result: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return a row for each rank."""
    lists = (result["blocks"], result["bubbles"], result["peak_activations"], result["peak_activation_bytes"])
    return [
        {
            "rank": rank,
            "blocks": blocks,
            "busy": seconds(result["step_seconds"] * (1 - bubble)),
            "idle": seconds(result["step_seconds"] * bubble),
            "bubble": percent(bubble, 2),
            "peak microbatches": peak,
            "peak activations": size(held),
        }
        for rank, (blocks, bubble, peak, held) in enumerate(zip(*lists, strict=True))
    ]
