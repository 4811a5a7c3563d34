"""Runs with late gradients: which updates there are, bytes, resumes, memory, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from covering import marked
from meshwright.comm.mesh import Mesh
from meshwright.parallel.stale_gradients import StaleGradients
from meshwright.spec import RunSpec, UserError
from meshwright.train.step import Trainer
from meshwright.train.step_result import StepResult
from ranks import Ranks
from small import first_batches
from training_runs import EXPERTS, HALF, STEPS, TrainedOnce, go_on, poisoned, spec_of, start

LATE = {"layout__replicate": 2, "outer__staleness": 2}


def steps_of(
    mesh: Mesh, spec: RunSpec
) -> list[tuple[StepResult, int, dict[str, torch.Tensor], dict[str, float]]]:
    """Each step, the updates after it, the parameters, and the bytes over replicate."""
    trainer = Trainer(spec, mesh)
    trainer.initialise()
    found = []
    for number, batch in enumerate(first_batches(spec, mesh, STEPS), 1):
        trainer.expect(batch)
        mesh.wire.clear()
        step = trainer.step(batch, number)
        whole = {name: each.full_tensor().clone() for name, each in trainer.states.parameters()}
        sent = {what: size for (axis, what), size in mesh.wire.bytes.items() if axis == "replicate"}
        found.append((step, trainer.optimiser.updates, whole, sent))
    return found


@pytest.mark.parametrize("late", [pytest.param(1, marks=pytest.mark.full), 3])
def test_the_first_steps_update_nothing(ranks: Ranks, corpus: Path, late: int) -> None:
    spec = spec_of(corpus, **LATE | {"outer__staleness": late, "outer__staleness_lr": "inverse"})
    found = ranks.run(spec.layout, steps_of, spec)[0]
    alone = spec_of(corpus, layout__dp=2)
    rates = [step.rate for step, *_ in ranks.run(alone.layout, steps_of, alone)[0]]
    first = found[0][2]
    for number, (step, updates, whole, _) in enumerate(found, 1):
        assert updates == max(0, number - late)
        assert step.applied and step.waiting == (number <= late)
        assert (step.grad_norm == 0) == step.waiting
        assert all(torch.equal(whole[name], first[name]) for name in first) == step.waiting
        assert step.rate == pytest.approx(rates[number - 1] / late, rel=1e-12)


@pytest.mark.parametrize(
    "flags",
    [
        pytest.param({}, marks=pytest.mark.full),
        {"layout__dp": 2, "layout__zero": 2},
        pytest.param({"layout__tp": 2}, marks=pytest.mark.full),
    ],
)
def test_bytes_are_one_sum_of_gradients_a_step(ranks: Ranks, corpus: Path, flags: dict[str, Any]) -> None:
    spec = spec_of(corpus, **LATE, **flags)
    plain = spec_of(corpus, layout__replicate=2, **{"layout__zero": 1} | flags)
    synchronous = ranks.run(plain.layout, steps_of, plain)
    for late, now in zip(ranks.run(spec.layout, steps_of, spec), synchronous, strict=True):
        for (*_, sent), (*_, wanted) in zip(late, now, strict=True):
            assert sent == wanted
            assert sent["all_reduce"] > 0


def test_late_gradients_take_a_buffer_each(ranks: Ranks, corpus: Path) -> None:
    spec = spec_of(corpus, **LATE, layout__dp=2, layout__zero=1)
    for part, sizes in ranks.run(spec.layout, buffers_of, spec):
        assert sizes == [part, 2 * part, 2 * part, 2 * part]


def buffers_of(mesh: Mesh, spec: RunSpec) -> tuple[int, list[int]]:
    """Bytes of a gradient of this rank, and those of gradients that it holds after each step."""
    trainer, sizes = Trainer(spec, mesh), []
    trainer.initialise()
    for number, batch in enumerate(first_batches(spec, mesh, 4), 1):
        trainer.step(batch, number)
        held = {
            id(flat): flat.nbytes for sums in trainer.part(StaleGradients)._under_way for flat in sums.flats
        }
        sizes.append(sum(held.values()))
    return sum(unit.stored.nbytes for unit in trainer.states.units), sizes


RESUMED: list[dict[str, Any]] = [
    LATE,
    {**LATE, "outer__staleness": 4, "outer__staleness_lr": "inverse", "layout__dp": 2, "layout__zero": 3},
    {**LATE, "layout__pp": 2, "train__optimiser": "muon"},
    {**LATE, "layout__tp": 2, "layout__zero": 1, **EXPERTS, "precision__compute": "bf16"},
    {**LATE, "layout__replicate": 1, "train__ema": 0.9, "train__zclip": 2.5, "train__zclip_warmup": 2},
]


@pytest.mark.parametrize("flags", marked(RESUMED, RESUMED[1:3]))
def test_a_resumed_run_of_late_gradients_ends_bitwise_as_one_that_was_not_stopped(
    ranks: Ranks, corpus: Path, tmp_path: Path, flags: dict[str, Any]
) -> None:
    spec = spec_of(corpus, **flags, checkpoint__every=HALF)
    whole, _ = start(ranks, spec, tmp_path)
    again, _ = go_on(ranks, spec, tmp_path)
    assert again["steps"] == whole["steps"] == STEPS
    assert again["parameters_sha256"] == whole["parameters_sha256"]


MOVED: list[Any] = [
    pytest.param({**LATE, "layout__dp": 2, "layout__zero": 3}, True, marks=pytest.mark.full),
    pytest.param({**LATE, "layout__replicate": 1, "layout__tp": 2}, True, marks=pytest.mark.full),
    ({**LATE, "layout__pp": 2, "layout__zero": 3}, True),
    ({**LATE, "outer__staleness": 1}, False),
    pytest.param({"layout__dp": 2, "layout__zero": 1}, False, marks=pytest.mark.full),
    ({"layout__replicate": 2, "outer__every": 2}, False),
]


@pytest.mark.parametrize(("after", "kept"), MOVED)
def test_late_gradients_are_resharded_or_dropped(
    ranks: Ranks,
    corpus: Path,
    tmp_path: Path,
    trained_once: TrainedOnce,
    after: dict[str, Any],
    kept: bool,
) -> None:
    exact: dict[str, Any] = {"precision__compute": "fp64", "train__optimiser": "sgd"}
    whole, _ = trained_once(spec_of(corpus, **LATE, **exact, checkpoint__every=HALF), tmp_path / "moved")
    moved, _ = go_on(ranks, spec_of(corpus, **after, **exact), tmp_path / "moved")
    assert moved["steps"] == STEPS and moved["samples_sha256"] == whole["samples_sha256"]
    assert (moved["final_loss"] == pytest.approx(whole["final_loss"], rel=1e-12)) == kept


def test_staleness_may_begin_at_a_checkpoint(ranks: Ranks, corpus: Path, tmp_path: Path) -> None:
    for before in ({"layout__dp": 2}, {"layout__replicate": 2, "outer__every": 2}):
        folder = tmp_path / "-".join(before)
        start(ranks, spec_of(corpus, **before, train__stop_at=2), folder)
        moved, _ = start(ranks, spec_of(corpus, **LATE, train__stop_at=HALF), folder, "auto")
        assert moved["steps"] == HALF


def test_a_late_gradient_that_is_not_finite_is_skipped_and_named(
    ranks: Ranks, corpus: Path, tmp_path: Path
) -> None:
    spec = spec_of(corpus, **LATE)
    for _, events, finite in ranks.run(spec.layout, poisoned, spec, tmp_path, range(3, 5)):
        assert finite
        skipped = {row["step"]: row["first"] for kind, row in events if kind == "skipped_step"}
        wanted = {step: f"the gradient of step {step - 2}, which this step applied" for step in (6, 7)}
        assert skipped == wanted


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        ({"outer__staleness": -1}, "outer.staleness: -1"),
        ({"outer__staleness": STEPS}, f"outer.staleness: {STEPS} steps are not over in a run of {STEPS}"),
        ({"outer__every": 2}, "outer.staleness: 2 puts off gradients that replicas sum in each step"),
        ({"outer__staleness": 0, "outer__staleness_lr": "inverse", "layout__zero": 1}, "no effect"),
        ({"outer__staleness_lr": "half"}, "outer.staleness_lr"),
        ({"outer__format": "int8"}, "outer.format: int8 has no effect"),
        ({"precision__compute": "fp16"}, "precision.compute: 'fp16' needs scales that follow each gradient"),
        ({"recovery__on_spike": "rollback", "checkpoint__every": 2}, "recovery.on_spike: 'rollback' needs"),
        ({"layout__dp": 2}, "layout.zero: 0 with outer.staleness = 2 needs replicas"),
        ({"layout__tp": 2, **EXPERTS}, "layout.zero: 0 with outer.staleness = 2 needs replicas"),
    ],
)
def test_what_cannot_be_late_is_refused(corpus: Path, flags: dict[str, Any], told: str) -> None:
    with pytest.raises(UserError) as caught:
        spec_of(corpus, **LATE | flags)
    assert told in str(caught.value)
