"""Steps that are not finite: the first module is named, the good state is saved, and no NaN is published."""

from __future__ import annotations

import math
import warnings
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from covering import some
from meshwright.checkpoint.directory import latest_step
from meshwright.comm.mesh import Mesh
from meshwright.data.loader import Batch
from meshwright.parallel.delayed_scaling import DelayedScaling
from meshwright.report.progress import summary
from meshwright.spec import RunSpec
from meshwright.spec.errors import NumericalError
from meshwright.train.callbacks import Observers
from meshwright.train.guard.guard import Guard
from meshwright.train.guard.nonfinite import bad_state
from meshwright.train.loop import TrainingRun
from meshwright.train.open_run import open_run
from meshwright.train.step import Trainer
from meshwright.train.step_result import StepResult
from ranks import Ranks
from small import first_batches
from training_runs import EXPERTS, Notes, spec_of, start

BAD_STEP = 2


class Fault:
    """Makes one element of a module's output, or of the gradient there, NaN: on one rank, from a step on.

    Steps that are computed again have it, too, unless it is `passing`.
    """

    def __init__(
        self, run: TrainingRun, module: str, backward: bool = False, steps: int = 1, passing: bool = False
    ) -> None:
        self.backward, self.passing, self.steps = backward, passing, steps
        self.step, self.again = 0, False
        self.batch: Batch | None = None
        self.compute = run.trainer.gradients
        run.trainer.gradients = self.gradients  # type: ignore[method-assign]
        run.trainer.decoder.get_submodule(module).register_forward_hook(self.spoil)

    def gradients(self, batch: Batch) -> torch.Tensor:
        self.again, self.batch = batch is self.batch, batch
        self.step += not self.again
        return self.compute(batch)

    @property
    def now(self) -> bool:
        return BAD_STEP <= self.step < BAD_STEP + self.steps and not (self.again and self.passing)

    def spoil(self, _module: torch.nn.Module, _inputs: Any, output: torch.Tensor) -> torch.Tensor:
        bad = torch.zeros_like(output)
        bad.view(-1)[-1:] = math.nan
        if not self.backward:
            return output + bad if self.now else output
        if output.requires_grad:
            output = output.clone()
            output.register_hook(lambda gradient: gradient + bad if self.now else gradient)
        return output


def faulty(
    mesh: Mesh, spec: RunSpec, out: Path, rank: int, fault: dict[str, Any]
) -> tuple[list[dict[str, Any]], str]:
    """Events about skipped steps, and the error that the run ended with."""
    notes, error = Notes(), ""
    with patch.object(torch, "compile", partial(torch.compile, backend="aot_eager")):
        run = open_run(spec, mesh, out, Observers([notes]))
        if mesh.rank == rank:
            Fault(run, **fault)
        try:
            run.execute(None)
        except NumericalError as raised:
            error = str(raised)
    return [fields for kind, fields in notes.events if kind == "skipped_step"], error


FORWARD, BACKWARD = "the output of ", "the gradient at the output of "
NAMED: dict[str, tuple[int, str, bool, str, dict[str, object]]] = {
    # rank, module, backward, what is named, flags
    "zero3": (1, "blocks.1.mlp", False, FORWARD, {"layout__dp": 2, "layout__zero": 3}),
    "zero2-fp16": (
        0, "blocks.0.attn", True, BACKWARD,
        {"layout__dp": 2, "layout__zero": 2, "precision__compute": "fp16", "precision__loss_scale": 64},
    ),
    "tp": (3, "blocks.0.attn", False, FORWARD, {"layout__tp": 2, "layout__dp": 2}),
    "tp-plain": (1, "blocks.1.attn", True, BACKWARD, {"layout__tp": 2, "layout__sequence_parallel": "false"}),
    "cp-full": (1, "blocks.1.attn", False, FORWARD, {"layout__cp": 2, "recompute__policy": "full"}),
    "pp": (2, "blocks.1.mlp_norm", False, FORWARD, {"layout__pp": 2, "layout__dp": 2}),
    "pp-zb": (
        0, "blocks.0.mlp", True, BACKWARD, {"layout__pp": 2, "layout__schedule": "zb-h1"},
    ),
    "ends": (0, "embed", False, FORWARD, {"layout__pp": 2, "model__tied": "true"}),
    "experts": (
        1, "blocks.1.mlp", False, FORWARD,
        EXPERTS | {"layout__dp": 2, "layout__ep": 2, "recompute__policy": "selective"},
    ),
    "compiled": (1, "blocks.1", False, FORWARD, {"layout__dp": 2, "train__compile": "true"}),
}  # fmt: skip


