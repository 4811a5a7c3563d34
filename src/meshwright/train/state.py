"""State of a run in a checkpoint, and the check that a checkpoint belongs to the run."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, NotRequired

from pydantic import Field, Strict
from typing_extensions import TypedDict

from meshwright.checkpoint.disk import FROZEN
from meshwright.checkpoint.errors import BadCheckpointError
from meshwright.parallel.flat_param import Stored
from meshwright.parallel.precision import LossScale
from meshwright.parallel.quantised_weights import put_values
from meshwright.spec import RunSpec, UserError
from meshwright.spec.differences import as_in_file, differences
from meshwright.spec.lora import LoraSpec
from meshwright.spec.precision import PrecisionSpec
from meshwright.spec.records import Natural, Number, Positive, read
from meshwright.spec.train import TrainSpec
from meshwright.spec.weights import TRAINING
from meshwright.train.guard.guard import GuardState
from meshwright.train.parts import KINDS
from meshwright.train.step import Trainer

FREE = {
    "model": {"preset", "hf", "weights", "family"},
    "train": {
        "steps", "tokens", "stop_at", "log_every", "eval_every", "eval_tokens", "compile", "cuda_graphs",
        "trackers", "offload", "offload_dir", "offload_activations", "ema", "numa_binding",
    },
    "precision": {"loss_scale", "loss_scale_window", "fp8_gather", "qat", "qat_group"},
    "lora": {"weights"},
}  # fmt: skip
"""Keys that may differ between a checkpoint and the run that resumes from it."""


def tensors(trainer: Trainer) -> dict[str, Stored]:
    """Every tensor that changes and that a resume needs, by name, sharing the run's memory."""
    found = {f"model/{name}": tensor for name, tensor in trainer.states.trained_parameters()}
    found.update({f"optim/{name}": tensor for name, tensor in trainer.optimiser.tensors()})
    for part in trainer.parts:
        found.update(part.tensors())
    for part in trainer.parts:
        found = part.named(found, trainer.optimiser.updates)
    return found


def frozen_tensors(trainer: Trainer) -> dict[str, Stored]:
    """Every parameter that is not trained, by the name that it has in a checkpoint, in the run's memory; what
    is quantised as copies, which `put_frozen` stores."""
    return {f"model/{name}": tensor for name, tensor in trainer.states.frozen_parameters()}


def put_frozen(trainer: Trainer, frozen: Mapping[str, Stored]) -> None:
    """Store what was loaded into `frozen_tensors`."""
    put_values(trainer.states.units, {name.removeprefix("model/"): tensor for name, tensor in frozen.items()})


def form(trainer: Trainer) -> str:
    """A name for the set of `tensors` that there are now, equal on all ranks.

    It changes with exchanges and late gradients under way.
    """
    return str([part.form() for part in trainer.parts])


def tensors_in(trainer: Trainer, state: dict[str, Any]) -> dict[str, Stored]:
    """The `tensors` that a checkpoint of this state has, by the names that they have there.

    One of weights that no run of ours has trained yet, which has no digest of data, has no states of an
    optimiser: those of a new trainer are zeros already.
    """
    for part in trainer.parts:
        part.expect(state)
    missing = [name for part in trainer.parts for name in part.missing(state)]
    missing += ["optim/"] if state["data_digest"] is None else []
    found = tensors(trainer)
    for part in trainer.parts:
        found = part.names_in(state, found)
    return {name: tensor for name, tensor in found.items() if not name.startswith(tuple(missing))}


class _Parts(TypedDict):
    """Tables of a spec that another run is told by."""

    model: dict[str, Any]
    train: dict[str, Any]
    precision: dict[str, Any]


class _Scale(TypedDict):
    """State of a `LossScale`."""

    value: Positive
    good_steps: Natural


class _ResumeFields(TypedDict):
    """Fields of `metadata` that a resume reads, beside those of the parts of a step; there may be more."""

    step: Natural
    loss: Number | None
    spec: _Parts
    samples_sha256: Annotated[str, Strict()]
    data_digest: Annotated[str, Strict()] | None
    updates: Natural
    loss_scale: _Scale
    guard: NotRequired[GuardState | None]
    frozen: NotRequired[Annotated[str, Field(pattern=f"^{FROZEN}[0-9a-f]{{16}}$")]]


def flaw(state: dict[str, Any]) -> str | None:
    """A field of a state, as JSON, that no resume would take, with its value and the reason; else None."""
    try:
        for fields in (_ResumeFields, *(kind.Fields for kind in KINDS)):
            read(fields, state)
    except UserError as error:
        return str(error)
    return None


