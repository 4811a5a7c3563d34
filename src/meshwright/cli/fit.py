"""The verb fit, which says whether a model fits some GPUs, and how; it imports no torch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from meshwright import api
from meshwright.cli import output as show
from meshwright.cli.parser import JSON, Argument, Call, verb
from meshwright.cli.plan import brief
from meshwright.units import gigabytes

if TYPE_CHECKING:
    from meshwright.planner.fit.fit import Fits
    from meshwright.planner.fit.serving import ServingFit
    from meshwright.planner.fit.training import TrainingFit


@verb(
    "fit",
    Argument("MODEL", "a preset, an HF folder or config.json, or a run file", keys=True),
    api.fit,
    JSON,
)
def fit(call: Call) -> None:
    """Say which ways of training and serving a model fit, with their memory, and the commands."""
    found = api.fit(call.words[0], **call.flags, overrides=call.overrides)
    if call.json:
        show.result(call, found.to_json())
        return
    show.line(f"{found.advice}.")
    print()
    figures = [(each, each.to_json()) for each in found.training]
    show.table([_trained(each, told) for each, told in figures if each.plan is not None])
    print()
    served = [(each, each.to_json()) for each in found.serving]
    show.table([_served(each, told) for each, told in served if each.spec is not None])
    print()
    for sentence in _notes(found):
        show.line(sentence)
    print()
    for each, told in figures:
        if told.get("command"):
            print(f"{each.way.name}: {told['command']}")
    for form, told in served:
        if told.get("commands"):
            print(f"serve {form.format}: {' && '.join(told['commands'])}")


def _trained(each: TrainingFit, told: dict[str, Any]) -> dict[str, Any]:
    assert each.plan is not None
    return {
        "to train": each.way.title,
        "GB a GPU": _interval(told["bytes"]),
        "fits": _fits(each.fits, each.probability),
        "layout": brief(each.plan.spec),
        "longest": told["longest_seq_len"] or None,
        "largest mb": told["largest_micro_batch"] or None,
    }


def _served(each: ServingFit, told: dict[str, Any]) -> dict[str, Any]:
    assert each.spec is not None
    layout = each.spec.layout
    words = [
        f"{name}{getattr(layout, name)}" for name in ("dp", "tp", "pp", "ep") if getattr(layout, name) > 1
    ]
    return {
        "to serve": f"weights in {each.format}",
        "GB a GPU": _interval(told["bytes"]),
        "fits": _fits(each.fits, each.probability),
        "layout": " ".join(words) or "one GPU",
        "longest": told["longest_length"] or None,
        "largest batch": told["largest_batch"] or None,
    }


def _interval(size: dict[str, float]) -> str:
    low, expected, high = (f"{each / 1e9:.1f}" for each in (size["low"], size["expected"], size["high"]))
    return f"{expected} ({low} to {high})"


def _fits(fits: bool, probability: float) -> str:
    return f"{probability:.0%}" if fits else "no"


def _notes(found: Fits) -> Iterator[str]:
    """Yield what the tables leave unsaid: lengths, the room, the host's memory, ways that cannot be had."""
    served = found.serving[0]
    yield (
        f"Of {gigabytes(found.room)} of each {found.cluster.device.name}; (low to high) holds 9 of 10 cases. "
        f"Sequences of {found.seq_len:,} tokens; a replica serves {show.count(served.batch, 'sequence')} "
        f"at a time. longest: tokens of a sequence; largest mb: sequences of a microbatch; both with full "
        f"recomputation"
    )
    if found.seq_len > (most := found.model.max_seq_len):
        yield f"sequences of {found.seq_len:,} tokens are longer than the {most:,} that the model is for"
    for each in found.training:
        if each.reason is not None:
            yield f"{each.way.title}: {each.reason}"
        if each.host_bytes:
            need = f"{each.way.title}: takes {gigabytes(each.host_bytes)} of the host's memory"
            known = each.host_memory
            if known is None:
                yield f"{need}, which is not known; give --host-memory GB"
            else:
                yield f"{need}, of {gigabytes(known)}" + ("" if each.host_bytes <= known else ": too little")
    for form in found.serving:
        if form.reason is not None:
            yield f"weights in {form.format}: {form.reason}"
