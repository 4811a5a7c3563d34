"""The page while a run goes on: it is there after evaluations, checkpoints and stops, and costs little."""

from __future__ import annotations

from pathlib import Path

import pytest

from meshwright.report import live_report
from meshwright.report.live_report import SHARE, LiveReport
from meshwright.runs.record import RunRecord
from meshwright.spec import load
from meshwright.train.callbacks import Observers
from recorded_runs import record_run


class Clock:
    """A clock that moves by `step` seconds whenever it is read."""

    def __init__(self, step: float) -> None:
        self.now, self.step = 100.0, step

    def monotonic(self) -> float:
        self.now += self.step
        return self.now


def test_the_page_is_there_while_the_run_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live_report, "time", Clock(step=0.0))  # pages that cost nothing
    page = tmp_path / "report.html"
    with Observers([RunRecord(tmp_path), LiveReport(tmp_path)]) as observer:
        observer.on_start({"spec": load().to_json(), "step": 0, "last_step": 40, "device": "cpu"})
        assert not page.exists()
        observer.on_step({"step": 1, "loss": 7.125})
        assert "no result yet" in page.read_text("utf-8") and "7.1250" in page.read_text("utf-8")
        observer.on_step({"step": 2, "loss": 6.75})
        assert "6.7500" not in page.read_text("utf-8")
        observer.on_eval({"step": 2, "val_loss": 6.5})
        assert "6.7500" in page.read_text("utf-8")
        observer.on_step({"step": 3, "loss": 6.375})
        observer.on_event("checkpoint", {"step": 3})
        assert "6.3750" in page.read_text("utf-8")
        assert not [path for path in tmp_path.iterdir() if "tmp" in path.name]


def test_a_slow_page_is_not_written_again_soon(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(step=0.5)
    monkeypatch.setattr(live_report, "time", clock)
    record_run(tmp_path, result=None)
    page, live = tmp_path / "report.html", LiveReport(tmp_path)
    live.on_event("checkpoint", {})
    page.unlink()
    clock.now += 0.5 / SHARE - 2
    live.on_eval({})
    assert not page.exists()
    clock.now += 2
    live.on_eval({})
    assert page.exists()
    page.unlink()
    live.on_event("stopped", {})  # the last one of this start
    assert page.exists()


def test_a_lease_that_is_lost_writes_nothing(tmp_path: Path) -> None:
    class Lost:
        def fenced(self) -> None:
            raise RuntimeError("another run has it")

    record_run(tmp_path, result=None)
    with pytest.raises(RuntimeError):
        LiveReport(tmp_path, Lost()).on_eval({})  # type: ignore[arg-type]
    assert not (tmp_path / "report.html").exists()
