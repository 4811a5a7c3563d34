"""The weights that a run starts from: whether they fit it, and one line that says where they are from."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from meshwright.exchange.hub import hub_id
from meshwright.spec import ModelSpec, RunSpec, UserError
from meshwright.spec.architecture import RANDOM
from meshwright.spec.files import user_path
from meshwright.spec.hf.chat_template_files import chat_template_files
from meshwright.spec.hf.config_read import has_weights
from meshwright.spec.hf.safetensors_header import check_whole_files
from meshwright.spec.hf.special_tokens import TOKENIZER
from meshwright.spec.load import load
from meshwright.spec.lora_source import adapter_source, base_of, initial_adapters
from meshwright.spec.weights import (
    FIRST_STEP,
    WeightSource,
    check_fits,
    hf_model,
    own_tokenizer,
    weight_source,
)
from meshwright.units import short


def check_weights(spec: RunSpec) -> None:
    """Raise `UserError` for weights that are not there, and for a model that contradicts them.

    Of files of weights only the headers are read.
    """
    source = weight_source(spec.model.weights)
    initial_adapters(spec.model, spec.lora)
    if source is None:
        return
    if not source.is_foreign:  # to read those takes torch, so the first rank checks them
        check_fits(spec.model, _model_of(source), source)
    if source.is_hf:
        check_whole_files(source.folder, "model.weights")
    if spec.data.tokenizer == "bpe" and any(map(_is_text, spec.data.mixture or [spec.data.corpus])):
        own = own_tokenizer(spec.model.weights) or "the tokenizer.json that they were trained with"
        raise UserError(
            f"data.tokenizer: 'bpe' trains a new tokenizer, in which an id is another token than the weights "
            f"in {source.folder} know; give {own}"
        )


def check_resumed_weights(spec: RunSpec, out: Path) -> None:
    """Raise `UserError` if a run that goes on in `out` is given other weights than it started from.

    They would not be read, and the record would name them.
    """
    from meshwright.runs.record import RUN, read_object

    earlier = (read_object(out / RUN) or {}).get("spec")
    earlier = earlier if isinstance(earlier, dict) else {}
    _check_resumed_adapters(spec, earlier.get("lora"), out)
    model = earlier.get("model")
    if not isinstance(model, dict) or "weights" not in model:  # a run from before there was the key
        return
    before, now = str(model["weights"]), spec.model.weights
    kept = out / FIRST_STEP  # what was imported into this folder: its record tells of no other weights
    if before == now or (now != RANDOM and _same_path(now, str(kept) if before == RANDOM else before)):
        return
    raise UserError(
        f"model.weights: {now} is not read by --resume, which goes on with the weights of {out} (that run "
        f"started from {before}); leave the key out, or give another --out without --resume to start from "
        f"{now}"
    )


def _check_resumed_adapters(spec: RunSpec, earlier: Any, out: Path) -> None:
    before = earlier.get("weights", RANDOM) if isinstance(earlier, dict) else RANDOM
    now = RANDOM if spec.lora is None else spec.lora.weights
    if now not in (before, RANDOM):
        raise UserError(
            f"lora.weights: {now} is not read by --resume, which goes on with the adapters of {out}; leave "
            f"the key out, or give another --out without --resume to start from {now}"
        )


def _same_path(one: str, other: str) -> bool:
    return user_path(one, "model.weights").resolve() == user_path(other, "model.weights").resolve()


def _is_text(corpus: str) -> bool:
    """Return True for a corpus that the run's tokenizer is to read."""
    from meshwright.data.manifest import shards_of

    return corpus != "synthetic" and shards_of(corpus) is None


def initial_weights_told(spec: RunSpec, run: Path | None = None) -> str | None:
    """Return in one line which weights a run starts from; None where nobody expects others than random ones.

    `run` is the folder of the earlier run whose settings it has. Raises `UserError` as `check_weights` does.
    """
    check_weights(spec)
    model, tokenizer = spec.model, spec.data.tokenizer
    if (source := weight_source(model.weights)) is not None:
        return "\n".join([_trained_told(spec, source), *_adapters_told(spec)])
    anew = "random, the tokenizer new" if tokenizer.startswith("bpe") else f"random, text by {tokenizer}"
    if model.hf is not None:
        lacks = "" if has_weights(model.hf) else ", which holds no weights"
        remedy = "give a folder that has them" if lacks else f"give model.weights = {model.hf}"
        return (
            f"weights: {anew}; of {model.hf}{lacks} this run takes the architecture alone; to start from "
            f"its weights and tokenizer {remedy}"
        )
    if run is not None:
        return (
            f"weights: {anew}; of {run} this run takes the settings alone; to start from its weights give "
            f"--model.weights {run}, to go on with it --resume auto without another --out"
        )
    return None


