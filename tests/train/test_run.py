"""Whole runs: the record of samples, what observers are told, steps that are skipped, compiled blocks."""

from __future__ import annotations

import json
import math
import shutil
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from meshwright.comm.mesh import Mesh
from meshwright.data.loader import Batch
from meshwright.spec import RunSpec
from meshwright.spec.errors import UserError
from meshwright.train import state
from meshwright.train.callbacks import Observers
from meshwright.train.open_run import open_run
from meshwright.train.step import Trainer
from meshwright.train.step_result import StepResult
from ranks import Ranks, RanksFailedError
from training_runs import (
    EXPERTS,
    VOCABULARY,
    Notes,
    poisoned,
    run_and_watch,
    run_it,
    spec_of,
    start,
)


def started_with(mesh: Mesh, specs: list[RunSpec], out: Path) -> str:
    """The error of a run whose ranks have these specs."""
    with pytest.raises(UserError) as raised:
        open_run(specs[mesh.rank], mesh, out, Observers([]))
    return str(raised.value)


def test_ranks_whose_corpora_differ_do_not_start(ranks: Ranks, corpus: Path, tmp_path: Path) -> None:
    shutil.copytree(corpus, tmp_path / "other" / "text")
    (tmp_path / "other" / "text" / "07.txt").write_text("another document\n")
    specs = [spec_of(folder, layout__dp=2) for folder in (corpus, tmp_path / "other" / "text")]
    for told in ranks.run(specs[0].layout, started_with, specs, tmp_path):
        assert "the digest of data.corpus is " in told and " on rank 1 on " in told
        assert "give all hosts the same corpus" in told


def calls_of_a_run(mesh: Mesh, spec: RunSpec, out: Path) -> list[object]:
    """The calls of a run's trainer, in order: `evaluate` of `compile_stages`, and the numbers of steps."""
    calls: list[object] = []
    step = Trainer.step

    def noted(trainer: Trainer, batch: Batch, number: int, *more: Any) -> StepResult:
        calls.append(number)
        return step(trainer, batch, number, *more)

    compiled = patch.object(
        Trainer, "compile_stages", lambda _, evaluate: calls.append(("compile", evaluate))
    )
    with compiled, patch.object(Trainer, "step", noted):
        open_run(spec, mesh, out, Observers([])).execute(None)
    return calls


def test_stages_compile_before_the_first_step(ranks: Ranks, corpus: Path, tmp_path: Path) -> None:
    spec = spec_of(corpus, train__steps=2)
    assert ranks.run(spec.layout, calls_of_a_run, spec, tmp_path)[0] == [("compile", True), 1, 2]


def test_the_sample_record_knows_order_and_layout_does_not_matter(
    ranks: Ranks, corpus: Path, tmp_path: Path
) -> None:
    short = {"train__steps": 3}
    digests = {
        start(ranks, spec_of(corpus, **short, layout__dp=dp), tmp_path / str(dp))[0]["samples_sha256"]
        for dp in (1, 2, 4)
    }
    assert len(digests) == 1
    other, _ = start(ranks, spec_of(corpus, **short, train__seed=1), tmp_path / "other")
    assert other["samples_sha256"] not in digests


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"model__hidden": 48}, "model.hidden was 32 and is 48"),
        ({"train__beta2": 0.5}, "train.beta2 was 0.95 and is 0.5"),
        ({"train__lr_factors__embed.*": 0.5}, ": train.lr_factors.embed.* was 'none' and is 0.5"),
        ({"precision__compute": "bf16"}, "precision.compute was 'fp32' and is 'bf16'"),
        ({"data__seq_len": 8, "train__batch_tokens": 128}, "trained on other data"),
        ({"train__steps": 1}, "the checkpoint is at step 2, after the last step 1"),
    ],
)
def test_a_checkpoint_of_another_run_is_refused(
    ranks: Ranks, corpus: Path, tmp_path: Path, flags: dict[str, object], words: str
) -> None:
    kept, _ = start(ranks, spec_of(corpus, train__steps=2), tmp_path)
    with pytest.raises(RanksFailedError) as failed:
        start(ranks, spec_of(corpus, **{"train__steps": 4} | flags), tmp_path, "auto")
    assert words in str(failed.value) and "UserError" in str(failed.value)
    again, _ = start(ranks, spec_of(corpus, train__steps=2), tmp_path, "auto")
    assert again["parameters_sha256"] == kept["parameters_sha256"]


