"""The last line of `train --json` and `chaos --json`, however the run ended."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from stand_ins import be_rank, last_json, stand_in

from meshwright import api
from meshwright.cli.main import main
from meshwright.rank.failure import RanksFailed
from meshwright.spec import UserError
from meshwright.spec.errors import REQUEUE, Stopped, StorageError

SAVED = "stopped by SIGTERM after step 7, which is saved; go on with --resume auto"
EVENTS: list[dict[str, Any]] = [
    {"kind": "failure", "step": 9},
    {"kind": "resumed", "step": 4},
    {"kind": "checkpoint", "step": 6},
    {"kind": "warning", "message": "no step"},
    {"step": "of a stranger"},
]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """The folder of a run that resumed at step 4, did step 7, and has a checkpoint of step 6."""
    rows = {"metrics.jsonl": [{"step": step, "loss": 1.0} for step in (1, 5, 7)], "events.jsonl": EVENTS}
    for name, lines in rows.items():
        (tmp_path / name).write_text("".join(json.dumps(line) + "\n" for line in lines))
    (tmp_path / "run.json").write_text("{}")
    (tmp_path / "checkpoints" / "step-00000006").mkdir(parents=True)
    return tmp_path


def raising(monkeypatch: pytest.MonkeyPatch, name: str, error: BaseException) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise error

    monkeypatch.setattr(api, name, fail)


ENDS = [
    (Stopped(SAVED, REQUEUE), "stopped", 75, SAVED),
    (Stopped("stopped by SIGTERM", 143), "stopped", 143, "stopped by SIGTERM"),
    (KeyboardInterrupt(), "stopped", 130, "stopped by SIGINT"),
    (StorageError("the disk is full"), "failed", 76, "the disk is full"),
    (RanksFailed("rank 1 of 2 was ended by SIGKILL", 137), "failed", 137, "rank 1 of 2 was ended by SIGKILL"),
    (RanksFailed("a crash loop", 79), "failed", 79, "a crash loop"),
    (ZeroDivisionError("a bug"), "failed", 1, "ZeroDivisionError: a bug"),
]


@pytest.mark.parametrize(("error", "status", "code", "reason"), ENDS)
def test_a_run_that_does_not_finish_says_so_on_the_last_line(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
    error: BaseException, status: str, code: int, reason: str,
) -> None:  # fmt: skip
    raising(monkeypatch, "train", error)
    with pytest.raises(type(error)):
        main(["train", "--layout.dp", "1", "--out", str(run), "--json"])
    told = {"status": status, "exit_code": code, "reason": reason, "out": str(run)}
    assert last_json(capsys) == {**told, "step": 7, "checkpoint": 6}
    with pytest.raises(type(error)):
        main(["train", "--layout.dp", "1", "--out", str(run)])
    assert capsys.readouterr().out == ""


def test_a_run_that_finishes_says_so_beside_its_result(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stand_in(monkeypatch, "train", {"final_loss": 1.5, "steps": 7})
    for words in ([], ["--nodes", "1", "--nproc", "1"]):
        assert main(["train", "--out", str(run), "--json", *words]) == 0
        told = {"status": "finished", "exit_code": 0, "reason": "", "out": str(run)}
        result = {"final_loss": 1.5, "steps": 7, "step": 7, "checkpoint": 6}
        assert last_json(capsys) == told | result


def test_a_mistake_and_a_damaged_record_have_an_object_too(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    unknown = {"out": None, "step": None, "checkpoint": None}
    with pytest.raises(UserError, match=r"layout\.dp"):
        main(["train", "--layout.dp", "-1", "--json"])
    found = last_json(capsys)
    assert found.pop("reason").startswith("--layout.dp: -1 is not valid")
    assert found == {"status": "failed", "exit_code": 2, **unknown}
    (run / "events.jsonl").write_text("torn\n")
    raising(monkeypatch, "train", StorageError("the disk is full"))
    with pytest.raises(StorageError):
        main(["train", "--out", str(run), "--json"])
    found = last_json(capsys)
    assert (found["reason"], found["step"], found["checkpoint"]) == ("the disk is full", None, 6)


def test_of_torchruns_ranks_the_first_says_how_the_run_ended(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    raising(monkeypatch, "train", Stopped(SAVED, REQUEUE))
    for rank in (0, 1):
        be_rank(monkeypatch, rank)
        with pytest.raises(Stopped):
            main(["train", "--out", str(run), "--json"])
        assert bool(capsys.readouterr().out) == (rank == 0)


def test_chaos_says_how_it_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    result = {"holds": False, "oracles": {"ended": False, "rows": True}, "end": "a crash loop"}
    stand_in(monkeypatch, "chaos", result)
    assert main(["chaos", "--out", str(tmp_path), "--json"]) == 1
    reason = "does not hold: the run ended well (a crash loop)"
    told = {"status": "finished", "exit_code": 1, "reason": reason, "out": str(tmp_path)}
    assert last_json(capsys) == {**told, "step": None, "checkpoint": None, **result}
    raising(monkeypatch, "chaos", Stopped("stopped by SIGTERM", 143))
    with pytest.raises(Stopped):
        main(["chaos", "--out", str(tmp_path), "--json"])
    found = last_json(capsys)
    assert (found["status"], found["exit_code"], found["out"]) == ("stopped", 143, str(tmp_path))