def check_fields(state: dict[str, Any], where: Path | str) -> None:
    """Raise BadCheckpointError unless the state of a checkpoint in the folder or URL `where` has its fields.

    A hash says that a state is as it was written, not who wrote it.
    """
    if (wrong := flaw(state)) is not None:
        raise BadCheckpointError(f"the state of a checkpoint in {where} cannot be trusted: {wrong}")


def metadata(
    trainer: Trainer, step: int, loss: float, samples: str, data_digest: str, tokenizer: str | None
) -> dict[str, Any]:
    """The rest of the state, as JSON; `loss` is the last step's, `tokenizer` the SHA-256 of the run's."""
    return {
        "step": step,
        "loss": loss if math.isfinite(loss) else None,
        "spec": trainer.run_spec.to_json(),
        "layout": trainer.run_spec.layout.describe(),
        "samples_sha256": samples,
        "data_digest": data_digest,
        "tokenizer_sha256": tokenizer,
        "updates": trainer.optimiser.updates,
        "loss_scale": trainer.loss_scale.state(),
        **dict(field for part in trainer.parts for field in part.state().items()),
    }


def imported_state(spec: RunSpec, tokenizer: str | None) -> dict[str, Any]:
    """The state of weights that no run of ours has trained yet: step 0, any data, any optimiser.

    `tokenizer` is the SHA-256 of the one that came with them.
    """
    return {
        "step": 0,
        "loss": None,
        "spec": spec.to_json(),
        "layout": "imported",
        "samples_sha256": "",
        "data_digest": None,
        "tokenizer_sha256": tokenizer,
        "updates": 0,
        "loss_scale": LossScale(spec.precision).state(),
    }


def restore(trainer: Trainer, state: dict[str, Any]) -> None:
    """Set what is not a tensor from `metadata`, after the tensors were loaded in place."""
    updates = int(state["updates"])
    for part in trainer.parts:
        updates = part.updates_in(state, updates)
    trainer.optimiser.resume(updates)
    trainer.loss_scale.restore(state["loss_scale"])
    for part in trainer.parts:
        part.restore(state)
    for unit in trainer.states.units:
        unit.expire()


def check_same_run(
    spec: RunSpec, state: dict[str, Any], data_digest: str, where: str, data_remark: str = ""
) -> None:
    """Refuse a checkpoint of another model, optimiser, precision or data; any layout is welcome.

    `data_remark` ends the sentence about other data.
    """
    imported = state["data_digest"] is None
    if imported and spec.lora is not None:
        raise UserError(
            f"{where} holds a whole model and no adapters of [lora]; begin them in another --out, "
            f"with --from and the folder of this run"
        )
    if differ := _changed(spec, state, ("model",) if imported else ("model", "train", "precision", "lora")):
        remedy = "give the same values, or another --out"
        if any(each.startswith("train.frozen") for each in differ):
            remedy += " with model.weights, which may freeze others"
        raise UserError(f"{where} is of another run: {'; '.join(differ)}; {remedy}")
    if not imported and state["data_digest"] != data_digest:
        raise UserError(
            f"{where} was trained on other data (digest {state['data_digest'][:12]}, now {data_digest[:12]}):"
            f" give the corpus, tokenizer, data.seq_len, data.pack, data.document_mask and data.val_fraction"
            f" that it had, or another --out{data_remark}"
        )


def check_same_model(spec: RunSpec, state: dict[str, Any], where: str) -> None:
    """Refuse a checkpoint whose model is not the one that the run's record describes."""
    if differ := _changed(spec, state, ("model", "lora")):
        raise UserError(
            f"{where}: its record was changed after the checkpoint of step {state['step']} was saved: "
            f"{'; '.join(differ)}; put run.json back"
        )


def _changed(spec: RunSpec, state: dict[str, Any], parts: tuple[str, ...]) -> list[str]:
    """Keys of these parts that a checkpoint has with another value, each as a clause."""
    now, found = spec.to_json(), []
    usual = {"train": TrainSpec(), "precision": PrecisionSpec()}  # for keys that came after the checkpoint
    for part in parts:
        free = FREE[part] | (TRAINING if state["data_digest"] is None else set())
        held = state["spec"].get(part) or {}  # a record may be older than [lora]
        if part == "lora" and held:
            held = LoraSpec().model_dump(mode="json") | held
        before = {**(usual[part].model_dump(mode="json") if part in usual else {}), **held}
        for key, (was, is_now) in differences(before, now[part] or {}).items():
            if key not in free:
                found.append(f"{part}.{key} was {as_in_file(was)} and is {as_in_file(is_now)}")
    return found
