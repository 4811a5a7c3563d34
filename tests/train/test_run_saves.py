"""Runs whose disk fails a save: by policy they go on and try again, or end with the exit code of storage."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from meshwright.checkpoint.directory import published
from meshwright.checkpoint.disk import Disk
from meshwright.checkpoint.writer import Writer
from meshwright.comm.mesh import Mesh
from meshwright.spec import RunSpec
from meshwright.spec.errors import StorageError, UserError
from meshwright.train import saves
from meshwright.train.callbacks import Observers
from meshwright.train.open_run import open_run
from meshwright.train.step import Trainer
from ranks import Ranks
from training_runs import STEPS, Notes, spec_of, start


def failing_disk(mesh: Mesh, fails: Callable[[int, int], bool]) -> Any:
    """Patch the last rank's writes: `fails` gets the step that is saved, and the attempts at it so far."""
    attempts: dict[int, int] = {}
    write = Writer._write_pieces

    def write_pieces(writer: Writer, temporary: Path, step: int, *image: Any) -> Any:
        attempts[step] = attempts.get(step, 0) + 1
        if mesh.rank == mesh.world.size - 1 and fails(step, attempts[step] - 1):
            with patch.object(Disk, "write", side_effect=OSError(errno.EIO, os.strerror(errno.EIO))):
                return write(writer, temporary, step, *image)
        time.sleep(0.05)  # steps go on meanwhile
        return write(writer, temporary, step, *image)

    return patch.object(Writer, "_write_pieces", write_pieces)


def run_on(mesh: Mesh, spec: RunSpec, out: Path, fails: dict[int, int]) -> tuple[Any, list[Any]]:
    """The run's digest, or (exit code, sentence) of its error, and its events; a step fails so many times."""
    notes = Notes()
    broken = failing_disk(mesh, lambda step, tried: tried < fails.get(step, 0))
    with broken, patch.object(saves, "RETRY_S", 0.0):
        try:
            end: Any = open_run(spec, mesh, out, Observers([notes])).execute(None)["parameters_sha256"]
        except UserError as error:
            end = isinstance(error, StorageError), error.code, str(error)
    warned = [
        kind for kind, fields in notes.events if "tries again at its next save" in fields.get("message", "")
    ]
    assert warned == ["warning"] * sum(kind == "save_failed" for kind, _ in notes.events)
    told = [(kind, fields["step"]) for kind, fields in notes.events if kind in ("checkpoint", "save_failed")]
    return end, told


@pytest.mark.filterwarnings("ignore:could not write the checkpoint")
@pytest.mark.parametrize("asynchronous", ["true", "false"])
def test_a_save_that_fails_is_told_and_tried_again_at_the_next_interval(
    ranks: Ranks, corpus: Path, tmp_path: Path, asynchronous: str
) -> None:
    spec = spec_of(corpus, layout__dp=2, checkpoint__every=3, checkpoint__asynchronous=asynchronous)
    found = ranks.run(spec.layout, run_on, spec, tmp_path / "faulty", {3: 9, 6: 9, STEPS: 1})
    whole, _ = start(ranks, spec, tmp_path / "whole")
    assert [end for end, _ in found] == [whole["parameters_sha256"]] * 2
    assert found[0][1] == [
        ("save_failed", 3), ("save_failed", 6), ("checkpoint", 9),
        ("save_failed", STEPS), ("checkpoint", STEPS),
    ]  # fmt: skip
    assert set(published(spec.checkpoint.folder(tmp_path / "faulty"))) == {9, STEPS}


@pytest.mark.filterwarnings("ignore:could not write the checkpoint")
@pytest.mark.parametrize(
    ("flags", "fails", "steps"),
    [
        ({"recovery__on_save_error": "stop"}, {4: 9}, [("checkpoint", 2)]),
        ({}, dict.fromkeys(range(2, 9), 9), [("save_failed", step) for step in (2, 4, 6)]),
        ({"checkpoint__every": 0}, {STEPS: 9}, [("save_failed", STEPS)]),
    ],
)
def test_saves_that_go_on_failing_end_the_run_with_the_exit_code_of_storage(
    ranks: Ranks, corpus: Path, tmp_path: Path, flags: dict[str, str], fails: dict[int, int], steps: list[Any]
) -> None:
    spec = spec_of(corpus, layout__dp=2, **{"checkpoint__every": 2, **flags})
    found = ranks.run(spec.layout, run_on, spec, tmp_path, fails)
    for storage, code, sentence in (end for end, _ in found):
        assert storage and code == 76
        assert "could not write the checkpoint of step" in sentence and "Input/output error" in sentence
    assert found[0][1] == steps


