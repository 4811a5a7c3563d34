"""The last line of `train --json` and `chaos --json`, however the run ended."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest
from stand_ins import be_rank, last_json, stand_in

from meshwright import api
from meshwright.cli.main import find, main
from meshwright.cli.parser import parse
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


@pytest.mark.parametrize("corpus", ["stdlib", "synthetic", "it.txt"])
def test_a_run_that_finishes_names_its_files_and_the_next_commands(
    corpus: str, run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stand_in(monkeypatch, "train", {"final_loss": 1.5, "parameters_sha256": "0" * 64})
    out = run.rename(run.with_name(f"{run.name} mine"))
    (out / "report.html").touch()
    words = ["train", "--layout.dp", "1", "--out", str(out), "--data.corpus", corpus]
    assert main(words) == 0
    shown = capsys.readouterr().out.splitlines()
    assert shown[:2] == [
        f"report      {out}/report.html",
        f"checkpoint  {out}/checkpoints/step-00000006",
    ]
    commands = [line[12:] for line in shown[2:]]
    assert [shlex.split(command)[:3] for command in commands] == [
        ["meshwright", verb, str(out)] for verb in ("generate", "export")[corpus == "synthetic" :]
    ]
    for command in commands:
        name, *rest = shlex.split(command)[1:]
        parse(find(name), rest)
    assert main([*words, "--quiet"]) == 0
    assert capsys.readouterr().out == ""


def test_a_run_without_files_names_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stand_in(monkeypatch, "train", {"final_loss": 1.5})
    moe = ["--model.preset", "moe-tiny", "--model.family", "llama", "--layout.dp", "1"]
    (tmp_path / "checkpoints" / "step-00000001").mkdir(parents=True)
    assert main(["train", *moe, "--out", str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    assert "report" not in shown.splitlines()[-2] and "meshwright export" not in shown
    assert shown.splitlines()[-1] == f'next        meshwright generate {tmp_path} --prompt "def "'


def test_a_model_with_a_chat_template_is_talked_to(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stand_in(monkeypatch, "train", {"final_loss": 1.5})
    (run / "chat_template.jinja").write_text("{{ messages }}")
    assert main(["train", "--layout.dp", "1", "--out", str(run), "--data.corpus", "it.txt"]) == 0
    command = capsys.readouterr().out.splitlines()[-2].removeprefix("next").strip()
    assert command == f"meshwright generate {run} --chat"
    parse(find("generate"), shlex.split(command)[2:])


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
