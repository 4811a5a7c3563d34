"""The verb fit, which says whether a model fits some GPUs, and how; it imports no torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from meshwright import api
from meshwright.cli import output as show
from meshwright.cli.parser import JSON, Argument, Call, verb
from meshwright.cli.plan import brief
from meshwright.units import gigabytes

if TYPE_CHECKING:
    from meshwright.planner.fit.fit import Fits
    from meshwright.planner.fit.published import PublishedWeights
    from meshwright.planner.fit.serving import ServingFit
    from meshwright.planner.fit.training import TrainingFit


@verb(
    "fit",
    Argument(
        "MODEL", "a preset or a name that people know, an HF folder or config.json, or a run file", keys=True
    ),
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
    commands = {each.way.name: told["command"] for each, told in figures if told.get("command")}
    serving = {
        f"serve {form.format}": " && ".join(told["commands"]) for form, told in served if told.get("commands")
    }
    for sentence in (*_notes(found), *_of_commands(found, commands, serving)):
        show.line(sentence)
    print()
    for name, command in {**commands, **serving}.items():
        print(f"{name}: {command}")


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
        f"at a time, by vLLM, which may fill {found.utilization:.0%} of a GPU. longest: tokens of a "
        f"sequence; largest mb: sequences of a microbatch; both with full recomputation"
    )
    if found.seq_len > (most := found.model.max_seq_len):
        told = f"sequences of {found.seq_len:,} tokens are longer than the {most:,} that"
        if found.is_named:
            yield (
                f"{told} the preset {found.model.preset} is for, which {found.name} is taken as; vLLM "
                f"refuses them unless its own config.json has more"
            )
        else:
            yield f"{told} the model is for, and vLLM refuses them"
    if routed := found.routed_parameters:
        yield (
            f"QLoRA: the routed experts stay in bf16, {gigabytes(2 * routed)} over all GPUs: 4 bits are for "
            f"linear layers that all tokens pass"
        )
    if (published_in := found.other_format) is not None:
        yield (
            f"config.json says that weights are in {published_in}, and no row is in that: all rows are of a "
            f"model with weights in 16 bits, or quantised from it"
        )
    if (published := found.published_weights) is not None:
        yield from _published(published, found.model.parameters)
    for each in found.training:
        if each.reason is not None:
            yield f"{each.way.title}: {each.reason}"
        if each.host_bytes:
            need = f"{each.way.title}: takes {gigabytes(each.host_bytes)} of the host's memory"
            known = each.host_memory
            if known is None and each.fits_device:
                yield f"{need}, which is not known; give --host-memory GB"
            elif known is not None:
                yield f"{need}, of {gigabytes(known)}" + ("" if each.host_bytes <= known else ": too little")
    for form in found.serving:
        if form.reason is not None:
            yield f"weights in {form.format} are not offered: {form.reason}"


def _published(weights: PublishedWeights, parameters: int) -> Iterator[str]:
    """Yield what holds of weights that are published in blocks."""
    form, source = weights.form, weights.source
    more = ", exact ones" if form == "mxfp4" else ""
    served = "; llama.cpp serves them, too, from GGUF files (its pull request 15091)" if more else ""
    yield (
        f"weights in {form}: as {source} has them, {weights.words} and the rest in bf16{served}. "
        f"quantise and export write no {form}"
    )
    yield (
        f"Training is not in {form}: --from {source} makes bf16 of the weights{more}, "
        f"{gigabytes(2 * parameters)} over all GPUs; for LoRA, whose adapters stand beside them, give as "
        f"many GPUs as hold that (--count), and serve the tuned model in bf16"
    )


def _of_commands(found: Fits, training: Mapping[str, str], serving: Mapping[str, str]) -> Iterator[str]:
    """Yield what stands in printed commands for folders that the user has."""
    if any("--model.preset " in command for command in training.values()):
        source = found.published or "a folder with its weights"
        yield (
            f"--model.preset starts from random weights: to fine-tune, give --from {source} in its place, or "
            f"another model of the shape"
        )
    if any(" RUN" in command for command in serving.values()):
        yield "RUN: put the folder of the trained run, or of an HF model with weights"
