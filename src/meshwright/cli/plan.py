"""The verbs plan, which finds the best layouts, and explain, which gives reasons; they import no torch."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from meshwright import api
from meshwright.api.options import file_name, positive
from meshwright.cli import output as show
from meshwright.cli.parser import JSON, Call, Flag, verb
from meshwright.cli.plan_clusters import CLUSTER, PRICE, Words, planned, show_clusters
from meshwright.cli.runs import FROM, MODEL, spec_of
from meshwright.hardware.find import cluster as cluster_of
from meshwright.hardware.hardware_file import check_writable
from meshwright.planner.cluster_plans import ClusterPlans
from meshwright.planner.cost.software import stack_named
from meshwright.planner.programs.table import PROGRAMS
from meshwright.spec import Layout, RunSpec, UserError
from meshwright.spec.errors import did_you_mean
from meshwright.spec.load import fixed_layout, from_tree
from meshwright.spec.sections import SelectiveRecompute
from meshwright.spec.toml import to_toml
from meshwright.spec.weights import weight_source
from meshwright.units import gigabytes, percent, short

if TYPE_CHECKING:
    from meshwright.planner.plan import Plan, Plans
    from meshwright.planner.search.results import SearchCounts, TimedLayout


def _fixed(text: str) -> list[tuple[str, str]]:
    """Read keys of the layout with their values, such as tp=8,pp=4, as dotted keys and texts."""
    found = []
    for pair in re.split(r",(?=\s*[\w.]+\s*=)", text):
        name, equals, value = (part.strip() for part in pair.partition("="))
        if not (name and equals and value):
            raise ValueError(f"'{pair.strip()}' is not NAME=VALUE; give such as tp=8,pp=4")
        key = "recompute.policy" if name in ("recompute", "recompute.policy") else f"layout.{name}"
        names = [*Layout.model_fields, "recompute"]
        if name.removeprefix("layout.") not in names and key != "recompute.policy":
            hint = did_you_mean(name, names) or f"; the names are {', '.join(names)}"
            raise ValueError(f"'{name}' is not a key of the layout{hint}")
        found.append((key, value))
    return found


@verb(
    "plan",
    MODEL,
    FROM,
    CLUSTER,
    PRICE,
    api.plan,
    Flag(
        "fix",
        "keys of the layout to keep, as --layout.tp 8 does, or recompute=full; may be repeated",
        "tp=8,pp=4",
        _fixed,
        repeated=True,
    ),
    Flag("max-memory", "most GB of a device that a plan may need", "GB", positive),
    Flag("write", "new run file to write, for train", "RUN.toml", file_name(".toml")),
    Flag("out", "page with the reasons to write; opens offline", "FILE.html", file_name(".html")),
    Flag("no-why", "leave out the neighbours and the assumptions, to save time"),
    Flag("progress", "show each plan that is the best so far, on stderr"),
    JSON,
)
def plan(call: Call) -> None:
    """Search the layouts and show the best ones."""
    flags = dict(call.flags)
    write, out, why = flags.pop("write"), flags.pop("out"), not flags.pop("no_why")
    check_writable(write, "--write")
    check_writable(out, "--out")
    if write is not None and write.exists():  # someone may have edited it
        raise UserError(f"--write: {write} exists already; remove it, or give another file")
    words = partial(brief, stack=flags["stack"])
    flags["progress"] = partial(_print_best, words) if flags["progress"] else None
    fixed = [pair for pairs in flags.pop("fix") or () for pair in pairs]
    limit = flags["max_memory"] = 1e9 * flags["max_memory"] if flags["max_memory"] else None
    model, overrides = _planned_model(call)
    call = replace(call, overrides=overrides)
    flags |= {"overrides": _overrides(call, fixed), "finished": partial(_print_devices, words)}
    found = planned(model, words, **flags)
    plans = found.best if isinstance(found, ClusterPlans) else found
    if write is not None:
        _write(plans.best.spec, write)
    if out is not None:
        _write_page(plans, out)
    if call.json:
        show.result(call, found.to_json(why=why))
        return
    if isinstance(found, ClusterPlans):
        show_clusters(found, words)
    _show(plans, limit, why)
    written = [path for path in (write, out) if path is not None]
    print("".join(f"\nwrote {path}" for path in written), end="\n" if written else "")
    if write is not None and not plans.stack.ours:
        name = plans.stack.name
        show.line(f"It is a run file of this program: `explain` takes it as planned with --stack {name}.")


def _planned_model(call: Call) -> tuple[str, list[tuple[str, str]]]:
    """Return the model to plan for, MODEL or the folder that --from gives, and the other dotted flags."""
    if call.words:
        return call.words[0], call.overrides
    given = dict(call.overrides)
    weights = given.pop("model.weights", None)
    source = None if weights is None else weight_source(weights)
    if (folder := given.pop("model.hf", None)) is None and source is not None and not source.is_foreign:
        folder = str(source.folder)
    if folder is None and weights is not None:
        raise UserError(
            f"--from: {weights} has no config.json, by which a model is planned; give MODEL, a preset or an "
            "HF folder of its architecture"
        )
    if folder is None:
        raise UserError("MODEL: is missing; give a preset, an HF folder, a run file, or --from SOURCE")
    return folder, list(given.items())


def _overrides(call: Call, fixed: Sequence[tuple[str, str]]) -> list[tuple[str, str]]:
    """Return the dotted flags and the keys of --fix.

    Raises `UserError` for a key that is given twice, and for a bad value.
    """
    given = dict(call.overrides)
    for key, text in fixed:
        name = key.rpartition(".")[2] if key.startswith("layout.") else "recompute"
        if key in given:
            raise UserError(f"--fix: {name} is given twice, as {given[key]} and as {text}; give it once")
        try:
            from_tree({}, [(key, text)]) if name == "recompute" else fixed_layout([(key, text)])
        except UserError as error:
            raise UserError(str(error).replace(f"--{key}:", f"--fix: {name}:", 1)) from None
        given[key] = text
    return list(given.items())


def _write_page(plans: Plans, path: Path) -> None:
    """Write the page of the best plan, compared with its neighbours beside the plans on as many devices."""
    from meshwright.report.plan_page import write_plan_page

    best = plans.best
    specs = [plan.spec for plan in plans.plans if plan.cluster.count == best.cluster.count]
    only = best.cluster.device.planning_only if plans.stack.ours else ""
    notes = [*([f"{only}."] if only else []), *_notes(plans)]
    write_plan_page(path, specs, best.costs, plans.pareto, notes, plans.capacity)


def _print_best(words: Words, best: TimedLayout, counts: SearchCounts) -> None:
    print(f"{best.seconds:9.4g} s a step, {words(best.spec)}", file=sys.stderr, flush=True)


def _print_devices(words: Words, devices: int, best: Plan | None) -> None:
    """Print on stderr the best plan for one number of devices of a range."""
    said = "nothing fits" if best is None else f"{best.step_seconds:.4g} s a step, {words(best.spec)}"
    print(f"{show.count(devices, 'device')}: {said}", file=sys.stderr, flush=True)


def _write(spec: RunSpec, path: Path) -> None:
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(to_toml(spec))
    except OSError as error:
        raise UserError(f"--write: {path} cannot be written ({error.strerror}); give another file") from None


def brief(spec: RunSpec, stack: str = "meshwright") -> str:
    """Return a layout in few words, as `stack` names them: dp16 cp8 tp2 pp64 zb-v x2 zero2 mb1."""
    layout = spec.layout
    names = ("replicate", "dp", "cp", "tp", "pp", "ep", "etp")
    words = [f"{name}{size}" for name in names if (size := getattr(layout, name)) > 1]
    if layout.cp > 1 and layout.context_mode != "ring":
        words.append(layout.context_mode)
    if layout.pp > 1:
        words.append(layout.schedule + (f" x{layout.chunks}" if layout.chunks > 1 else ""))
        words += [] if layout.stages == "balanced" else ["even" if layout.stages == "even" else "stages"]
    if layout.tp > 1 and not layout.sequence_parallel:
        words.append("no-sp")
    words += [f"every{spec.exchange_every}"] if spec.step_groups > 1 else []
    words += [label] if (label := PROGRAMS[stack].label(spec)) else []
    words.append(f"mb{layout.micro_batch}")
    words += [] if spec.recompute.policy == "none" else [spec.recompute.policy]
    if isinstance(spec.recompute, SelectiveRecompute) and (saved := spec.recompute.saved_words):
        words.append(f"save={saved}")
    return " ".join(words)


def _show(plans: Plans, limit: float | None, why: bool) -> None:
    """Print the plans; `limit` is --max-memory in bytes."""
    from meshwright.planner.cost.uncertainty import room
    from meshwright.planner.search.objectives import described

    best = plans.best
    if (only := best.cluster.device.planning_only) and plans.stack.ours:
        show.line(f"{only}.")
    model = best.spec.model.preset or best.spec.model.hf or best.spec.model.family
    print(
        f"{model} ({short(best.spec.model.parameters)} parameters) on "
        f"{best.cluster.in_words}, in {best.spec.precision.compute} by {plans.stack.name}"
    )
    if plans.model_found is not None:
        show.line(f"the largest that fits: {described(plans.model_found)}")
    batch = plans.note or f"{best.spec.train.batch_tokens:,} tokens"
    batch += best.spec.train.warmup_in_words
    show.line(f"batch {batch}; sequences of {best.spec.data.seq_len:,}")
    if plans.objective == "longest-context" and best.spec.batch_sequences == 1:
        show.line("the batch is one sequence: with a larger --batch-tokens longer ones may fit")
    if limit is not None and limit > plans.capacity:
        show.line(
            f"--max-memory of {gigabytes(limit)} limits nothing: of {gigabytes(room(best.cluster))} a plan "
            f"may fill {gigabytes(plans.capacity)}"
        )
    print()
    show.table([_row(place, plan, plans) for place, plan in enumerate(plans.plans, 1)])
    low, high = best.interval
    print()
    for sentence in (*_notes(plans), *_remarks(plans)):
        show.line(sentence)
    length = best.spec.data.seq_len
    layers = best.spec.model.layer_kinds
    share = sum(each.keys_visible(length) for each in layers) / sum(each.keys_seen(length) for each in layers)
    left = "half" if share == 0.5 else percent(share)
    show.line(
        f"The first: a step takes {low:.4g} to {high:.4g} s in 9 of 10 cases; its MFU is "
        f"{best.causal_mfu:.1%} with {left} of attention's FLOPs, which is what a causal mask leaves."
    )
    if best.never_measured:
        show.line(f"Never measured: {'; '.join(best.never_measured)}.")
    print("\nWhere its time goes, by the busiest rank:")
    _shares(best.parts, best.step_seconds, "s")
    needs = best.memory
    print(f"\nWhere its memory goes, on pipeline rank {needs.rank}:")
    terms = {field.name: getattr(needs, field.name) / 1e9 for field in fields(needs) if field.name != "rank"}
    _shares(terms, needs.device / 1e9, "GB")
    if why:
        _why(plans)
    did = plans.searched
    print(
        f"\nsearched in {did.seconds:.1f} s: {did.branches:,} branches, {did.simulated:,} schedules "
        f"simulated, {did.timed:,} layouts timed"
    )


def _remarks(plans: Plans) -> Iterator[str]:
    """Yield a sentence on each thing that the first plan has besides its layout."""
    from meshwright.report.plan_text import attention, blocks, offload, routing

    if words := attention(plans.best):
        yield f"Attention: {words}."
    if words := blocks(plans.best):
        yield f"Blocks: {words}."
    if words := routing(plans.best):
        yield f"Routing: {words}."
    if words := plans.best.sharding:
        yield f"Sharding: {words}."
    if words := offload(plans.best):
        yield f"Offload: {words}."
    if plans.exchange_choice is not None:
        yield f"{plans.exchange_choice.words}."
    if plans.best.exchange is not None:
        yield f"Exchanges: {plans.best.exchange.words}."


def _notes(plans: Plans) -> list[str]:
    """Return sentences on the plan that is faster than the first, what else would be better, and training
    with failures."""
    best, notes = plans.best, []
    if (faster := plans.faster) is not None:
        share = best.step_seconds / faster.step_seconds - 1
        told_apart = faster.step_seconds < best.interval[0]
        within = "" if told_apart else ", within what the interval can tell apart"
        kind = "surer" if plans.is_surer else "simpler"
        notes.append(
            f"A {kind} plan is first ({plans.simpler}): the fastest by this model, "
            f"{brief(faster.spec, plans.stack.name)}, would gain {share:.1%}{within}."
        )
    notes += plans.alternatives
    if plans.tokens is not None:
        training = best.training(plans.tokens)
        money = "" if training.usd is None else f", {show.text(training.usd)} USD"
        many = "1 token takes" if plans.tokens == 1 else f"{short(plans.tokens)} tokens take"
        notes.append(f"{many} the first {show.text(training.days)} days{money}. {training.words}.")
    return notes


def _why(plans: Plans) -> None:
    """Print why the neighbours of the best plan are worse, and which assumption would change the choice."""
    from meshwright.report.plan_text import assumption_lines, neighbour_lines

    why = plans.reasons
    print("\nWhy not its neighbours, all else as it is:")
    print(*neighbour_lines(why.neighbours, len(why.candidates), "further away, which --out has"), sep="\n")
    print("\nWhat would change the choice:")
    print(*assumption_lines(why.assumptions), sep="\n")


def _row(place: int, plan: Plan, plans: Plans) -> dict[str, Any]:
    row: dict[str, Any] = {"#": place}
    if len({other.cluster.count for other in plans.plans}) > 1:
        row["GPUs"] = plan.cluster.count
    row["step s"] = show.text(plan.step_seconds)
    row["tok/s/GPU"] = f"{plan.tokens_per_second / plan.cluster.count:,.0f}"
    row["MFU"] = f"{100 * plan.mfu:.1f}%"
    row["GB"] = f"{plan.memory.device / 1e9:.1f}"
    row["fits"] = f"{100 * plan.fits_probability:.0f}%"
    if plans.tokens is not None:
        training = plan.training(plans.tokens)
        row["days"] = show.text(training.days)
        row |= {} if training.usd is None else {"USD": short(training.usd)}
    elif plan.cost_per_token is not None:
        row["USD/1B"] = show.text(1e9 * plan.cost_per_token)
    return {**row, "layout": brief(plan.spec, plans.stack.name)}


def _shares(parts: dict[str, float], total: float, unit: str) -> None:
    for name, value in sorted(parts.items(), key=lambda part: -part[1]):
        if value > 0.0005 * total:
            print(f"  {name:<18} {value:9.3f} {unit}  {100 * value / total:5.1f}%")


@verb("explain", MODEL, FROM, api.explain, JSON)
def explain(call: Call) -> None:
    """Explain the layout of a run on a cluster."""
    from meshwright.report.plan_text import text

    device = cluster_of(call.flags["cluster"]).device
    spec = spec_of(call, kind=device.kind, ours=stack_named(call.flags["stack"]).ours, models=True)
    explanation = api.explain(spec, **call.flags)
    show.result(call, explanation.to_json(), lambda _: print(text(explanation)), wrote=[call.flags["out"]])
