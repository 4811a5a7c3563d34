"""A batch that is bad each time that it is computed costs one step, and leaves no trace in any state."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

import small
from covering import each_choice, marked
from injected import arm
from meshwright.chaos.faults import Fault, FaultPlan
from meshwright.chaos.inject import Injection
from meshwright.checkpoint.inspect import verify_checkpoint
from meshwright.comm.mesh import Mesh
from meshwright.data.loader import Batch
from meshwright.infer.soft_target_source import soft_targets_of
from meshwright.islands.outer import NoIslands
from meshwright.parallel.stale_gradients import StaleGradients
from meshwright.parallel.step_part import StepEnd
from meshwright.rank.env import Supervision, Worker
from meshwright.spec import RunSpec, UserError
from meshwright.train import state
from meshwright.train.callbacks import Observers
from meshwright.train.guard import guard
from meshwright.train.loop import TrainingRun
from meshwright.train.open_run import open_run
from meshwright.train.step_result import StepResult
from ranks import Ranks

KINDS = ("nan-batch", "inf-batch")
STEPS, BAD = 8, 3
"""Steps of a run, and those before the one whose batch is bad."""
BASE = {
    "model.vocab_size": 320, "model.ffn": 64, "data.corpus": "synthetic", "data.tokenizer": "byte",
    "data.seq_len": 16, "train.batch_tokens": 8 * 16, "train.steps": STEPS, "train.lr": 1e-2,
    "train.eval_tokens": 256, "train.eval_every": BAD + 1, "layout.dp": 2,
}  # fmt: skip
PARTS: dict[str, dict[str, object]] = {
    "averages": {
        "train__ema": 0.9, "train__zclip": 2.5, "train__zclip_warmup": 2, "train__clip_parameter": 0.1,
    },
    "experts": {
        "model__moe__experts": 4, "model__moe__top_k": 2, "model__moe__ffn": 16, "model__moe__bias": "true",
        "model__moe__bias_rate": 0.01, "model__moe__aux_loss": 0.01, "model__moe__router": "sigmoid",
        "layout__ep": 2,
    },
    "late": {
        "model__moe__experts": 4, "model__moe__top_k": 2, "model__moe__ffn": 16, "model__moe__bias": "true",
        "model__moe__bias_rate": 0.01, "model__moe__router": "sigmoid", "outer__staleness": 2,
        "layout__zero": 1, "recovery__on_spike": "stop", "recovery__spike_window": 3, "checkpoint__every": 2,
        "train__ema": 0.9,
    },
    "islands": {"layout__replicate": 2, "layout__dp": 1, "outer__every": 2, "outer__fragments": 2},
    "teacher": {"distil__top_k": 8, "distil__weight": 0.6},
    "sharded": {
        "layout__zero": 3, "layout__micro_batch": 2, "recompute__policy": "full", "precision__master": "bf16",
    },
}  # fmt: skip
FACTORS: dict[str, tuple[str, ...]] = {
    "recipe": ("fp8", "nvfp4", "fp16", "bf16", "fp8-rowwise"),
    "part": tuple(PARTS),
    "optimiser": ("adamw", "adamw8bit", "muon", "sgd"),
}


def spec_of(case: Mapping[str, object], teacher: object = "teacher") -> RunSpec:
    flags = {"precision__compute": case["recipe"], "train__optimiser": case["optimiser"]}
    flags |= PARTS[str(case["part"])]
    if case["part"] == "teacher":
        flags["distil__teacher"] = teacher
    return small.spec_of(BASE, **flags)


def legal(case: Mapping[str, object]) -> bool:
    """True if the rules accept a case; a teacher's folder is looked at later."""
    try:
        spec_of(case)
    except UserError:
        return False
    return True


CASES = [
    case
    for values in itertools.product(*FACTORS.values())
    if legal(case := dict(zip(FACTORS, values, strict=True)))
]


def states_of(run: TrainingRun) -> dict[str, Any]:
    """Everything that a checkpoint of this run would have on this rank, but for the loss of its last step."""
    tensors = {name: tensor.full_tensor().clone() for name, tensor in state.tensors(run.trainer).items()}
    kept = run._metadata("") | {"loss": None, "zclip": None}
    if (zclip := run.trainer.clipping.zclip) is not None:
        kept["zclip"] = zclip.state()
    return {"tensors": tensors, "kept": json.loads(json.dumps(kept))}


