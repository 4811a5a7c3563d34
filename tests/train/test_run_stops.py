"""Runs that end before their last step: by a signal, a crash, or a save that fails."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from meshwright.checkpoint.directory import latest_step, published
from meshwright.checkpoint.errors import CheckpointError
from meshwright.checkpoint.store import CheckpointStore
from meshwright.comm.mesh import Mesh
from meshwright.spec import RunSpec
from meshwright.spec.errors import REQUEUE, Stopped
from meshwright.train.callbacks import Observers
from meshwright.train.open_run import open_run
from meshwright.train.validation import Validation
from ranks import Ranks
from training_runs import HALF, Notes, run_and_watch, spec_of, start


class Signals(Notes):
    """Sends this process a signal after a step, as a scheduler that wants the machine back does."""

    def __init__(self, number: int, step: int) -> None:
        super().__init__()
        self.number, self.step = number, step

    def on_step(self, row: dict[str, Any]) -> None:
        super().on_step(row)
        if row["step"] == self.step:
            os.kill(os.getpid(), self.number)


def stopped(mesh: Mesh, spec: RunSpec, out: Path, number: int) -> tuple[str, int, list[Any]]:
    """The last rank alone gets the signal, in the middle of the run."""
    notes = Signals(number, HALF) if mesh.control.rank == mesh.control.size - 1 else Notes()
    before = signal.getsignal(number)
    with pytest.raises(Stopped) as caught:
        open_run(spec, mesh, out, Observers([notes])).execute(None)
    assert signal.getsignal(number) is before
    return str(caught.value), caught.value.code, notes.events


@pytest.mark.parametrize(("name", "dp"), [("SIGINT", 1), ("SIGTERM", 2), ("SIGHUP", 1), ("SIGUSR1", 2)])
def test_a_signal_ends_the_run_after_its_step_with_a_checkpoint(
    ranks: Ranks, corpus: Path, tmp_path: Path, name: str, dp: int
) -> None:
    spec, number = spec_of(corpus, layout__dp=dp), signal.Signals[name]
    expected = 130 if name == "SIGINT" else REQUEUE
    found = ranks.run(spec.layout, stopped, spec, tmp_path / "halves", number)
    for sentence, code, events in found:
        # Ranks agree on stops in each step's sum: a signal after that of step HALF counts in the next one.
        assert f"after step {HALF + 1}, which is saved" in sentence and code in (expected, REQUEUE)
        assert [kind for kind, _ in events] == ["start", "checkpoint", "stopped"]
    assert name in found[-1][0] and found[-1][1] == expected
    whole, _ = start(ranks, spec, tmp_path / "whole")
    both, _ = start(ranks, spec, tmp_path / "halves", "auto")
    assert both["parameters_sha256"] == whole["parameters_sha256"]


def stopped_in_the_last_save(mesh: Mesh, spec: RunSpec, out: Path) -> int:
    """The exit code of a run whose last rank gets SIGTERM while the last step is saved."""
    save = CheckpointStore.save

    def signalled(*arguments: Any) -> None:
        if mesh.rank == spec.layout.world_size - 1:
            os.kill(os.getpid(), signal.SIGTERM)
        save(*arguments)

    with patch.object(CheckpointStore, "save", signalled), pytest.raises(Stopped) as caught:
        open_run(spec, mesh, out, Observers([])).execute(None)
    return caught.value.code


def test_a_signal_in_the_last_save_does_not_break_it(ranks: Ranks, corpus: Path, tmp_path: Path) -> None:
    spec = spec_of(corpus, layout__dp=2, train__steps=2)
    assert ranks.run(spec.layout, stopped_in_the_last_save, spec, tmp_path) == [REQUEUE] * 2
    assert latest_step(spec.checkpoint.folder(tmp_path)) == 2


def stopped_in_the_last_validation(
    mesh: Mesh, spec: RunSpec, out: Path
) -> tuple[str, int, list[tuple[str, dict[str, Any]]]]:
    """The sentence, exit code and events of a run that gets SIGTERM twice while it validates last."""
    notes, measure = Notes(), Validation.measure

    def signalled(validation: Validation, step: int) -> None:
        try:
            os.kill(os.getpid(), signal.SIGTERM)
        finally:
            os.kill(os.getpid(), signal.SIGTERM)
        measure(validation, step)

    before = signal.getsignal(signal.SIGTERM)
    with patch.object(Validation, "measure", signalled), pytest.raises(Stopped) as caught:
        open_run(spec, mesh, out, Observers([notes])).execute(None)
    assert signal.getsignal(signal.SIGTERM) is before
    return str(caught.value), caught.value.code, notes.events


def test_a_signal_in_the_last_validation_ends_the_run_whose_last_step_is_saved(
    ranks: Ranks, corpus: Path, tmp_path: Path
) -> None:
    """It ended by the signal, with nothing saved for it as it said, so that no scheduler would requeue it."""
    spec = spec_of(corpus, layout__dp=2, train__steps=2)
    for sentence, code, events in ranks.run(spec.layout, stopped_in_the_last_validation, spec, tmp_path):
        assert "SIGTERM after step 2, which is saved" in sentence and code == REQUEUE
        assert [kind for kind, _ in events] == ["start", "checkpoint", "stopped"]
        assert events[-1][1] == {"step": 2, "signal": "SIGTERM"}
    again, _ = start(ranks, spec, tmp_path, "auto")
    assert again["steps"] == 2 and again["val_bits_per_byte"] is not None


class Died(BaseException):
    """The process is gone."""


class Crash(Notes):
    """Ends the run after a step, with nothing saved."""

    def __init__(self, step: int) -> None:
        super().__init__()
        self.step = step

    def on_step(self, row: dict[str, Any]) -> None:
        if row["step"] == self.step:
            raise Died


def crashed(mesh: Mesh, spec: RunSpec, out: Path, resume: str, step: int) -> None:
    with pytest.raises(Died):
        open_run(spec, mesh, out, Observers([Crash(step)])).execute(resume)


def test_a_run_that_went_back_stays_there(ranks: Ranks, corpus: Path, tmp_path: Path) -> None:
    """It crashes before it has saved anything of its own."""
    spec = spec_of(corpus, checkpoint__every=2, checkpoint__keep=5)
    start(ranks, spec, tmp_path)
    ranks.run(spec.layout, crashed, spec, tmp_path, "4", 5)
    folder = spec.checkpoint.folder(tmp_path)
    assert latest_step(folder) == 4 and set(published(folder)) == {2, 4, 6, 8, 10}
    rows = ranks.run(spec.layout, run_and_watch, spec, tmp_path, "auto")[0][0]
    assert [row["step"] for row in rows] == [5, 6, 7, 8, 9, 10]


def failed_behind(mesh: Mesh, spec: RunSpec, out: Path) -> list[str]:
    """Kinds of events of a run whose disk fails behind its back, and is only asked when it ends."""
    notes = Notes()
    failing = patch.object(CheckpointStore, "_publish", side_effect=CheckpointError("the disk failed"))
    unasked = patch.object(CheckpointStore, "poll")
    with failing, unasked, pytest.raises(CheckpointError, match="the disk failed"):
        open_run(spec, mesh, out, Observers([notes])).execute(None)
    return [kind for kind, _ in notes.events]


def test_a_save_that_failed_is_not_told_as_published(ranks: Ranks, corpus: Path, tmp_path: Path) -> None:
    spec = spec_of(corpus, checkpoint__every=6, layout__dp=2)
    assert ranks.run(spec.layout, failed_behind, spec, tmp_path)[0] == ["start"]
