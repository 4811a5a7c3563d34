"""Trackers get the rows of the run; a package that is missing is a sentence before training starts."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from meshwright import api
from meshwright.api.train_rank import _observers
from meshwright.checkpoint import Lease
from meshwright.islands.island_log import island_folder
from meshwright.report.trackers import make_trackers
from meshwright.spec import UserError, load
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


PACKAGES = [("tensorboard", "torch.utils.tensorboard"), ("wandb", "wandb"), ("trackio", "trackio")]


@pytest.mark.parametrize(("name", "module"), PACKAGES)
def test_a_missing_package_is_named(
    name: str, module: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(UserError, match=rf"train\.trackers: '{name}' .*pip install 'meshwright\[trackers\]'"):
        make_trackers([name], tmp_path, "trial", {})


ISLANDS = {
    "outer.every": "2", "outer.quorum": "1", "outer.momentum": "0", "layout.replicate": "2", "layout.dp": "1",
}  # fmt: skip


@pytest.mark.parametrize("islands", [{}, ISLANDS, ISLANDS | {"outer.island": "0"}])
@pytest.mark.parametrize(("name", "module"), PACKAGES)
def test_a_missing_package_leaves_no_folder(
    name: str, module: str, islands: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    keys = {"data.corpus": "synthetic", "data.tokenizer": "byte", "train.trackers": name, **islands}
    spec = load(None, [("model.preset", "tiny"), ("train.steps", "1"), *keys.items()])
    with pytest.raises(UserError, match=rf"train\.trackers: '{name}' cannot be imported"):
        api.train(spec, out=tmp_path / "run", quiet=True)
    assert not (tmp_path / "run").exists()


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


class RecordingTrackio:
    """Stands for the trackio package, which resumes the newest run of a name: rows by number of the run."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self.rows: list[list[tuple[int, dict[str, Any]]]] = []

    def init(self, project: str, name: str, resume: str, **_: Any) -> SimpleNamespace:
        if resume == "never" or name not in self.names:
            self.names.append(name)
            self.rows.append([])
        number = len(self.names) - 1 - self.names[::-1].index(name)
        return SimpleNamespace(
            log=lambda values, step: self.rows[number].append((step, values)), finish=lambda: None
        )


def test_runs_in_folders_of_one_name_have_curves_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trackio, wandb = RecordingTrackio(), RecordingWandb()
    monkeypatch.setitem(sys.modules, "trackio", trackio)
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    for name in ("trackio", "wandb"):
        drive(name, tmp_path / "x" / "trial", 0, 2, end=False)
        drive(name, tmp_path / "y" / "trial", 0, 2, end=False)
        drive(name, tmp_path / "x" / "trial", 2, 4, end=True)
    steps = [[step for step, values in rows if "train/loss" in values] for rows in trackio.rows]
    assert steps == [[1, 2, 3, 4], [1, 2]]
    assert len(set(trackio.names)) == 2 and all(name.startswith("trial-") for name in trackio.names)
    ids = [settings["id"] for settings in wandb.inits]
    assert ids[0] == ids[2] != ids[1]


@pytest.mark.parametrize(("island", "name"), [(None, "alpha"), (1, "alpha/island.1")])
def test_an_island_has_the_name_of_its_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, island: int | None, name: str
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", package := RecordingWandb())
    keys = {"outer.every": 2, "outer.quorum": 1, "outer.island": island, "layout.replicate": 2}
    flags = [(key, str(value)) for key, value in keys.items()] if island is not None else []
    spec = load(None, [("train.trackers", "wandb"), ("layout.dp", "1"), *flags])
    out = tmp_path / "alpha" if island is None else island_folder(tmp_path / "alpha", island)
    with _observers(spec, out, Lease(out, "test"), quiet=True) as observers:
        observers.observers[-1].on_start({"step": 0})
    assert package.inits[0]["name"] == name


def test_tensorboard_hides_what_a_rollback_gave_up(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="tensorboard is not installed")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    with Observers(make_trackers(["tensorboard"], tmp_path, "trial", {})) as observer:
        observer.on_start({"step": 0, "last_step": 8})
        for step in range(1, 9):
            observer.on_step({"step": step, "loss": 1.0 if step < 7 else 100.0})
        observer.on_event("rollback", {"step": 6, "from": 8})
        for step in (7, 8):
            observer.on_step({"step": step, "loss": 0.5})
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    points = [(point.step, point.value) for point in events.Scalars("train/loss")]
    assert points == [*((step, 1.0) for step in range(1, 7)), (7, 0.5), (8, 0.5)]
    assert [point.step for point in events.Scalars("event/rollback")] == [6]


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

    for folder, first, last in (("x", 0, 2), ("y", 0, 3), ("x", 2, 3)):
        drive("trackio", tmp_path / folder, first, last, end=True)
    for folder in ("x", "y"):
        own = json.loads((tmp_path / folder / "trackers.json").read_text())["trackio"]
        rows = SQLiteStorage.get_logs("meshwright", f"trial-{own}")
        losses = [row["train/loss"] for row in rows if "train/loss" in row]
        assert losses == pytest.approx([10.0, 5.0, 10.0 / 3])
