"""The verbs spec show, spec schema, spec check and spec presets; they import no torch, but to name a GPU."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from meshwright import api
from meshwright.cli import output as show
from meshwright.cli.parser import JSON, Call, Flag, verb
from meshwright.cli.runs import FROM, RUN, spec_of
from meshwright.exchange.hf_config import export_remark
from meshwright.spec.schema import schema
from meshwright.spec.toml import to_toml
from meshwright.units import short

_NPROC = Flag("nproc", "set layout.dp if no axis is set, as train does", "N|auto", str)


@verb("spec show", RUN, FROM, _NPROC, JSON)
def show_spec(call: Call) -> None:
    """Print every field of the spec, with defaults and presets resolved."""
    spec = spec_of(call)
    show.result(call, spec.to_json(), lambda _: print(to_toml(spec), end=""))


@verb("spec schema")
def show_schema(call: Call) -> None:
    """Print the JSON schema of a run file."""
    print(json.dumps(schema(), indent=2))


@verb("spec check", RUN, FROM, _NPROC, JSON)
def check(call: Call) -> None:
    """Validate a run file, and print in one line what would run."""
    spec = spec_of(call)
    facts = {
        "ok": True,
        "parameters": spec.model.parameters,
        "active_parameters": spec.model.active_parameters,
        "world_size": spec.layout.world_size,
        "layout": spec.layout.describe(),
        "micro_batch": spec.micro_batch,
        "microbatches": spec.microbatches,
        "steps": None if (epochs := spec.train.epochs) else spec.train.total_steps,
        "epochs": epochs,
        "batch_tokens": spec.train.batch_tokens,
        "digest": spec.digest(),
        "export": (remark := export_remark(spec.model)) or "yes",
    }
    active = f", {short(spec.model.active_parameters)} of a token" if spec.model.moe else ""
    length = (
        f"{epochs:g} epoch{'s' * (epochs != 1)}" if epochs else show.count(spec.train.total_steps, "step")
    )
    sentence = (
        f"{call.path() or 'spec'}: OK: {short(spec.model.parameters)} parameters{active}; "
        f"world size {spec.layout.world_size} ({spec.layout.describe()}); "
        f"{show.count(spec.microbatches, 'microbatch')} of "
        f"{show.count(spec.micro_batch, 'sequence')} on each rank; "
        f"{length} of {spec.train.batch_tokens:,} tokens"
        f"{spec.train.warmup_in_words}" + (f"; {remark}" if remark else "")
    )
    show.result(call, facts, lambda _: show.line(sentence))


@verb(
    "spec presets",
    # Not `api.presets`, whose module the other verbs on specs need not wait for.
    Flag("cluster", "a cluster by name, or a hardware file; default this machine", "NAME", str),
    JSON,
)
def presets(call: Call) -> None:
    """Print the named models, and what training takes of one device."""
    show.result(call, api.presets(**call.flags), _show_presets)


def _show_presets(found: Mapping[str, Any]) -> None:
    show.table([_preset_row(preset) for preset in found["presets"]])
    batch = (
        f"{show.count(found['batch_tokens'] // found['seq_len'], 'sequence')} of {found['seq_len']:,} tokens"
    )
    print()
    show.line(
        "states: GB of weights, gradients and AdamW's moments, computed in bf16 with sums in fp32. step: GB "
        f"of the fastest step of {batch} on one device. tok/s: its tokens a second. A dash: no step fits."
    )
    show.line(_machine(found))


def _preset_row(preset: Mapping[str, Any]) -> dict[str, Any]:
    row = {"preset": preset["preset"], "parameters": short(preset["parameters"])}
    row |= {"active": short(preset["active"])}
    row |= {name: preset[name] for name in ("layers", "hidden", "max_seq_len")}
    speed = preset["tokens_per_second"]
    return row | {
        "states GB": _gigabytes(preset["state_bytes"]),
        "step GB": _gigabytes(preset["step_bytes"]),
        "tok/s": None if speed is None else f"{speed:,.3g}" if speed < 1000 else f"{round(speed, -2):,.0f}",
    }


def _gigabytes(size: float | None) -> str | None:
    return None if size is None else f"{size / 1e9:,.3g}" if size < 1e12 else f"{size / 1e9:,.0f}"


def _machine(found: Mapping[str, Any]) -> str:
    """Return in words what the predictions are for, what they rest on, and how to have better ones."""
    device, format = found["device"], found["format"]
    better = "`meshwright profile --out here.json`, then `meshwright spec presets --cluster here.json`"
    if found["cluster"] is None:
        return f"Nothing is predicted, as the GPU {device} is not in the catalogue; measure it: {better}."
    if format is None:
        return f"The step of no preset fits {device}."
    if found["measured"]:
        return f"Predicted for {device} in {format}, from measurements of meshwright profile."
    clauses = "; ".join(found["never_measured"]) or "its rates are those of published runs"
    return f"Predicted for {device} in {format}, and not measured: {clauses}. From measurements: {better}."
