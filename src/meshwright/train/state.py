"""State of a run in a checkpoint, and the check that a checkpoint belongs to the run."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated, Any, NotRequired

from pydantic import Strict
from typing_extensions import TypedDict

from meshwright.checkpoint.errors import BadCheckpointError
from meshwright.parallel.flat_param import Stored
from meshwright.parallel.outer_quorum import QuorumOuter
from meshwright.parallel.precision import LossScale
from meshwright.spec import RunSpec, UserError
from meshwright.spec.differences import as_in_file, differences
from meshwright.spec.outer import OuterSpec
from meshwright.spec.precision import PrecisionSpec
from meshwright.spec.records import Natural, Number, Positive, read
from meshwright.spec.train import TrainSpec
from meshwright.spec.weights import TRAINING
from meshwright.train.clipping import ZClipState
from meshwright.train.guard import GuardState
from meshwright.train.step import Trainer
from meshwright.train.stored_answers import TeacherState

FREE = {
    "model": {"preset", "hf", "weights", "family"},
    "train": {
        "steps", "tokens", "stop_at", "log_every", "eval_every", "eval_tokens", "compile", "trackers",
        "offload", "offload_dir", "offload_activations", "ema",
    },
    "precision": {"loss_scale", "loss_scale_window", "fp8_gather", "qat", "qat_group"},
}  # fmt: skip
"""Keys that may differ between a checkpoint and the run that resumes from it."""


def tensors(trainer: Trainer) -> dict[str, Stored]:
    """Every tensor that a resume needs, by name, sharing the run's memory."""
    found = {f"model/{name}": tensor for name, tensor in trainer.states.parameters()}
    found.update({f"model/{name}": tensor for name, tensor in trainer.balance.biases().items()})
    found.update({f"optim/{name}": tensor for name, tensor in trainer.optimiser.tensors()})
    found.update({f"ema/{name}": tensor for name, tensor in trainer.ema.tensors()} if trainer.ema else {})
    found |= dict(trainer.stale.tensors()) if trainer.stale else {}
    if trainer.outer is None:
        return found
    trainer.outer.updates.to_local().fill_(trainer.optimiser.updates)
    found |= {"updates": trainer.outer.updates, **dict(trainer.outer.own_tensors())}
    own = {f"{island(trainer)}{name}": tensor for name, tensor in found.items()}
    return {**own, **dict(trainer.outer.tensors())}


def form(trainer: Trainer) -> str:
    """A name for the set of `tensors` that there are now: it changes with exchanges and late gradients under
    way, alike on all ranks."""
    exchanges = [] if trainer.outer is None else trainer.outer.state()
    late = 0 if trainer.stale is None else len(trainer.stale.state())
    return f"fragments {[fragment for fragment, _ in exchanges]}, gradients {late}"


def island(trainer: Trainer) -> str:
    """Prefix of the names of what this rank's island has by itself: `island.0/`; empty without islands."""
    return "" if trainer.outer is None else f"island.{trainer.run_mesh.replicate.rank}/"


def tensors_in(trainer: Trainer, state: dict[str, Any]) -> dict[str, Stored]:
    """The `tensors` that a checkpoint of this state has, by the names that they have there.

    One whose run kept no moving average has none. One of weights that no run of ours has trained yet, which
    has no digest of data, has no states of an optimiser: those of a new trainer are zeros already. Island k
    takes what island k mod n of n had; where there were none, what all ranks had; and where there are none
    now, all ranks take the run's model and what the first island had. Late gradients are dropped unless they
    are as late now.
    """
    saved, there = islands_in(state), ""
    if trainer.outer is not None:
        trainer.outer.expect(state["exchanges"] if _same_outer(trainer, state) else [])
    if trainer.stale is not None:
        late = state["spec"].get("outer", {}).get("staleness", 0) == trainer.stale.steps
        trainer.stale.expect(state.get("late_factors", []) if late else [])
    found = tensors(trainer)
    if trainer.outer is not None:
        own = island(trainer)
        there = f"island.{trainer.run_mesh.replicate.rank % saved}/" if saved else ""
        found = {
            name.replace(own, there, 1) if name.startswith(own) else name: tensor
            for name, tensor in found.items()
            if saved or (name.startswith(own) and name != f"{own}updates")
        }
    elif saved:
        found = {f"island.0/{n}" if n.startswith("optim/") else n: tensor for n, tensor in found.items()}
    without = [] if has_average(state) else ["ema/"]
    without += ["optim/"] if state["data_digest"] is None else []
    without += [] if _has_errors(trainer, state) else [f"{there}outer/error/"]
    return {name: tensor for name, tensor in found.items() if not name.startswith(tuple(without))}


def islands_in(state: dict[str, Any]) -> int:
    """Islands whose states a checkpoint of this state has; 0 where its run had none."""
    outer, layout = state["spec"].get("outer", {}), state["spec"]["layout"]
    if not outer.get("every"):
        return 0
    return int(layout["replicate"]) if outer.get("island") is None else 1


def _has_errors(trainer: Trainer, state: dict[str, Any]) -> bool:
    """True if a checkpoint of this state has what messages left out, and no messages that are sent anew."""
    if not islands_in(state) or (state["exchanges"] and not _same_outer(trainer, state)):
        return False
    return OuterSpec.model_validate(state["spec"]["outer"]).kept_error > 0


def _same_outer(trainer: Trainer, state: dict[str, Any]) -> bool:
    """True if a checkpoint of this state has been exchanged as this run exchanges."""
    return islands_in(state) > 0 and state["spec"]["outer"] == trainer.run_spec.outer.model_dump(mode="json")