def test_another_run_is_told_by_its_keys(corpus: Path) -> None:
    def refused(kept: RunSpec, imported: bool) -> str:
        now = spec_of(corpus, **EXPERTS, model__moe__aux_loss=0.1)
        record = {"spec": kept.to_json(), "data_digest": None if imported else "same"}
        try:
            state.check_same_run(now, record, "same", "it")
        except UserError as error:
            return str(error)
        return ""

    other = spec_of(corpus, **(EXPERTS | {"model__moe__top_k": 1}))
    assert "model.moe.aux_loss was 0.0 and is 0.1; model.moe.top_k was 1 and is 2; give" in refused(
        other, False
    )
    assert "model.moe.top_k was 1 and is 2; give" in refused(other, True)
    assert refused(spec_of(corpus, **EXPERTS), True) == ""


def test_other_frozen_parameters_are_those_of_a_new_run(corpus: Path) -> None:
    record = {"spec": spec_of(corpus, train__frozen="embed.*").to_json(), "data_digest": "same"}
    told = r"train\.frozen was .*; give the same values, or another --out with model\.weights"
    with pytest.raises(UserError, match=told):
        state.check_same_run(spec_of(corpus, train__frozen="blocks.0.*"), record, "same", "it")


def test_a_gather_in_8_bits_may_end_on_resume(corpus: Path) -> None:
    """It changes no number, and a layout that it does not fit is one that a run may be resumed on."""
    flags = {"model__ffn": 48, "precision__compute": "fp8", "layout__dp": 2, "layout__zero": 3}
    kept = spec_of(corpus, **flags, precision__fp8_gather="true")
    record = {"spec": kept.to_json(), "data_digest": "same"}
    state.check_same_run(spec_of(corpus, **flags), record, "same", "it")
    with pytest.raises(UserError, match=r"precision\.compute was 'fp8' and is 'bf16'"):
        other = spec_of(corpus, **(flags | {"precision__compute": "bf16"}))
        state.check_same_run(other, record, "same", "it")


def test_what_observers_are_told(ranks: Ranks, corpus: Path, tmp_path: Path) -> None:
    spec = spec_of(corpus, train__steps=6, train__eval_every=2, checkpoint__every=3, layout__dp=2)
    rows, events = ranks.run(spec.layout, run_and_watch, spec, tmp_path)[0]
    assert [row["step"] for row in rows] == list(range(1, 7))
    assert all(math.isfinite(row["loss"]) and row["grad_norm"] > 0 and row["mfu"] > 0 for row in rows)
    assert rows[0]["lr"] > rows[-1]["lr"] > 0
    assert [row["step"] for kind, row in events if kind == "eval"] == [2, 4, 6]
    assert [row["step"] for kind, row in events if kind == "checkpoint"] == [3, 6]
    json.dumps(events)


class Published(Notes):
    """Looks, whenever a checkpoint is told, whether it can be read."""

    def __init__(self, checkpoints: Path) -> None:
        super().__init__()
        self.checkpoints = checkpoints

    def on_event(self, kind: str, fields: dict[str, Any]) -> None:
        if kind == "checkpoint":
            assert (self.checkpoints / f"step-{fields['step']:08d}" / "manifest.json").is_file()
        super().on_event(kind, fields)


def run_published(mesh: Mesh, spec: RunSpec, out: Path) -> list[int]:
    notes = Published(out / "checkpoints")
    open_run(spec, mesh, out, Observers([notes] if mesh.control.rank == 0 else [])).execute(None)
    return [fields["step"] for kind, fields in notes.events if kind == "checkpoint"]


def test_a_checkpoint_is_told_once_it_is_published(ranks: Ranks, corpus: Path, tmp_path: Path) -> None:
    spec = spec_of(corpus, layout__dp=2, train__steps=9, checkpoint__every=2, checkpoint__keep=9)
    assert ranks.run(spec.layout, run_published, spec, tmp_path)[0] == [2, 4, 6, 8, 9]


