"""Checkpoints of an engine, in a run's folder that the verbs take: of any layout into any other."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from meshwright.api.folders import make_folder
from meshwright.checkpoint.disk import step_name
from meshwright.checkpoint.store import CheckpointStore
from meshwright.comm.mesh import Mesh
from meshwright.data.kept_tokenizer import keep_tokenizer
from meshwright.runs.record import RUN, write_atomically
from meshwright.spec import UserError
from meshwright.spec.load import load
from meshwright.train import state
from meshwright.train.step import Trainer

NO_DATA = ""
"""The digest of the data of an engine, which the caller has."""


def save_checkpoint(trainer: Trainer, mesh: Mesh, step: int, out: Path) -> Path:
    """Publish a checkpoint of `step` in the run's folder `out`, with its record, and return its folder.

    Collective. Raises `UserError` where the folder cannot be written, or has the record of another model.
    """
    spec = trainer.run_spec

    def prepare() -> None:
        if mesh.control.rank > 0:
            return
        if (out / "config.json").exists() and not (out / RUN).exists():
            raise UserError(f"save: {out} is the folder of an HF model; give a run's folder, or a new one")
        make_folder(out)
        if not (out / "tokenizer.json").exists():
            keep_tokenizer(spec, None, out)
        write_atomically(out / RUN, json.dumps({"spec": spec.to_json()}))

    folder = spec.checkpoint.folder(out)
    mesh.control.together(prepare)
    checkpoint = spec.checkpoint
    store = CheckpointStore(
        folder, checkpoint.keep, mesh.control, keep_every=checkpoint.keep_every, wire=mesh.wire
    )
    try:
        store.save_frozen(state.frozen_tensors(trainer))
        kept = state.metadata(trainer, step, float("nan"), NO_DATA, NO_DATA, None)
        store.save(step, state.tensors(trainer), kept | store.frozen.fields())
    finally:
        store.close()
    return folder / step_name(step)


def load_checkpoint(trainer: Trainer, mesh: Mesh, run: Path, step: int | None) -> int:
    """Fill a trainer from a checkpoint of the run's folder `run`, by default the newest; return its step.

    Collective. Raises `UserError` for a checkpoint of another model, optimiser or precision.
    """
    record = mesh.control.together(lambda: load(run))
    folder = record.checkpoint.folder(run)
    if not folder.is_dir():
        raise UserError(f"{run}: has no checkpoint ({folder} is not there); give the folder of a run")
    store = CheckpointStore(folder, 1, mesh.control, wire=mesh.wire)
    frozen, tensors = state.frozen_tensors(trainer), state.tensors(trainer)

    def check(kept: dict[str, Any]) -> None:
        where = f"the checkpoint of step {kept['step']} in {folder}"
        state.check_fields(kept, folder)
        state.check_same_run(trainer.run_spec, kept, kept["data_digest"] or NO_DATA, where)
        for part in trainer.parts:
            part.check(kept, where)
        there = state.tensors_in(trainer, kept)
        tensors.clear()
        tensors.update({**there, **frozen})

    kept = store.load(step, tensors, check, converted=frozen)
    state.put_frozen(trainer, frozen)
    state.restore(trainer, kept)
    return int(kept["step"])