@pytest.mark.parametrize(
    "case", some(NAMED, ("zero3", "zero2-fp16", "tp-plain", "cp-full", "pp-zb", "experts"))
)
def test_the_first_module_that_is_not_finite_is_named(
    ranks: Ranks, corpus: Path, tmp_path: Path, case: str
) -> None:
    rank, module, backward, what, flags = NAMED[case]
    spec = spec_of(corpus, train__steps=3, layout__micro_batch=2, **flags)
    fault = {"module": module, "backward": backward}
    for events, error in ranks.run(spec.layout, faulty, spec, tmp_path, rank, fault):
        (event,) = events
        assert event["step"] == BAD_STEP
        assert event["first"].startswith(f"{what}{module} on rank {rank} (")
        assert not error


def test_a_fault_that_passed_is_told_from_one_that_stays(ranks: Ranks, corpus: Path, tmp_path: Path) -> None:
    spec = spec_of(corpus, train__steps=3, layout__dp=2)
    fault = {"module": "blocks.1.mlp", "passing": True}
    for events, _ in ranks.run(spec.layout, faulty, spec, tmp_path, 1, fault):
        assert [event["first"] for event in events] == ["nothing when the step was computed again"]


def test_a_run_that_stops_for_skipped_steps_has_saved_its_state(
    ranks: Ranks, corpus: Path, tmp_path: Path
) -> None:
    spec = spec_of(corpus, train__steps=9, layout__dp=2, layout__zero=3, recovery__max_skipped=2)
    fault = {"module": "blocks.0.mlp", "steps": 9}
    for events, error in ranks.run(spec.layout, faulty, spec, tmp_path, 1, fault):
        assert len(events) == 3
        assert "recovery.max_skipped = 2" in error and "the output of blocks.0.mlp on rank 1 (" in error
    assert latest_step(tmp_path / "checkpoints") == BAD_STEP + 2
    result, _ = start(ranks, spec, tmp_path, "auto")
    assert result["steps"] == 9 and math.isfinite(result["final_loss"])


def with_bad_state(mesh: Mesh, spec: RunSpec, out: Path, moment: bool, resume: str | None) -> str:
    """The error of a run whose last rank has a NaN among its weights, or its moments, from step 3 on."""
    run = open_run(spec, mesh, out, Observers([]))
    step = run.trainer.step

    def spoil(*arguments: Any) -> StepResult:
        result = step(*arguments)
        if run.done + 1 == 3 and mesh.rank == mesh.world.size - 1:
            flats = (
                run.trainer.optimiser.moments["exp_avg_sq"]
                if moment
                else [run.trainer.states.units[1].stored]
            )
            flats[-1][0] = math.nan
        return result

    run.trainer.step = spoil  # type: ignore[method-assign]
    try:
        run.execute(resume)
    except NumericalError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("moment", [False, True])
def test_a_state_with_a_nan_is_not_published(
    ranks: Ranks, corpus: Path, tmp_path: Path, moment: bool
) -> None:
    spec = spec_of(corpus, train__steps=3, layout__dp=2, layout__zero=3, checkpoint__every=2)
    name = "exp_avg_sq of head." if moment else "blocks.0."
    for error in ranks.run(spec.layout, with_bad_state, spec, tmp_path, moment, None):
        assert (
            error.startswith(f"after step 3 {name}") and "is not finite on rank 1; it is not saved" in error
        )
    assert latest_step(tmp_path / "checkpoints") == 2


def saved_bad(mesh: Mesh, spec: RunSpec, out: Path) -> None:
    """Save a state with a NaN, as an earlier version of the package could."""
    with patch.object(Guard, "before_save", lambda _guard, _step: None):
        with_bad_state(mesh, spec, out, False, None)


def test_a_checkpoint_with_a_nan_is_refused(ranks: Ranks, corpus: Path, tmp_path: Path) -> None:
    spec = spec_of(corpus, train__steps=3, layout__dp=2, layout__zero=1)
    ranks.run(spec.layout, saved_bad, spec, tmp_path)
    assert latest_step(tmp_path / "checkpoints") == 3
    for error in ranks.run(spec.layout, with_bad_state, spec, tmp_path, False, "auto"):
        assert error.startswith("in the checkpoint of step 3 in ") and "blocks.0." in error


