"""Short training runs on the pool of ranks: their spec, their start, and what they leave."""

from __future__ import annotations

import json
import math
import shutil
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch

import small
from meshwright.checkpoint.directory import published
from meshwright.checkpoint.store import CheckpointStore
from meshwright.comm.mesh import Mesh
from meshwright.spec import RunSpec
from meshwright.train import state
from meshwright.train.callbacks import Observers
from meshwright.train.open_run import open_run
from meshwright.train.step import Trainer
from meshwright.weights.initial_weights import open_weights
from ranks import Ranks

VOCABULARY = 300
STEPS, HALF = 10, 5
EXPERTS: dict[str, object] = {
    "model__moe__experts": 8, "model__moe__top_k": 2, "model__moe__ffn": 12, "model__moe__router": "sigmoid",
    "model__moe__bias": "true", "model__moe__bias_rate": 0.01, "model__moe__shared_ffn": 8,
    "model__moe__dense_first": 1, "model__layers": 3,
}  # fmt: skip


def spec_of(corpus: Path, **flags: object) -> RunSpec:
    base = {
        "model.vocab_size": VOCABULARY,
        "data.corpus": corpus,
        "data.tokenizer": "byte",
        "data.seq_len": 16,
        "data.val_fraction": 0.1,
        "data.cache": corpus.parent / "tokens",
        "train.batch_tokens": 8 * 16,
        "train.steps": STEPS,
        "train.eval_tokens": 512,
        "train.lr": 1e-2,
    }
    return small.spec_of(base, **flags)


class Notes:
    """An observer that keeps what it is told."""

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []
        self.events: list[tuple[str, dict[str, Any]]] = []

    def on_start(self, info: dict[str, Any]) -> None:
        self.events.append(("start", info))

    def on_step(self, row: dict[str, Any]) -> None:
        self.rows.append(row)

    def on_eval(self, row: dict[str, Any]) -> None:
        self.events.append(("eval", row))

    def on_event(self, kind: str, fields: dict[str, Any]) -> None:
        self.events.append((kind, fields))

    def on_end(self, result: dict[str, Any]) -> None:
        self.events.append(("end", result))

    def close(self) -> None:
        pass


def run_it(mesh: Mesh, spec: RunSpec, out: Path, resume: str | None) -> tuple[dict[str, Any], dict[str, Any]]:
    """The result, and the parameters as float lists by name."""
    run = open_run(spec, mesh, out, Observers([]), weights=lambda: open_weights(spec))
    result = run.execute(resume)
    tensors = {name: tensor.full_tensor().clone() for name, tensor in run.trainer.states.parameters()}
    return result, tensors


def start(ranks: Ranks, spec: RunSpec, out: Path, resume: str | None = None) -> tuple[dict[str, Any], Any]:
    return ranks.run(spec.layout, run_it, spec, out, resume)[0]


def go_on(ranks: Ranks, spec: RunSpec, out: Path, step: int = HALF) -> tuple[dict[str, Any], Any]:
    """Like `start`, from the checkpoint of a step of a run that has ended; the one of its end is removed."""
    checkpoints = published(out / "checkpoints")
    shutil.rmtree(checkpoints[max(checkpoints)])
    return start(ranks, spec, out, str(step))


class TrainedOnce:
    """Runs that tests go on from: each spec is trained once, and its folder copied for each test."""

    def __init__(self, ranks: Ranks, folder: Path) -> None:
        self._ranks, self._folder = ranks, folder
        self._known: dict[str, tuple[Path, tuple[dict[str, Any], Any]]] = {}

    def __call__(self, spec: RunSpec, out: Path | None = None) -> tuple[dict[str, Any], Any]:
        """The result of the run and the parameters of the first rank; `out` becomes a copy of its folder."""
        key = json.dumps(spec.to_json())
        if key not in self._known:
            folder = self._folder / str(len(self._known))
            self._known[key] = folder, start(self._ranks, spec, folder)
        folder, trained = self._known[key]
        if out is not None:
            shutil.copytree(folder, out, symlinks=True)
        return trained


def run_and_watch(
    mesh: Mesh, spec: RunSpec, out: Path, resume: str | None = None
) -> tuple[list[Any], list[Any]]:
    notes = Notes()
    open_run(spec, mesh, out, Observers([notes])).execute(resume)
    return notes.rows, notes.events


def poisoned(mesh: Mesh, spec: RunSpec, out: Path, bad_steps: range) -> tuple[list[Any], list[Any], bool]:
    """Make this one rank's gradient NaN in some steps; whether the parameters stayed finite comes last."""
    run = open_run(spec, mesh, out, Observers([notes := Notes()]))
    states = run.trainer.states
    reduction = states._reduction
    honest = reduction._sum_over_tensor

    def spoil() -> None:
        if run.done in bad_steps and mesh.rank == mesh.world.size - 1:
            unit = states.units[1]
            assert unit.gradient is not None
            unit.gradient[:1] = math.nan
            reduction._norms.append(unit.gradient.double().norm().view(1))
        honest()

    reduction._sum_over_tensor = spoil  # type: ignore[method-assign]
    run.execute(None)
    finite = all(bool(tensor.full_tensor().isfinite().all()) for _, tensor in run.trainer.states.parameters())
    return notes.rows, notes.events, finite


def trained(mesh: Mesh, spec: RunSpec, out: Path) -> dict[str, torch.Tensor]:
    """Every parameter and moment of the run's last step, whole."""
    run = open_run(spec, mesh, out, Observers([]))
    run.execute(None)
    return {name: tensor.full_tensor() for name, tensor in state.tensors(run.trainer).items()}


def loaded(mesh: Mesh, spec: RunSpec, out: Path) -> dict[str, str]:
    """Digests of the same, loaded under another layout."""
    trainer = Trainer(spec, mesh)
    tensors = state.tensors(trainer)
    CheckpointStore(out / "checkpoints", 1, mesh.background).load(None, tensors)
    return digests({name: tensor.full_tensor() for name, tensor in tensors.items()})


def digests(tensors: dict[str, torch.Tensor]) -> dict[str, str]:
    """Digests of tensors' type, shape and bytes: as good as the tensor for equality, and quick to send."""
    return {
        name: f"{tensor.dtype} {tuple(tensor.shape)} {sha256(tensor.numpy().tobytes()).hexdigest()}"
        for name, tensor in tensors.items()
    }


def recorded(out: Path, spec: RunSpec) -> None:
    """Write the record of a run, as far as readers of its checkpoints need it."""
    (out / "run.json").write_text(json.dumps({"spec": spec.to_json()}))
