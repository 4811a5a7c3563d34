"""Adapters that a run goes on from: where `lora.weights` says they are, and the keys of `[lora]` they set.

They are in a folder of PEFT, with an adapter_config.json, or in a run with `[lora]`, or one of its
checkpoints.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from meshwright.spec.architecture import RANDOM
from meshwright.spec.differences import as_in_file
from meshwright.spec.errors import UserError
from meshwright.spec.files import MAX_JSON, parse_json, read_text, user_path
from meshwright.spec.hf.json_object import read_json_object
from meshwright.spec.hf.safetensors_header import tensor_names
from meshwright.spec.lora import LoraSpec, adapted
from meshwright.spec.lora_targets import decoder_targets
from meshwright.spec.model import ModelSpec
from meshwright.spec.records import show
from meshwright.spec.weights import WeightSource, weight_source

KEY = "lora.weights"
CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."
"""Beginning of the names of all tensors of a file of PEFT."""
OF_A_RUN = ("dropout", "quantise", "weights")
"""Keys of `[lora]` that say how a run trains, and not what its adapters are."""
_OF_PEFT = {"rank": "r", "alpha": "lora_alpha", "rslora": "use_rslora", "dora": "use_dora"}
_A = ".lora_A.weight"
_LINEAR = "all-linear"


def adapter_source(weights: str, key: str = KEY) -> WeightSource | None:
    """Return where the adapters that `lora.weights` names are; None for random ones.

    Raises `UserError`, which starts with `key`, for what holds no adapters.
    """
    if weights == RANDOM:
        return None
    path = user_path(weights, key)
    if (path / CONFIG).is_file():
        return WeightSource(path, False, is_foreign=True)
    if not path.exists():
        raise UserError(f"{key}: {path} is not there; give a folder of PEFT, or a run with [lora]")
    if (path / "run.json").is_file() or (path / "manifest.json").is_file():
        source = weight_source(weights, key)
        if source is not None and source.is_run:
            return source
    raise UserError(
        f"{key}: {path} holds no adapters, as it has neither an {CONFIG} nor a run.json; give a folder of "
        f"PEFT, or a run with [lora]"
    )


def initial_adapters(model: ModelSpec, lora: LoraSpec | None) -> WeightSource | None:
    """Return where the adapters are that a run of `model` goes on from; None for random ones.

    Raises `UserError` for what holds none, for a model of random weights, and for a key of `[lora]` that
    contradicts them.
    """
    if lora is None or (source := adapter_source(lora.weights)) is None:
        return None
    if model.weights == RANDOM:
        raise UserError(
            f"{KEY}: the adapters in {source.folder} are of a trained model, and this run's is random; give "
            f"the model that they were trained on, as --from FOLDER"
        )
    check_adapters(source, model, lora)
    return source


def adapter_fields(source: WeightSource, key: str = KEY) -> dict[str, Any]:
    """Return the keys of `[lora]` that adapters set, as JSON. Raises `UserError`, which starts with `key`."""
    if source.is_run:
        found = _record(source.folder, key).get("lora")
        if not isinstance(found, dict):
            raise UserError(
                f"{key}: {source.folder} is a run without [lora], which has no adapters; for its weights "
                f"give --from {source.folder}"
            )
        return {name: value for name, value in found.items() if name not in OF_A_RUN}
    return _fields_of_peft(source.folder, key)


def check_adapters(source: WeightSource, model: ModelSpec, lora: LoraSpec) -> None:
    """Raise `UserError` for a key of `[lora]` that contradicts the adapters which `source` holds."""
    names = {} if source.is_run else _OF_PEFT
    where = source.folder / ("run.json" if source.is_run else CONFIG)
    theirs, ours = adapter_fields(source), lora.model_dump(mode="json")
    listed = [str(target) for target in theirs.pop("targets", ())]
    for key, its in theirs.items():
        if key in ours and ours[key] != its:
            raise UserError(
                f"lora.{key}: {as_in_file(ours[key])} contradicts {where}, whose {names.get(key, key)} is "
                f"{as_in_file(its)}; leave lora.{key} out, or leave out lora.weights for new adapters"
            )
    its = lora.model_copy(update={"targets": decoder_targets(model, listed)})
    one, other = ([each.name for each in adapted(model, which)] for which in (lora, its))
    for name in (name for name in dict.fromkeys([*one, *other]) if (name in one) != (name in other)):
        raise UserError(
            f"lora.targets: {as_in_file(list(lora.targets))} contradicts {source.folder}, which has "
            f"{'no' if name in one else 'an'} adapter of {name}; leave lora.targets out, or leave out "
            f"lora.weights for new adapters"
        )


def base_of(source: WeightSource, key: str = KEY) -> str | None:
    """Return the name of the model that adapters were trained on, as their folder has it; else None."""
    if source.is_run:
        model = _record(source.folder, key).get("model")
        named = model.get("weights") if isinstance(model, dict) else None
        return None if named == RANDOM else named
    named = read_json_object(source.folder / CONFIG, key).get("base_model_name_or_path")
    return named if isinstance(named, str) and named else None


def _record(folder: Path, key: str) -> dict[str, Any]:
    path = folder / "run.json"
    try:
        spec = parse_json(read_text(path, MAX_JSON)).get("spec")
    except (OSError, ValueError, AttributeError) as error:
        raise UserError(f"{key}: {path} cannot be read ({error}); give another run") from None
    return spec if isinstance(spec, dict) else {}


def _fields_of_peft(folder: Path, key: str) -> dict[str, Any]:
    config = read_json_object(folder / CONFIG, key)
    if config.get("peft_type") != "LORA":
        raise UserError(
            f"{key}: {folder / CONFIG} has peft_type {config.get('peft_type')!r}, and adapters of LORA are "
            f"trained on; give such a folder"
        )
    return {
        "rank": _number(config, "r", folder, key),
        "alpha": float(_number(config, "lora_alpha", folder, key)),
        "rslora": config.get("use_rslora") is True,
        "dora": config.get("use_dora") is True,
        "targets": _targets(config, folder, key),
    }


def _number(config: dict[str, Any], name: str, folder: Path, key: str) -> Any:
    value = config.get(name, 8)
    if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
        raise UserError(
            f"{key}: {folder / CONFIG} has {name} {show(value)}, where a number above 0 belongs; give one"
        )
    return value


def _targets(config: dict[str, Any], folder: Path, key: str) -> list[str]:
    """The modules that have adapters: those of the file's tensors, or without such a file of the config."""
    file, modules = folder / WEIGHTS, config.get("target_modules")
    experts = [str(name) for name in config.get("target_parameters") or ()]
    if file.is_file():
        of_experts = tuple(name.rpartition(".")[0] for name in experts)
        stems = (name.removeprefix(PREFIX) for name in tensor_names(file, key) if name.endswith(_A))
        modules = [stem.removesuffix(_A) for stem in stems]
        modules = [
            each for each in modules if not each.removesuffix(".base_layer").endswith(of_experts or "\0")
        ]
    elif isinstance(modules, str):
        if modules != _LINEAR:
            raise UserError(
                f"{key}: {folder} has no {WEIGHTS}, whose tensors say which modules have adapters; save "
                f"it in that format"
            )
        modules = [_LINEAR]
    return [*map(str, modules or ()), *experts]
