"""A trained model in any format that is read: recognised by its files, opened as a model and its weights."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import ValidationError

from meshwright.exchange.foreign import deepspeed, litgpt, megatron, peft
from meshwright.exchange.foreign.caller import IMPORT, Caller
from meshwright.exchange.foreign.dcp import METADATA, DcpStore
from meshwright.exchange.foreign.naming import NamedWeights, Naming, model_part
from meshwright.exchange.foreign.torchtitan import TORCHTITAN
from meshwright.exchange.hf import HfWeights
from meshwright.exchange.hf_files import BIN, BIN_INDEX, INDEX, WEIGHTS, by_causal_names, model_files
from meshwright.exchange.hf_state_dict import lists_further
from meshwright.exchange.stored_weights import StoredWeights
from meshwright.exchange.tensor_store import TensorStore
from meshwright.exchange.torch_files import TorchFiles
from meshwright.spec import ModelSpec, UserError
from meshwright.spec.hf.config_read import model_fields
from meshwright.spec.hf.families import FAMILIES
from meshwright.spec.hf.json_object import Config, read_json_object
from meshwright.spec.hf.special_tokens import TOKENIZER, check_within
from meshwright.spec.lora_source import CONFIG
from meshwright.spec.records import sentence
from meshwright.spec.weights import hf_model

NAMINGS = (megatron.MEGATRON, TORCHTITAN, litgpt.LITGPT)
"""Names of programs other than HF's."""
HF_FOLDER = "an HF folder"
"""The `kind` of a `Source` that is one."""
_CONFIG = "config.json"
_TORCH_SUFFIXES = (".bin", ".pt", ".pth")


class Source(NamedTuple):
    """A model, its weights by the decoder's names, and the folder that has its tokenizer."""

    model: ModelSpec
    weights: StoredWeights
    folder: Path
    kind: str
    """Words for the format of the weights, such as "an HF folder"."""
    config: Path
    """The file that describes the model."""


@dataclass(frozen=True)
class Format:
    """A format of checkpoints: how it is recognised, opened, and where it has a config of its own."""

    name: str
    find: Callable[[Path], Path | None]
    """A user's path -> the directory or file with the tensors; None if it is in another format."""
    open: Callable[[Path, str], TensorStore]
    """(that directory or file, key that errors start with) -> its tensors."""


def open_source(
    path: Path, caller: Caller = IMPORT, config: Path | None = None, base: Path | None = None
) -> Source:
    """Return the model and the weights of a folder or file in any format that is read.

    `config` is a folder with the config.json of the model, where the format has none, and `base` the base
    model of an adapter. Errors start with the key of `caller`. Raises `UserError` for a path that holds none
    of the formats, whose model is not described, or whose tensors are not those of the model, for files that
    are damaged, and for pickles that name something to run: no code of any file is run.
    """
    if (path / CONFIG).is_file() and not _has_model(path):
        return _adapted(path, caller, base)
    if base is not None:
        raise UserError(f"{caller.base}: {path} is not an adapter of PEFT; leave {caller.base} out")
    if config is not None and not (config / _CONFIG).is_file():
        raise UserError(f"{caller.config}: {config} has no {_CONFIG}; give a folder that has the model's")
    home, key = config or path, caller.key
    if _has_model(path) and (home / _CONFIG).is_file():
        check_within(home / _CONFIG, home, key)
        model = hf_model(home, key)
        files = model_files(path, model)
        model = _with_further(model, home, files)
        return Source(model, HfWeights(home, model, files, path), home, HF_FOLDER, home / _CONFIG)
    for form in FORMATS:
        if (place := form.find(path)) is not None:
            return _opened(form, place, caller, config)
    if (named := path / deepspeed.NEWEST).is_file():
        raise UserError(
            f"{key}: {named} names no folder of a checkpoint of DeepSpeed in {path}; give a whole copy"
        )
    if (path / _CONFIG).is_file():  # says what else the folder lacks
        model = hf_model(path, key)
        return Source(model, HfWeights(path, model), path, HF_FOLDER, path / _CONFIG)
    raise _unknown(path, caller)


