"""The verb init: a run file for what somebody has, wants, and trains on, and the commands that use it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

from meshwright.api.options import Option, choice, whole
from meshwright.api.planning import plan
from meshwright.api.ranks import Result
from meshwright.api.run_files.budget import (
    LEAST_STEPS,
    PASSES,
    TOKENS_PER_PARAMETER,
    Budget,
    Given,
    continued,
    from_nothing,
    preset_for,
)
from meshwright.api.run_files.commands import serving, training
from meshwright.api.run_files.draft import Draft
from meshwright.api.run_files.holdings import AS_THEY_ARE, Holding, Holdings, corpus_of, holdings
from meshwright.api.run_files.places import HERE, Place, place
from meshwright.api.run_files.tuning import add_tuning
from meshwright.api.source import keys_of_source
from meshwright.data.chat_source import has_chats
from meshwright.planner.explain.explanation import describe
from meshwright.spec import ModelSpec, RunSpec, UserError, load
from meshwright.spec.load import Overrides, from_tree, given_keys
from meshwright.spec.model_names import preset_named, why_unknown
from meshwright.spec.sections import DataSpec
from meshwright.units import gigabytes, seconds, short

WANTS = {
    "train": "train a new model on the text, from nothing",
    "continue": "go on training a model or a run on the text, all of its weights",
    "finetune": "tune a model on chats, or on a small text three times over; adapters where it is large",
    "serve": "use a model or a run: generate, export, quantise; this needs no run file",
}
"""Values of --want, each with what it is."""
POLICY = "recompute.policy"
_READ_AS = ("data.text_key", "data.format", "data.columns")
_SIZES = ("train.tokens", "train.steps", "train.batch_tokens")


def init(
    have: Annotated[Sequence[str], Option(
        "text, chats, a model or a run: a path, a URL, stdlib, or org/name of the hub; given twice, a text "
        "or chats, and a model",
        "PATH|NAME", str, repeated=True)] = (),
    want: Annotated[str | None, Option(
        "what is wanted; default train for a text, continue for a text with a model, finetune for chats with "
        "a model, serve for a model",
        "|".join(WANTS), choice(*WANTS), values=lambda: WANTS)] = None,
    on: Annotated[str, Option("where: here, or a cluster by name, or a hardware file", "NAME", str)] = HERE,
    gpus: Annotated[int | None, Option(
        "devices; default all of this machine, or one node of the cluster", "N", whole(1))] = None,
    preset: Annotated[str | None, Option(
        "shape of a new model, of meshwright spec presets; default by the text and the devices", "NAME", str
    )] = None,
    *,
    out: Path = Path("run.toml"),
    overrides: Overrides = (),
) -> Result:  # fmt: skip
    """Write a commented run file to `out`, and return it with the commands that use it.

    `have`, `want`, `on` and `gpus` say what there is, what is wanted and where; `overrides` are dotted keys
    of the file with their texts. Returns `file` (None where none is needed), `found` and `told`, sentences,
    and `commands`, pairs of a command and what it does. Raises `UserError`, and writes nothing then.
    """
    read_as = [(key, text) for key, text in overrides if key.startswith(_READ_AS)]
    held = holdings(have, DataSpec(**given_keys("data", {}, read_as)))
    wanted = _wanted(held, want)
    found = [f"{each.source}: {each.told}" for each in held.all]
    if wanted == "serve":
        assert held.model is not None  # `_wanted` has asked for it
        told = ["a model that is used as it is needs no run file: none is written"]
        return {"file": None, "found": found, "told": told, "commands": serving(held.model)}
    check_new_file(out)
    where = place(on, gpus)
    given = _given(held, dict(overrides))
    if wanted == "train":
        draft, told = _new(held, where, preset, given)
    else:
        draft, told = _continued(held, where, wanted, given)
    _lay_out(draft, where, told)
    text = draft.toml()
    try:
        with out.open("x", encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        raise UserError(f"FILE: {out} cannot be written ({error.strerror}); give another name") from None
    commands = training(out, where, draft.spec, has_chats(draft.spec.data))
    return {"file": str(out), "found": found, "told": told, "commands": commands}


def check_new_file(out: Path) -> None:
    """Raise `UserError` for a name that no new run file can have."""
    if out.exists():
        raise UserError(f"FILE: {out} is there already; remove it, or give another name")
    if out.suffix != ".toml":
        raise UserError(f"FILE: {out} is not the name of a run file, which ends in .toml; give run.toml")


def _wanted(held: Holdings, want: str | None) -> str:
    """Return what is wanted, by default what suits. Raises `UserError` for what needs something else."""
    if not held.all:
        raise UserError(
            "--have: is missing; give a text, a model or a run, such as --have my-text, or stdlib"
        )
    if held.text is not None and held.has_chats and (held.model is None or want == "train"):
        raise UserError(
            f"--have: {held.text.source} is {held.text.told}, and chats need a model to tune; give one more "
            "--have, such as Qwen/Qwen2.5-0.5B-Instruct or the folder of a model that has a chat template"
            + (", and --want finetune" if want == "train" else "")
        )
    if want is None:
        suits = "finetune" if held.has_chats else "continue"
        want = "train" if held.model is None else "serve" if held.text is None else suits
    if want == "train" and held.model is not None:
        raise UserError(
            f"--want: train is from nothing, and {held.model.source} has weights; give --want continue, or "
            "leave the model out and give a shape as --preset"
        )
    if want != "train" and held.model is None:
        raise UserError(f"--want: {want} needs a model or a run; give one more --have, or --want train")
    if want in ("train", "continue", "finetune") and held.text is None and not held.is_run:
        raise UserError(f"--want: {want} needs a text to train on; give it as one more --have")
    return want


def _given(held: Holdings, flags: Mapping[str, str]) -> Mapping[str, str]:
    """Return the keys that the user gives. Raises `UserError` for one that says what another flag says."""
    for key, other in (("data.corpus", held.text), ("model.weights", held.model), ("model.hf", held.model)):
        if key in flags and other is not None:
            raise UserError(
                f"--{key}: {flags[key]} is given together with --have {other.source}; give one of them"
            )
    return flags


def _budget_given(draft: Draft) -> Given:
    """Return what the given keys say of the training's size. Raises `UserError`."""
    keys = given_keys("train", {}, [(key, text) for key, text in draft.given.items() if key in _SIZES])
    return Given(keys.get("tokens"), keys.get("steps"), keys.get("batch_tokens"))