def huge(mesh: Mesh, spec: RunSpec) -> str | None:
    trainer = Trainer(spec, mesh)
    trainer.states.units[0].stored.fill_(3e38)
    return bad_state(trainer)


def test_a_huge_finite_weight_is_no_nan(ranks: Ranks, corpus: Path) -> None:
    assert ranks.run(spec_of(corpus).layout, huge, spec_of(corpus)) == [None]


def ended_with_skips(mesh: Mesh, spec: RunSpec, out: Path) -> tuple[dict[str, Any], list[str]]:
    """The result of a run whose last steps are not finite, and its warnings."""
    notes = Notes()
    run = open_run(spec, mesh, out, Observers([notes]))
    Fault(run, "blocks.0.mlp", steps=9)
    with warnings.catch_warnings(record=True):
        result = run.execute(None)
    return result, [fields["message"] for kind, fields in notes.events if kind == "warning"]


def test_a_run_that_ends_with_skipped_steps_says_so(ranks: Ranks, corpus: Path, tmp_path: Path) -> None:
    spec = spec_of(corpus, train__steps=4)
    ((result, told),) = ranks.run(spec.layout, ended_with_skips, spec, tmp_path)
    assert (result["skipped_steps"], result["skipped_last"]) == (3, 3)
    (message,) = told
    assert message.startswith("the last 3 steps were skipped") and "that of step 1 of 4" in message
    assert "3 skipped, the last 3 among them" in summary(result)
    whole, told = ranks.run(spec.layout, ended_with_skips, spec_of(corpus, train__steps=1), tmp_path / "w")[0]
    assert whole["skipped_last"] == 0 and not told


def unfit_for_a_resume(mesh: Mesh, spec: RunSpec, out: Path, place: str) -> str:
    """The error of a run whose state gets a number that is not finite before its save."""
    run = open_run(spec, mesh, out, Observers([]))
    trainer, step = run.trainer, run.trainer.step
    assert trainer.clipping.zclip is not None

    def spoil(*arguments: Any) -> StepResult:
        result = step(*arguments)
        if place == "zclip":
            trainer.clipping.zclip._variance = math.inf  # type: ignore[union-attr]
        elif place == "spikes":
            run.guard._spikes._mean = math.nan
        else:
            trainer.part(DelayedScaling)._history[0, 0, 0] = math.inf
        return result

    trainer.step = spoil  # type: ignore[method-assign]
    try:
        run.execute(None)
    except NumericalError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("place", "field"),
    [("zclip", "zclip.variance: inf"), ("spikes", "guard.spikes.mean: nan"), ("fp8", "amax")],
)
def test_what_a_resume_would_refuse_is_not_saved(
    ranks: Ranks, corpus: Path, tmp_path: Path, place: str, field: str
) -> None:
    flags = {"precision__compute": "fp8", "train__zclip": 2.5, "model__ffn": 64, "model__vocab_size": 320}
    spec = spec_of(corpus, train__steps=2, **flags)
    (error,) = ranks.run(spec.layout, unfit_for_a_resume, spec, tmp_path, place)
    assert field in error and "it is not saved; resume from the last checkpoint" in error
    assert latest_step(tmp_path / "checkpoints") is None


def test_a_history_with_an_infinity_heals(ranks: Ranks, corpus: Path) -> None:
    spec = spec_of(corpus, precision__compute="fp8", model__ffn=64, model__vocab_size=320)
    assert all(ranks.run(spec.layout, healed, spec))


def healed(mesh: Mesh, spec: RunSpec) -> bool:
    """True if the steps after one that a bad history has spoiled are applied, with finite scales."""
    trainer = Trainer(spec, mesh)
    trainer.initialise()
    batches = first_batches(spec, mesh, 4)
    trainer.step(batches[0], 1)
    scaling = trainer.part(DelayedScaling)
    scaling._history[0].fill_(math.inf)
    scaling._rescale()
    applied = [trainer.step(batch, number).applied for number, batch in enumerate(batches[1:], 2)]
    return applied == [False, True, True] and all(bool(x.isfinite().all()) for _, x in scaling.held())