def _opened(form: Format, place: Path, caller: Caller, config: Path | None) -> Source:
    """Return the model of a checkpoint's tensors, by the names that they have."""
    key = caller.key
    store = form.open(place, key)
    beside = place if place.is_dir() else place.parent
    near = next((each for each in (beside, beside.parent) if (each / _CONFIG).is_file()), None)
    folder = config or near
    naming, named = _naming(store)
    kind = f"a checkpoint in the format {form.name} with the names of {_program(naming)}"
    if folder is not None:
        check_within(folder / _CONFIG, folder, key)
        model, file = hf_model(folder, key), folder / _CONFIG
    else:
        (model, file), folder = _own_model(naming, beside, caller), beside
    if naming is None:
        part = _hf_part(store, model)
        model = _with_further(model, folder, part)
        return Source(model, HfWeights(folder, model, part, place), folder, kind, file)
    view = store if naming is megatron.MEGATRON else named
    weights = NamedWeights(f"{key}: {place}", model, _view(naming, view, model, place, key), naming)
    return Source(model, weights, folder, kind, file)


def _program(naming: Naming | None) -> str:
    return "HF" if naming is None else naming.program


def _with_further(model: ModelSpec, folder: Path, store: TensorStore) -> ModelSpec:
    """Return the model with the layer that predicts further tokens, if its config.json has one, and a store
    that need not be beside that."""
    if not lists_further(model, by_causal_names(store, model).headers):
        return model
    path = folder / _CONFIG
    fields = model_fields(Config(str(path), read_json_object(path, "model.hf")))
    return model.model_copy(update={"mtp_num_layers": fields.get("mtp_num_layers", 0)})


def _view(naming: Naming, store: TensorStore, model: ModelSpec, place: Path, key: str) -> TensorStore:
    """Return a store's tensors as the pieces of a naming expect them."""
    if naming is litgpt.LITGPT:
        return litgpt.LitgptStore(store, model)
    if naming is not megatron.MEGATRON:
        return store
    if not isinstance(store, DcpStore):
        raise UserError(
            f"{key}: {place} is a checkpoint of Megatron-Core that is not in the format torch_dist; save it "
            "again with --ckpt-format torch_dist"
        )
    return megatron.MegatronStore(store, model)


def _naming(store: TensorStore) -> tuple[Naming | None, TensorStore]:
    """Return whose names a store's tensors have, None for HF's, and the tensors of the model."""
    for naming in NAMINGS:
        if (part := model_part(store, naming.mark, naming.roots)) is not None:
            return naming, part
    return None, store


def _own_model(naming: Naming | None, folder: Path, caller: Caller) -> tuple[ModelSpec, Path]:
    """Return the model that a file of the format describes, and the file. Raises `UserError` without one."""
    if naming is megatron.MEGATRON:
        file, found = folder / megatron.COMMON, megatron.hf_config(folder, caller)
    elif naming is litgpt.LITGPT and (folder / litgpt.CONFIG).is_file():
        file = folder / litgpt.CONFIG
        found = litgpt.hf_config(file, caller)
    else:
        raise UserError(
            f"{caller.key}: {folder} has no {_CONFIG}, and its tensors, which have the names of "
            f"{_program(naming)}, do not say how they are computed with; {caller.needs_config}"
        )
    return _model(file, found, caller.key), file


def _model(file: Path, config: dict[str, Any], key: str) -> ModelSpec:
    try:
        return ModelSpec.model_validate({"preset": None, **model_fields(Config(str(file), config, key))})
    except ValidationError as error:
        raise UserError(f"{key}: {file}: {sentence(error, ModelSpec)}") from None


def _hf_part(store: TensorStore, model: ModelSpec) -> TensorStore:
    """Return the tensors of a model with HF's names, without what an optimiser has."""
    names = FAMILIES[model.family].names
    whole = model_part(store, names.embedding_weight, (f"{names.model}.", "lm_head."))
    return whole or model_part(store, names.embedding_weight.partition(".")[2], ("",)) or store


