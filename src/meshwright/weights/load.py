"""A trained decoder out of a run's folder, and a run's folder out of a trained decoder."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from meshwright import atomic
from meshwright.checkpoint.errors import SaveError
from meshwright.checkpoint.store import CheckpointStore
from meshwright.checkpoint.weights import WeightPart, fill, whole
from meshwright.comm.control import Control
from meshwright.data.tokenizer import file_sha256
from meshwright.exchange.foreign.caller import IMPORT
from meshwright.exchange.foreign.source import open_source
from meshwright.exchange.stored_weights import StoredWeights, tensor_shapes
from meshwright.model.decoder import Decoder
from meshwright.parallel.flat_param import Stored, UnpaddedDTensor
from meshwright.spec import ModelSpec, RunSpec, UserError
from meshwright.spec.architecture import RANDOM
from meshwright.spec.hf.special_tokens import keep_side_files, side_files
from meshwright.spec.hf.text_tokens import open_published
from meshwright.spec.load import load
from meshwright.spec.parameter_groups import frozen_names
from meshwright.spec.sections import DataSpec
from meshwright.train.state import imported_state
from meshwright.weights.adapters import adapter_shapes, merge_adapters, parts_of_rows
from meshwright.weights.checks import average_names, check_finite, check_state
from meshwright.weights.saved_weights import SavedWeights

DTYPE_KEY = "imported_dtype"
"""Key of run.json: the number format of the folder that a run was imported from."""


def load_run(
    run: Path, dtype: torch.dtype | None = None, average: bool = False, step: int | None = None
) -> Decoder:
    """Return the decoder of a run's checkpoint, by default the newest whole one, on one device, in eval mode.

    `dtype` is that of its parameters, by default as saved. `average` takes the moving average of the weights
    (`train.ema`) in their place, in the format of its own. Raises `UserError` as `load_tensors` does.
    """
    spec = load(run)
    decoder = Decoder(spec.model)
    if spec.precision.base == "fp64":
        decoder = decoder.double()
    elif spec.precision.master == "bf16" and not average:
        decoder = decoder.bfloat16()
    parameters = {name: parameter.data for name, parameter in decoder.named_parameters()}
    load_tensors(run, spec, parameters, decoder.balance_biases(), average, Control(), step)
    return decoder.to(dtype=dtype).eval() if dtype is not None else decoder.eval()


def load_tensors(
    run: Path,
    spec: RunSpec,
    parameters: Mapping[str, Tensor | Stored],
    biases: Mapping[str, Tensor | Stored],
    average: bool,
    ranks: Control,
    step: int | None = None,
) -> dict[str, Any]:
    """Fill parameters and routers' biases by name from a checkpoint, of any layout, and return its state.

    It is that of `step`, by default the newest whole one. All ranks call this, each with what it holds.
    Adapters are merged into the weights beside them.
    Raises `UserError` as `check_state` does, where there is no such step, and if a parameter is not finite.
    """
    folder = spec.checkpoint.folder(run)
    if not folder.is_dir():
        raise UserError(f"{run}: has no checkpoint yet ({folder} is not there); train it first")

    def check(state: dict[str, Any]) -> None:
        check_state(run, spec, state, average)

    names = average_names(spec) if average else {}
    tensors = {names.get(name, f"model/{name}"): tensor for name, tensor in parameters.items()}
    tensors |= {f"model/{name}": tensor for name, tensor in biases.items()}
    wide = torch.float64 if spec.precision.base == "fp64" else torch.float32
    adapters = {name: torch.empty(shape, dtype=wide) for name, shape in adapter_shapes(spec).items()}
    tensors |= {names.get(name, f"model/{name}"): tensor for name, tensor in adapters.items()}
    converted = {f"model/{name}" for name in frozen_names(spec)}
    store = CheckpointStore(folder, keep=1, control=ranks)
    with torch.no_grad():
        state = store.load(step, tensors, check, converted)
        merge_adapters(spec, parameters, adapters)
    apart = parts_of_rows(spec, parameters)

    def fill_parts_of_rows() -> None:
        if apart:
            fill(apart, SavedWeights(run, int(state["step"]), average))

    ranks.together(fill_parts_of_rows)
    for warning in store.warnings:
        warnings.warn(warning, stacklevel=2)

    def check_values() -> None:
        for name, tensor in {**parameters, **biases}.items():
            if isinstance(tensor, UnpaddedDTensor):
                tensor = tensor.padded
            check_finite(run, state, name, tensor.to_local() if isinstance(tensor, DTensor) else tensor)

    ranks.together(check_values)
    return state


def import_run(folder: Path, out: Path, config: Path | None = None, base: Path | None = None) -> None:
    """Make the run's folder `out` with a checkpoint of step 0 from another program's: its weights alone.

    `config` is a folder with the model's config.json where `folder` has none, `base` an adapter's base model.

    Where all weights are in float64 they stay so, and are those of a run in that precision; others become
    float32. Memory holds one tensor of the files, and what of it is converted at a time. The
    tokenizer's files and generation_config.json come along. Quantised weights become what they stand for.
    Raises `UserError`, also for a folder whose recipe rounds inputs of layers, too, when `out` holds a run
    or cannot be written, and for a file that is a link out of the folder.
    """
    check_new(out)
    model, weights, home, *_ = open_source(folder, IMPORT, config, base)
    beside = side_files(home, "import")
    check_trainable(weights, folder, "import")
    parts = weights.parts({name: [whole(shape)] for name, shape in tensor_shapes(model).items()})
    length = DataSpec().seq_len
    if model.position == "learned":
        length = min(length, model.max_seq_len)
    origin = {"imported": str(folder)}
    if (form := weights.dtype) is not None:
        origin[DTYPE_KEY] = str(form).removeprefix("torch.")
    write_run(out, model, parts, {"seq_len": length}, beside, home, origin, weights.all_exact)
    if (tokenizer := home / "tokenizer.json") in beside:
        for remark in open_published(tokenizer, "import").remarks:
            warnings.warn(remark, stacklevel=2)


def check_trainable(weights: StoredWeights, folder: Path, key: str) -> None:
    """Raise `UserError`, which starts with `key`, for quantised weights whose layers round their inputs."""
    if weights.rounded_inputs():
        raise UserError(
            f"{key}: {folder} is quantised by a recipe that rounds the inputs of layers, too, which a run "
            f"does not; give the folder that it was made of"
        )


def check_new(out: Path) -> None:
    """Raise `UserError` unless the folder that `--out` names is new or empty."""
    if (out / "run.json").exists():
        raise UserError(f"--out: {out} already holds a run; give another --out")
    if out.exists() and not (out.is_dir() and not any(out.iterdir())):
        raise UserError(f"--out: {out} exists and is not an empty folder; give another --out")


def _in_checkpoint(part: WeightPart) -> WeightPart:
    return part._replace(name=f"model/{part.name}")


def write_run(
    out: Path,
    model: ModelSpec,
    parts: Iterable[WeightPart],
    data: Mapping[str, Any],
    beside: Sequence[Path],
    folder: Path,
    origin: Mapping[str, Any],
    exact: bool,
) -> None:
    """Write a run's folder with one checkpoint, of step 0, that holds weights and nothing else.

    `parts` are those of the parameters and routers' biases, one of which is in memory at a time. They become
    float32, or float64 if `exact`, of a run that computes in that precision; routers' biases are float32 in
    any run. `data` are keys of the run's `data`, besides its tokenizer; `beside` are files
    of `folder` to copy, and `origin` is noted in run.json. The folder appears by one rename. Raises
    `UserError` if `out` cannot be written.
    """
    given, tokenizer = folder / "tokenizer.json", None
    if given in beside:
        data, tokenizer = {**data, "tokenizer": str((out / given.name).resolve())}, file_sha256(given)
    tree = {
        "model": {**model.model_dump(mode="json"), "hf": None, "weights": RANDOM},
        "data": dict(data),
        "train": {"batch_tokens": 16 * int(data["seq_len"])},
        **({"precision": {"compute": "fp64"}} if exact else {}),
    }
    spec = RunSpec.model_validate(tree)
    try:
        with atomic.folder(out) as unfinished:
            keep_side_files(beside, folder, unfinished, "import")
            store = CheckpointStore(spec.checkpoint.folder(unfinished), keep=1)
            wide = torch.float64 if exact else torch.float32
            forms = {
                f"model/{name}": (torch.float32 if name.endswith(".router.bias") else wide, shape)
                for name, shape in tensor_shapes(model).items()
            }
            store.save_parts(0, forms, map(_in_checkpoint, parts), imported_state(spec, tokenizer))
            store.close()
            record = json.dumps({"spec": spec.to_json(), **origin})
            (unfinished / "run.json").write_text(record, encoding="utf-8")
    except (OSError, SaveError) as error:
        cause = error if isinstance(error, OSError) else error.__cause__
        reason = getattr(cause, "strerror", None) or cause or error
        raise UserError(f"--out: {out} cannot be written ({reason}); give another --out") from error