def fences(mesh: Mesh, spec: RunSpec, out: Path) -> list[list[str]]:
    """Each update and each save of a run, with the fences before the next one."""
    run, found = open_run(spec, mesh, out, Observers([])), list[list[str]]()
    update, save = run.trainer._start_update, run.store.save

    def noted(name: str) -> Callable[..., None]:
        return lambda: found[-1].append(name) if found else None

    def after(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def called(*given: Any) -> Any:
            found.append([name])
            return call(*given)

        return called

    with (
        patch.object(run.store, "fence", noted("checkpoint")),
        patch.object(run.snapshots, "fence", noted("snapshot")),
        patch.object(run.trainer, "_start_update", after("update", update)),
        patch.object(run.store, "save", after("save", save)),
    ):
        run.execute(None)
    return found


def test_updates_wait_for_copies_of_snapshots_and_of_checkpoints(
    ranks: Ranks, corpus: Path, tmp_path: Path
) -> None:
    found = ranks.run((spec := spec_of(corpus, checkpoint__every=5)).layout, fences, spec, tmp_path)[0]
    updates = [waits[1:3] for waits in found if waits[0] == "update"]
    assert updates == [["snapshot", "checkpoint"]] * STEPS and ["save"] in [each[:1] for each in found]


class EndOfRankError(Exception):
    """An error that a run does not foresee."""


def end_during_a_save(mesh: Mesh, spec: RunSpec, out: Path) -> tuple[str, list[Any]]:
    """The error that ends a run whose save of step 3 fails while step 4 raises one, and its events."""
    notes = Notes()
    fails = failing_disk(mesh, lambda step, tried: True)
    gradients = Trainer.gradients

    def raising(trainer: Trainer, *batch: Any) -> Any:
        if run.done == 3:
            raise EndOfRankError("of step 4")
        return gradients(trainer, *batch)

    with fails, patch.object(Trainer, "gradients", raising):
        run = open_run(spec, mesh, out, Observers([notes]))
        try:
            run.execute(None)
        except (EndOfRankError, UserError) as error:
            return f"{type(error).__name__} {error}", notes.events
    return "", notes.events


@pytest.mark.filterwarnings("ignore:could not write the checkpoint")
@pytest.mark.parametrize(
    ("policy", "end"), [("continue", "EndOfRankError of step 4"), ("stop", "SaveError ")]
)
def test_a_save_that_fails_as_the_run_ends_by_an_error_is_told_beside_it(
    ranks: Ranks, corpus: Path, tmp_path: Path, policy: str, end: str
) -> None:
    """A new start may go on after the error, but not after a failed save that shall stop the run."""
    spec = spec_of(corpus, layout__dp=2, checkpoint__every=3, recovery__on_save_error=policy)
    found = ranks.run(spec.layout, end_during_a_save, spec, tmp_path)
    assert all(said.startswith(end) for said, _ in found)
    told = [kind for kind, _ in found[0][1] if kind in ("save_failed", "warning")]
    assert told == (["save_failed", "warning"] if policy == "continue" else [])


def lose_the_lease(mesh: Mesh, spec: RunSpec, out: Path) -> str:
    lease = spec.checkpoint.folder(out) / "lease.json"
    stage = Writer._write_pieces

    def taken(writer: Writer, temporary: Path, step: int, *image: Any) -> Any:
        if mesh.rank == 0:
            lease.write_text(lease.read_text().replace('"token": "', '"token": "an heir of '))
            os.rename(temporary, temporary.with_name("swept"))
        mesh.background.barrier()
        return stage(writer, temporary, step, *image)

    with patch.object(Writer, "_write_pieces", taken), pytest.raises(UserError) as caught:
        open_run(spec, mesh, out, Observers([])).execute(None)
    return f"{caught.value.code} {caught.value}"


def test_a_lost_lease_ends_the_run_whatever_the_policy(ranks: Ranks, corpus: Path, tmp_path: Path) -> None:
    spec = spec_of(corpus, layout__dp=2, checkpoint__every=2)
    for said in ranks.run(spec.layout, lose_the_lease, spec, tmp_path):
        assert said.startswith("2 this run (generation 1) lost the lease")


def automatic(mesh: Mesh, spec: RunSpec, out: Path) -> tuple[int, list[Any]]:
    notes = Notes()
    run = open_run(spec, mesh, out, Observers([notes]))
    run.execute(None)
    assert run.saves._auto is not None
    return run.saves._auto.steps, notes.events


def test_an_automatic_interval_is_told_and_alike_on_all_ranks(
    ranks: Ranks, corpus: Path, tmp_path: Path
) -> None:
    spec = spec_of(
        corpus, layout__dp=2, train__steps=60, checkpoint__every="auto", checkpoint__keep_every=25,
        recovery__mtbf_hours=0.02,
    )  # fmt: skip
    (steps, events), (other, _) = ranks.run(spec.layout, automatic, spec, tmp_path)
    assert steps == other
    saved = [fields["step"] for kind, fields in events if kind == "checkpoint"]
    chosen = [fields for kind, fields in events if kind == "checkpoint_interval"]
    assert saved[:2] == [10, 20] and 25 in saved and 50 in saved and saved[-1] == 60
    assert chosen and chosen[-1]["steps"] == steps
    assert all(fields["save_seconds"] > 0 and fields["mtbf_hours"] == 0.02 for fields in chosen)
    assert {25, 50} <= set(published(spec.checkpoint.folder(tmp_path)))