def _trained_told(spec: RunSpec, source: WeightSource) -> str:
    """Return in one line what a run takes of trained weights, and from where."""
    model, tokenizer = spec.model, spec.data.tokenizer
    own, (kind, theirs) = own_tokenizer(model.weights), _described(model, source)
    text = f"text by {tokenizer}"
    if own is not None and not (_is_copy(tokenizer, own) or _are_of_bytes(model.weights, tokenizer)):
        text += f", not by {own} of these weights, so a token may have another's id"
    template = _chat_template(tokenizer)
    return (
        f"weights: those of {model.weights} ({short(model.parameters)} parameters), the optimiser and "
        f"the step count start anew; {kind}, family {theirs.family}"
        f"{'' if template is None else f', chat template of {template}'}; {text}{_rows_told(model, theirs)}"
    )


def _adapters_told(spec: RunSpec) -> Iterator[str]:
    """Yield a line that says from which adapters a run goes on, if it does."""
    if (lora := spec.lora) is not None and lora.weights != RANDOM:
        kind = " with magnitudes (DoRA)" if lora.dora else ""
        yield f"adapters: those of {lora.weights}, rank {lora.rank}{kind}, for {', '.join(lora.targets)}"
        if (other := _other_base(spec.model.weights, lora.weights)) is not None:
            yield (
                f"adapters: trained on {other}, as their folder says, and this run's weights are those of "
                f"{spec.model.weights}; unless both are one model, give --from {other}"
            )


def _other_base(weights: str, adapters: str) -> str | None:
    """Return the model that adapters name as their base, if it is not the one that a run has; else None.

    Models of one name in two places count as one: folders are moved, and copied from the hub.
    """
    source = adapter_source(adapters)
    named = None if source is None else base_of(source)
    return named if named is not None and Path(named).name != Path(weights).name else None


def _described(model: ModelSpec, source: WeightSource) -> tuple[str, ModelSpec]:
    """Return in words what the weights are in, and the model that they are of."""
    if source.is_foreign:
        from meshwright.weights.initial_weights import opened

        found = opened(model, source)
        return f"{found.kind}, described by {found.config}", found.model
    if source.is_run:
        step = "newest checkpoint" if source.step is None else f"checkpoint of step {source.step}"
        return f"a run, its {step}", _model_of(source)
    name = hub_id(source.folder)
    kind = "an HF folder" if name is None else f"{name} of the hub, in its cache on this machine"
    return kind, _model_of(source)


def _chat_template(tokenizer: str) -> Path | None:
    """Return the file with the chat template beside the tokenizer that `data.tokenizer` names."""
    path = user_path(tokenizer, "data.tokenizer")
    file = path / TOKENIZER if path.is_dir() else path
    if not file.is_file():
        return None
    found = chat_template_files(file.parent, "data.tokenizer")
    return next((each.file for each in found.values()), None)


def _rows_told(model: ModelSpec, theirs: ModelSpec) -> str:
    """Return what is said of rows of the vocabulary that the weights do not have, or have too many of."""
    added = model.vocab_size - theirs.vocab_size
    matrices = "the embedding" if model.tied else "the embedding and the head"
    if added > 0:
        rows = f"{added} new row{'s' * (added > 1)}"
        each = "the mean" if added == 1 else "each the mean"
        return f"; {matrices} get {rows} for added tokens, {each} of the {theirs.vocab_size} others"
    return f"; the last {-added} rows of {matrices}, which are of no token, are left out" if added else ""


def _model_of(source: WeightSource) -> ModelSpec:
    return hf_model(source.folder, "model.weights") if source.is_hf else load(source.folder).model


def _are_of_bytes(weights: str, tokenizer: str) -> bool:
    """Return True if both the run of the weights and this one read text by bytes."""
    source = weight_source(weights)
    if tokenizer != "byte" or source is None or not source.is_run:
        return False
    return load(source.folder).data.tokenizer == "byte"


def _is_copy(tokenizer: str, own: Path) -> bool:
    """Return True if `data.tokenizer` names `own`, its folder, or a file with the same content."""
    path = user_path(tokenizer, "data.tokenizer")
    path = path / own.name if path.is_dir() else path
    return path.is_file() and (path.samefile(own) or path.read_bytes() == own.read_bytes())