def _new(
    held: Holdings, where: Place, preset: str | None, given: Mapping[str, str]
) -> tuple[Draft, list[str]]:
    """Return the draft of a training from nothing, and what to know of it."""
    text = held.text
    assert text is not None  # `_wanted` has asked for it
    name = preset_for(text.tokens, where) if preset is None else preset_named(preset)
    if name is None:
        raise UserError(f"--preset: {preset!r} {why_unknown(str(preset), 'is not the name of a preset')}")
    shape = ModelSpec.model_validate({"preset": name})
    head = [f"A new model of the shape {name}, trained on {text.source} ({text.told}).", *_usage(where)]
    draft = Draft(head, given)
    draft.add("model.preset", name, "shapes: meshwright spec presets")
    vocabulary = min(shape.vocab_size, 32768 if text.tokens is None or text.tokens > 1e7 else 8192)
    if vocabulary != shape.vocab_size:
        draft.add(
            "model.vocab_size",
            vocabulary,
            f"tokens of a tokenizer made of this text, not {shape.vocab_size:,}",
        )
    seq_len = min(shape.max_seq_len, 256 if shape.parameters < 1e7 else 2048)
    _add_data(draft, text.source, seq_len)
    parameters, seq_len = draft.spec.model.parameters, draft.spec.data.seq_len
    budget = from_nothing(parameters, text.tokens, seq_len, where.devices, _budget_given(draft))
    why = f"{TOKENS_PER_PARAMETER} for each of {short(parameters)} parameters (Hoffmann et al. 2022)"
    if text.tokens is not None and budget.tokens != TOKENS_PER_PARAMETER * parameters:
        why = f"{budget.tokens / max(1, text.tokens):.3g} passes over the text"
        why += (
            f", at most {PASSES} (Muennighoff et al. 2023)"
            if budget.steps > LEAST_STEPS
            else f" in {LEAST_STEPS} steps"
        )
    rate = "learning rate and batch: Bi et al. 2024, by the compute, within what models of this size take"
    _add_training(draft, budget, where, why, rate, text)
    told = [
        f"a model of {short(parameters)} parameters, {short(budget.tokens)} tokens in {budget.steps:,} steps"
    ]
    if text.tokens is not None and TOKENS_PER_PARAMETER * parameters > PASSES * text.tokens:
        told.append(
            f"the text is short for it: {TOKENS_PER_PARAMETER} tokens a parameter would be "
            f"{short(TOKENS_PER_PARAMETER * parameters)}; more text, or a smaller shape, would serve better"
        )
    return draft, told


