"""Trackers get the rows of the run; a package that is missing is a sentence before training starts."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from meshwright.report.trackers import make_trackers
from meshwright.spec import UserError
from meshwright.train.callbacks import Observers


def drive(name: str, out: Path, first: int, last: int, end: bool) -> None:
    """Steps first+1..last of a run whose loss at step s is 10 / s, with one NaN figure in each row."""
    with Observers(make_trackers([name], out, "trial", {"model": {"layers": 4}})) as observer:
        observer.on_start({"step": first, "last_step": 10})
        for step in range(first + 1, last + 1):
            observer.on_step({"step": step, "loss": 10.0 / step, "mfu": None, "grad_norm": float("nan")})
        observer.on_eval({"step": last, "val_loss": 2.5, "val_bits_per_byte": 1.25})
        observer.on_event("checkpoint", {"step": last, "seconds": 0.5, "path": "somewhere"})
        if end:
            observer.on_end({"final_loss": 1.0, "layout": "dp=2"})


@pytest.mark.parametrize(
    ("name", "module"),
    [("tensorboard", "torch.utils.tensorboard"), ("wandb", "wandb"), ("trackio", "trackio")],
)
def test_a_missing_package_is_named(
    name: str, module: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(UserError, match=rf"train\.trackers: '{name}' .*pip install 'meshwright\[trackers\]'"):
        make_trackers([name], tmp_path, "trial", {})


def test_an_unknown_tracker_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="'wandbb' is unknown; known are tensorboard, wandb, trackio"):
        make_trackers(["wandbb"], tmp_path, "trial", {})


def test_no_tracker_imports_nothing(tmp_path: Path) -> None:
    assert make_trackers([], tmp_path, "trial", {}) == []


class RecordingWandb:
    """Stands for the wandb package: keeps what it is told."""

    def __init__(self) -> None:
        self.inits: list[dict[str, Any]] = []
        self.rows: list[dict[str, Any]] = []
        self.exits: list[int] = []
        self.summary: dict[str, Any] = {}

    def init(self, **settings: Any) -> SimpleNamespace:
        self.inits.append(settings)
        return SimpleNamespace(
            log=self.rows.append,
            define_metric=lambda *_, **__: None,
            summary=self.summary,
            finish=lambda exit_code=0: self.exits.append(exit_code),
        )


def test_wandb_goes_on_under_the_same_id_and_drops_what_is_not_finite(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = RecordingWandb()
    monkeypatch.setitem(sys.modules, "wandb", package)
    drive("wandb", tmp_path, 0, 6, end=False)
    drive("wandb", tmp_path, 4, 10, end=True)
    first, second = package.inits
    assert second["id"] == first["id"] and second["resume"] == "allow" and first["resume"] is None
    assert first["config"] == {"model": {"layers": 4}} and first["dir"] == str(tmp_path)
    assert package.rows[0] == {"step": 1, "train/loss": 10.0}
    assert package.rows[-1] == {"step": 10, "event/checkpoint": 1.0, "event/checkpoint/seconds": 0.5}
    assert package.exits == [1, 0] and package.summary == {"final_loss": 1.0}
    drive("wandb", tmp_path, 0, 1, end=True)
    assert package.inits[2]["id"] != first["id"]


def test_tensorboard_hides_lost_steps(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="tensorboard is not installed")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    drive("tensorboard", tmp_path, 0, 6, end=False)
    drive("tensorboard", tmp_path, 4, 10, end=True)
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    loss = events.Scalars("train/loss")
    assert [point.step for point in loss] == list(range(1, 11))
    assert [point.value for point in loss] == pytest.approx([10.0 / step for step in range(1, 11)])
    assert "train/grad_norm" not in events.Tags()["scalars"]
    assert [point.value for point in events.Scalars("validation/val_bits_per_byte")][-1] == 1.25


def test_wandb_offline_stays_in_the_run_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb", reason="wandb is not installed")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    drive("wandb", tmp_path, 0, 3, end=True)
    files = list(tmp_path.glob("wandb/offline-run-*/run-*.wandb"))
    assert len(files) == 1 and files[0].stat().st_size > 0


def test_trackio_keeps_every_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    pytest.importorskip("trackio", reason="trackio is not installed")
    from trackio.sqlite_storage import SQLiteStorage

    drive("trackio", tmp_path, 0, 3, end=True)
    rows = SQLiteStorage.get_logs("meshwright", "trial")
    assert [row["train/loss"] for row in rows if "train/loss" in row] == pytest.approx([10.0, 5.0, 10.0 / 3])
