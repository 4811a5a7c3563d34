"""The verbs spec show, spec schema, spec check and spec presets; they import no torch."""

from __future__ import annotations

import json
from typing import Any

from meshwright.cli import output as show
from meshwright.cli.parser import JSON, Call, Flag, verb
from meshwright.cli.runs import FROM, RUN, spec_of
from meshwright.exchange.hf_config import export_remark
from meshwright.spec import ModelSpec
from meshwright.spec.presets import PRESETS
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
        "steps": spec.train.total_steps,
        "batch_tokens": spec.train.batch_tokens,
        "digest": spec.digest(),
        "export": (remark := export_remark(spec.model)) or "yes",
    }
    active = f", {short(spec.model.active_parameters)} of a token" if spec.model.moe else ""
    sentence = (
        f"{call.path() or 'spec'}: OK: {short(spec.model.parameters)} parameters{active}; "
        f"world size {spec.layout.world_size} ({spec.layout.describe()}); "
        f"{show.count(spec.microbatches, 'microbatch')} of "
        f"{show.count(spec.micro_batch, 'sequence')} on each rank; "
        f"{show.count(spec.train.total_steps, 'step')} of {spec.train.batch_tokens:,} tokens"
        f"{spec.train.warmup_in_words}" + (f"; {remark}" if remark else "")
    )
    show.result(call, facts, lambda _: show.line(sentence))


@verb("spec presets", JSON)
def presets(call: Call) -> None:
    """Print the named models."""
    sizes = ("layers", "hidden", "ffn", "heads", "kv_heads", "head_dim", "vocab_size", "max_seq_len")
    rows: list[dict[str, Any]] = []
    for name in PRESETS:
        model = ModelSpec(preset=name)  # type: ignore[call-arg]
        row = {"preset": name, "parameters": model.parameters, "active": model.active_parameters}
        rows.append(row | {size: getattr(model, size) for size in sizes})
    shown = [row | {name: short(row[name]) for name in ("parameters", "active")} for row in rows]
    show.result(call, {"presets": rows}, lambda _: show.table(shown))