def has_average(state: dict[str, Any]) -> bool:
    """True if a checkpoint of this state has a moving average of the weights."""
    return state["spec"]["train"].get("ema") is not None


class _Parts(TypedDict):
    """Tables of a spec that another run is told by."""

    model: dict[str, Any]
    train: dict[str, Any]
    precision: dict[str, Any]


class _Scale(TypedDict):
    """State of a `LossScale`."""

    value: Positive
    good_steps: Natural


class _State(TypedDict):
    """Fields of `metadata` that a resume reads; there may be more."""

    step: Natural
    loss: Number | None
    spec: _Parts
    samples_sha256: Annotated[str, Strict()]
    data_digest: Annotated[str, Strict()] | None
    updates: Natural
    loss_scale: _Scale
    amax_history: NotRequired[list[list[list[Number]]]]
    zclip: NotRequired[ZClipState]
    exchanges: NotRequired[list[list[Natural]]]
    teacher: NotRequired[TeacherState]
    merged: NotRequired[Natural]
    late_factors: NotRequired[list[Positive]]
    guard: NotRequired[GuardState | None]


def flaw(state: dict[str, Any]) -> str | None:
    """A field of a state, as JSON, that no resume would take, with its value and the reason; else None."""
    try:
        read(_State, state)
    except UserError as error:
        return str(error)
    return None


def check_fields(state: dict[str, Any], where: Path) -> None:
    """Raise BadCheckpointError unless the state of a checkpoint in the folder `where` has its fields.

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
        **({"amax_history": trainer.scaling.state()} if trainer.scaling else {}),
        **({"zclip": trainer.clipping.zclip.state()} if trainer.clipping.zclip else {}),
        **({"exchanges": trainer.outer.state()} if trainer.outer else {}),
        **({"teacher": dict(trainer.teacher.identity)} if trainer.teacher else {}),
        **({"merged": trainer.outer.merged} if isinstance(trainer.outer, QuorumOuter) else {}),
        **({"late_factors": trainer.stale.state()} if trainer.stale else {}),
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
    if trainer.outer is not None and islands_in(state):
        updates = int(trainer.outer.updates.to_local())
    trainer.optimiser.resume(updates)
    trainer.loss_scale.restore(state["loss_scale"])
    if trainer.scaling is not None:
        trainer.scaling.restore(state.get("amax_history", []))
    if trainer.clipping.zclip is not None and "zclip" in state:  # an imported model has none
        trainer.clipping.zclip.restore(state["zclip"])
    if trainer.ema is not None and not has_average(state):
        trainer.ema.begin()
    if trainer.outer is not None and not islands_in(state):
        trainer.outer.begin()
    if isinstance(trainer.outer, QuorumOuter):
        trainer.outer.merged = int(state.get("merged", 0))
    for unit in trainer.states.units:
        unit.expire()


def check_same_run(
    spec: RunSpec, state: dict[str, Any], data_digest: str, where: str, data_remark: str = ""
) -> None:
    """Refuse a checkpoint of another model, optimiser, precision or data; any layout is welcome.

    `data_remark` ends the sentence about other data.
    """
    imported = state["data_digest"] is None
    if differ := _changed(spec, state, ("model",) if imported else ("model", "train", "precision")):
        raise UserError(
            f"{where} is of another run: {'; '.join(differ)}; give the same values, or another --out"
        )
    if not imported and state["data_digest"] != data_digest:
        raise UserError(
            f"{where} was trained on other data (digest {state['data_digest'][:12]}, now {data_digest[:12]}):"
            f" give the corpus, tokenizer, data.seq_len, data.pack, data.document_mask and data.val_fraction"
            f" that it had, or another --out{data_remark}"
        )


def check_same_teacher(trainer: Trainer, state: dict[str, Any], where: str) -> None:
    """Refuse a checkpoint that learned from another teacher, or by another loss from this one.

    Distillation may begin and end at any checkpoint. A teacher may be asked or have answered before, on any
    layout.
    """
    before, how = state["spec"].get("distil"), trainer.spec.distil
    if before is None or how is None or trainer.teacher is None:
        return
    was, now = state["teacher"], trainer.teacher.identity
    if was["sha256"] != now["sha256"]:
        raise UserError(
            f"{where} learned from a teacher's checkpoint of step {was['step']} (SHA-256 "
            f"{was['sha256'][:12]}), and distil.{'teacher' if how.teacher else 'logits'} is now of step "
            f"{now['step']} ({now['sha256'][:12]}); give that teacher, of which meshwright average TEACHER "
            f"--steps {was['step']} makes a run of its own, or another --out"
        )
    after = how.model_dump(mode="json")
    for key in ("loss", "weight", "temperature", "top_k", "hidden"):
        if before[key] != after[key]:
            raise UserError(
                f"{where} is of another run: distil.{key} was {as_in_file(before[key])} and is "
                f"{as_in_file(after[key])}; give the same value, or another --out"
            )


def check_same_model(spec: RunSpec, state: dict[str, Any], where: str) -> None:
    """Refuse a checkpoint whose model is not the one that the run's record describes."""
    if differ := _changed(spec, state, ("model",)):
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
        before = {**(usual[part].model_dump(mode="json") if part in usual else {}), **state["spec"][part]}
        for key, (was, is_now) in differences(before, now[part]).items():
            if key not in free:
                found.append(f"{part}.{key} was {as_in_file(was)} and is {as_in_file(is_now)}")
    return found