def _continued(
    held: Holdings, where: Place, wanted: str, given: Mapping[str, str]
) -> tuple[Draft, list[str]]:
    """Return the draft of a training that goes on from a model or a run, and what to know of it."""
    model = held.model
    assert model is not None  # `_wanted` has asked for it
    record = Path(model.source) / "run.json"
    of_run = load(record.parent) if record.is_file() else None
    text, own = held.text, {}
    if text is None and of_run is not None and not of_run.data.mixture:
        text, own = corpus_of(of_run.data.corpus, of_run.data), _read_as(of_run.data)
    if text is None:
        raise UserError(f"--want: {wanted} from {model.source} needs a text; give it as one more --have")
    words = "fine-tuned" if wanted == "finetune" else "trained further"
    head = [f"{model.source} ({model.told}), {words} on {text.source} ({text.told}).", *_usage(where)]
    draft = Draft(head, given)
    for key, value in keys_of_source(model.source, draft.given, "--have"):
        draft.add(key, value)
    draft.add(*_named_comment(draft))
    size = _budget_given(draft)
    if text.kind == "chats":
        may_adapt = wanted == "finetune" and "lora" not in draft.given  # where it is none
        return draft, add_tuning(draft, text.source, own, where, may_adapt, size)
    shape = draft.spec.model
    seq_len = min(shape.max_seq_len, of_run.data.seq_len if of_run is not None else 2048)
    _add_data(draft, text.source, seq_len)
    draft.add_table("data", own, {}, "as the run has read it")
    passes, seq_len = 3 if wanted == "finetune" else 1, draft.spec.data.seq_len
    budget = continued(shape.parameters, text.tokens, seq_len, where.devices, passes, size)
    times = None if not text.tokens else f"{budget.tokens / text.tokens:.3g}"
    why = "as long as you want" if times is None else f"{times} pass{'es' * (times != '1')} over the text"
    rate = "well below that of training from nothing, for weights that are trained"
    _add_training(draft, budget, where, why, rate, text)
    told = [f"{short(shape.parameters)} parameters, {short(budget.tokens)} tokens in {budget.steps:,} steps"]
    return draft, told


def _read_as(data: DataSpec) -> dict[str, str]:
    """Return the keys by which a run reads its corpus, those that are not as usual."""
    names = ("text_key", "special_tokens", "format", "chat_template")
    own = {name: getattr(data, name) for name in names if getattr(data, name) != getattr(AS_THEY_ARE, name)}
    return own | {f"columns.{key}": name for key, name in data.columns.items()}


def _named_comment(draft: Draft) -> tuple[str, str, str]:
    """Return the key that names the weights, its text, and what follows from it."""
    key = "model.weights" if "model.weights" in draft.keys else "model.hf"
    return key, draft.keys[key][0], "its weights, shape and tokenizer"


def _usage(where: Place) -> list[str]:
    return [f"For {where.told}. All keys: meshwright train --help all."]


def _add_data(draft: Draft, corpus: str, seq_len: int) -> None:
    draft.add("data.corpus", corpus)
    draft.add("data.seq_len", seq_len, "tokens of a sample; longer ones take more memory")


def _add_training(draft: Draft, budget: Budget, where: Place, why: str, rate: str, text: Holding) -> None:
    if "train.steps" not in draft.given:
        draft.add("train.tokens", budget.tokens, why)
    draft.add("train.batch_tokens", budget.batch_tokens, "tokens of a step, over all devices")
    draft.add("train.lr", budget.lr, rate)
    if text.is_one_document:
        draft.head.append("The text is one document, so that none is held out to validate with.")
    else:
        draft.add("train.eval_every", max(1, budget.steps // 10), "steps between losses of held-out text")
    draft.add(
        "precision.compute",
        where.cluster.device.default_format,
        "number format of products; master weights stay fp32",
    )
    draft.add("checkpoint.every", "auto", "steps between saves, by what one costs; resume: --resume auto")


def _lay_out(draft: Draft, where: Place, told: list[str]) -> None:
    """Plan the layout of the draft where it is not planned at the start, and add its keys."""
    if not where.planned:
        return
    fixed = [pair for pair in draft.given.items() if pair[0].startswith("layout.") or pair[0] == POLICY]
    keys = [(key, text) for key, (text, _) in draft.keys.items() if (key, text) not in fixed]
    best = plan(from_tree({}, keys), where.cluster, gpus=where.devices, top=1, overrides=fixed).best
    usual = RunSpec.model_validate({"model": {"preset": "tiny"}}).to_json()
    words = (
        f"{describe(best.spec)}: {seconds(best.step_seconds)} a step and {gigabytes(best.memory.device)} of "
        f"{gigabytes(where.cluster.device.memory)} a device predicted for {where.told}"
    )
    for table in ("layout", "recompute"):
        values: dict[str, Any] = best.spec.to_json()[table]
        draft.add_table(table, values, usual[table], words if table == "layout" else "")
    told.append(f"layout {words}")
    whole = best.step_seconds * draft.spec.train.total_steps
    told.append(f"all steps take {_long(whole)} by the plan")


def _long(time: float) -> str:
    """Return a time in seconds, minutes, hours or days."""
    for size, unit in ((86400.0, "days"), (3600.0, "hours"), (60.0, "minutes")):
        if time >= 2 * size:
            return f"{time / size:.3g} {unit}"
    return seconds(time)