def finished(mesh: Mesh, spec: RunSpec, out: Path, change: Any, resume: str | None = None) -> dict[str, Any]:
    """The states of a run to which something is done before it begins, and the steps that it skipped."""
    run = open_run(
        spec,
        mesh,
        out,
        Observers([]),
        soft_targets=lambda corpus: soft_targets_of(spec, mesh, corpus, out),
    )
    with change(run, mesh):
        result = run.execute(resume)
    return states_of(run) | {"skipped": result["skipped_steps"]}


@contextmanager
def nothing(_run: TrainingRun, _mesh: Mesh) -> Iterator[None]:
    yield


@contextmanager
def spoiled(kind: str, run: TrainingRun, mesh: Mesh) -> Iterator[None]:
    """Spoil a batch of the last rank by the program that `chaos` does it with."""
    last = mesh.world.size - 1
    with FaultPlan([Fault(kind, last, "data", step=BAD, number=7)]) as plan:
        arm(plan)
        Injection(
            Supervision(0, 0.0, -1, (), **plan.given),
            Worker(mesh.world.rank, last + 1, mesh.world.rank, last + 1),
        ).attach(run)
        yield
        assert bool(plan.hits[0].acted) == (mesh.world.rank == last)


@contextmanager
def left_out(run: TrainingRun, mesh: Mesh) -> Iterator[None]:
    """Do not compute the step of the bad batch at all, on any rank or on the last island: only its number and
    the loss scale change."""
    trainer, step = run.trainer, run.trainer.step
    elsewhere = run.spec.step_groups > 1 and mesh.replicate.rank < mesh.replicate.size - 1

    def stepped(batch: Batch, number: int, *more: Any) -> StepResult:
        if number != BAD + 1 or elsewhere:
            return step(batch, number, *more)
        scale = trainer.loss_scale.value
        trainer.loss_scale.update(False)
        trainer.part(NoIslands).after_step(StepEnd(number, False, False, False, 0))
        return StepResult(math.nan, math.nan, 0.0, False, False, 0, 0, scale)

    with patch.object(trainer, "step", stepped), patch.object(guard, "locate", lambda *_: None):
        yield


@contextmanager
def left_out_late(run: TrainingRun, _mesh: Mesh) -> Iterator[None]:
    """Do not apply the gradient of the bad batch when it is due, nor learn anything from its loss."""
    trainer, stale = run.trainer, run.trainer.part(StaleGradients)
    exchange, sums, number = stale.exchange, trainer.sums, 0

    def exchanged(factor: float) -> float | None:
        nonlocal number
        number += 1
        due = exchange(factor)
        if number == BAD + 1 + stale.steps:
            bad = [flat.fill_(math.nan) for flat in trainer.states.take_gradients()]
            trainer.states.put_gradients(bad)
        return due

    def summed(loss: torch.Tensor, *more: Any) -> Any:
        return sums(loss * math.nan if number == BAD else loss, *more)

    with patch.object(stale, "exchange", exchanged), patch.object(trainer, "sums", summed):
        yield


@pytest.fixture(scope="module")
def teacher(ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a trained run, with its record."""
    out = tmp_path_factory.mktemp("teacher")
    spec = small.spec_of(BASE, train__steps=2, train__stop_at=2)
    ranks.run(spec.layout, finished, spec, out, nothing)
    (out / "run.json").write_text(json.dumps({"spec": spec.to_json()}))
    return out


@pytest.mark.parametrize("case", marked(CASES, each_choice(CASES)))
def test_a_bad_batch_costs_its_step_and_leaves_no_trace(
    ranks: Ranks, tmp_path: Path, request: pytest.FixtureRequest, case: dict[str, str]
) -> None:
    kind = KINDS[CASES.index(case) % 2]
    folder = request.getfixturevalue("teacher") if case["part"] == "teacher" else None
    spec = spec_of(case, folder)
    twin = left_out_late if spec.outer.staleness else left_out
    faulted = ranks.run(spec.layout, finished, spec, tmp_path / "faulted", partial(spoiled, kind))
    wanted = ranks.run(spec.layout, finished, spec, tmp_path / "twin", twin)
    for found, expected in zip(faulted, wanted, strict=True):
        assert found["kept"] == expected["kept"]
        assert found["tensors"].keys() == expected["tensors"].keys()
        for name, tensor in expected["tensors"].items():
            assert torch.equal(found["tensors"][name], tensor), name
        assert found["skipped"] == expected["skipped"] >= (0 if spec.outer.every else 1)
    assert not verify_checkpoint(tmp_path / "faulted" / "checkpoints", STEPS, state.check_fields).problems
    again = ranks.run(spec.layout, finished, spec, tmp_path / "faulted", nothing, "auto")
    assert again[0]["kept"] == faulted[0]["kept"]