def test_the_result_counts_the_gradients_of_a_sharded_layout(
    ranks: Ranks, corpus: Path, tmp_path: Path
) -> None:
    spec = spec_of(corpus, layout__dp=2, layout__zero=3, train__steps=1)
    result, _ = start(ranks, spec, tmp_path)
    assert result["memory"]["gradients"] >= 4 * spec.model.parameters / 2


@pytest.mark.parametrize("compute", ["fp32", "fp16"])
def test_a_step_that_is_not_finite_is_skipped_on_all_ranks_alike(
    ranks: Ranks, corpus: Path, tmp_path: Path, compute: str
) -> None:
    spec = spec_of(corpus, train__steps=8, layout__dp=2, layout__zero=2, precision__compute=compute)
    for rows, events, finite in ranks.run(spec.layout, poisoned, spec, tmp_path, range(3, 5)):
        assert finite
        skipped = [fields["step"] for kind, fields in events if kind == "skipped_step"]
        assert {4, 5} <= set(skipped)
        assert [row["step"] for row in rows if row.get("skipped")] == skipped
        assert rows[-1]["step"] == 8 and math.isfinite(rows[-1]["loss"])


def test_a_run_stops_after_too_many_skipped_steps(ranks: Ranks, corpus: Path, tmp_path: Path) -> None:
    spec = spec_of(corpus, train__steps=8, layout__dp=2, layout__zero=2, recovery__max_skipped=3)
    with pytest.raises(RanksFailedError, match=r"recovery\.max_skipped = 3"):
        ranks.run(spec.layout, poisoned, spec, tmp_path, range(2, 8))


def test_skipped_steps_are_counted_in_the_result(ranks: Ranks, corpus: Path, tmp_path: Path) -> None:
    flags = {"train__steps": 3, "layout__dp": 2, "precision__compute": "fp16", "precision__loss_scale": 1e30}
    result, _ = start(ranks, spec_of(corpus, **flags), tmp_path / "skipped")
    assert (result["steps"], result["skipped_steps"]) == (3, 3)


def test_fp16_trains(ranks: Ranks, corpus: Path, tmp_path: Path) -> None:
    flags = {"layout__dp": 1, "train__steps": 30}
    spec = spec_of(corpus, **flags, precision__compute="fp16", precision__loss_scale=1024)
    result, _ = start(ranks, spec, tmp_path / "fp16")
    plain, _ = start(ranks, spec_of(corpus, **flags), tmp_path / "fp32")
    assert result["final_loss"] == pytest.approx(plain["final_loss"], abs=0.15)


def test_training_lowers_the_loss_and_the_validation_beats_chance(
    ranks: Ranks, corpus: Path, tmp_path: Path
) -> None:
    result, _ = start(ranks, spec_of(corpus, layout__dp=2, layout__zero=3, train__steps=60), tmp_path)
    assert result["val_bits_per_byte"] < 0.7 * 8
    assert result["final_loss"] < 0.7 * math.log(VOCABULARY)


def run_compiled(mesh: Mesh, spec: RunSpec, out: Path, backend: str) -> tuple[dict[str, Any], dict[str, Any]]:
    with patch.object(torch, "compile", partial(torch.compile, backend=backend)):
        return run_it(mesh, spec, out, None)


@pytest.mark.full  # `test_all_blocks_compile_before_the_first_step` has a compiled run that equals another
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler on the CPU")
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize(
    "model",
    [
        pytest.param({}, id="dense"),
        pytest.param(EXPERTS | {"layout__ep": 2, "recompute__policy": "selective"}, id="experts"),
    ],
)
def test_compiled_blocks_train_alike(
    ranks: Ranks, corpus: Path, tmp_path: Path, model: dict[str, object], backend: str
) -> None:
    flags = {"train__steps": 2, "layout__dp": 2, "layout__zero": 3, "model__layers": 1} | model
    flags |= {"model__layers": 2 if model else 1}
    plain, _ = start(ranks, spec_of(corpus, **flags), tmp_path / "plain")
    spec = spec_of(corpus, **flags, train__compile="true")
    compiled, _ = ranks.run(spec.layout, run_compiled, spec, tmp_path / "compiled", backend)[0]
    assert compiled["final_loss"] == pytest.approx(plain["final_loss"], abs=1e-4)
    assert compiled["samples_sha256"] == plain["samples_sha256"]