def _adapted(path: Path, caller: Caller, base: Path | None) -> Source:
    key = caller.key
    config = peft.adapter_config(path, key)
    named = config.get("base_model_name_or_path")
    if base is None:
        if not isinstance(named, str) or not Path(named).is_dir():
            raise UserError(
                f"{key}: {path} is an adapter of {named!r}, which names no folder here; give {caller.base} "
                "FOLDER, that model's"
            )
        base = Path(named)
    if "quantization_config" in read_json_object(base / _CONFIG, key):
        raise UserError(f"{key}: {base} is quantised; give the base model in bf16 as {caller.base}")
    check_within(base / _CONFIG, base, key)
    model = hf_model(base, key)
    store = peft.AdapterStore(path, by_causal_names(model_files(base, model), model), caller)
    weights = HfWeights(base, model, store, path)
    home = path if (path / TOKENIZER).is_file() else base
    return Source(model, weights, home, f"an adapter of PEFT on {base}", base / _CONFIG)


def _has_model(path: Path) -> bool:
    return any((path / name).is_file() for name in (WEIGHTS, INDEX, BIN, BIN_INDEX))


def _dcp(path: Path) -> Path | None:
    """Return the directory of `path` that is torch's: itself, or the newest step in it."""
    if (path / METADATA).is_file():
        return path
    newest = path / megatron.NEWEST
    if newest.is_file():
        text = newest.read_text(encoding="utf-8", errors="replace").strip()
        step = path / (f"iter_{int(text):07d}" if text.isdecimal() else "release")
        return step if (step / METADATA).is_file() else None
    steps = {int(each.name.rpartition("-")[2]): each for each in path.glob("step-*")
             if re.fullmatch(r"step-\d+", each.name) and (each / METADATA).is_file()}  # fmt: skip
    return steps[max(steps)] if steps else None


def _tagged(path: Path, newest: str) -> Path:
    """Return the directory that DeepSpeed's file `newest` names in `path`, or `path` itself."""
    file = path / newest
    tag = file.read_text(encoding="utf-8", errors="replace").strip() if file.is_file() else ""
    inner = path / tag
    return inner if tag and Path(tag).name == tag and inner.is_dir() else path


def _zero(path: Path) -> Path | None:
    place = _tagged(path, deepspeed.NEWEST)
    return place if next(place.glob("*_model_states.pt"), None) else None


def _universal(path: Path) -> Path | None:
    place = _tagged(path, deepspeed.NEWEST_UNIVERSAL)
    return place if (place / "zero").is_dir() else None


def _torch_file(path: Path) -> Path | None:
    place = path / litgpt.WEIGHTS if path.is_dir() else path
    return place if place.is_file() and place.suffix in _TORCH_SUFFIXES else None


FORMATS = (
    Format("torch DCP", _dcp, DcpStore),
    Format("DeepSpeed universal", _universal, deepspeed.UniversalStore),
    Format("DeepSpeed ZeRO", _zero, deepspeed.open_zero),
    Format("torch.save", _torch_file, lambda file, key: TorchFiles([file], key)),
)
"""Formats besides HF folders and adapters, in the order in which they are looked for."""


def _unknown(path: Path, caller: Caller) -> UserError:
    key = caller.key
    if not path.exists():
        return UserError(f"{key}: {path} is not there; give the folder or file of a model")
    if _has_model(path):
        return UserError(f"{key}: {path} has no {_CONFIG}; {caller.needs_config}")
    if next(path.glob("*.distcp"), None):
        return UserError(f"{key}: {path} has no {METADATA}, so its save did not end; give an earlier step")
    if next(path.glob("**/mp_rank_*/model_optim_rng.pt"), None):
        return UserError(
            f"{key}: {path} is of Megatron's format torch; save it again with --ckpt-format torch_dist"
        )
    return UserError(
        f"{key}: {path} holds no model in a format that is read: an HF folder (config.json and safetensors "
        "or pytorch_model.bin), a directory of torch.distributed.checkpoint, torchtitan, Megatron-Core or "
        "DeepSpeed, litgpt's lit_model.pth, or an adapter of PEFT; give one of these"
    )
