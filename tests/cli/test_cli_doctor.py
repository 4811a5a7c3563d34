"""Calls, output and exit codes of `doctor`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from stand_ins import be_rank, last_json, stand_in

from meshwright.cli.main import main
from meshwright.spec import UserError, load

CLEAN: dict[str, Any] = {
    "healthy": True, "fails": False, "ranks": 2, "hosts": 1, "findings": [], "measured": {}, "seconds": 0.5,
}  # fmt: skip
WARNING = {
    "check": "clocks", "fails": False, "sentence": "a clock is late", "remedy": "set it", "ranks": [1],
    "where": "rank 1 on b",
}  # fmt: skip
MEASURED = {
    "disk": {"folder": "/runs", "bytes_per_second": 1e9, "checkpoint_bytes": 5e9, "save_seconds": 5.0},
    "groups": [
        {
            "axis": "shard", "ranks": 2, "groups": 1, "slowest": [0, 1], "first_seconds": 0.05, "bytes": 4e6,
            "seconds": 0.004, "expected_seconds": None,
        }
    ],
    "links": [{"from": 1, "to": 0, "bytes": 4e6, "seconds": 0.004, "expected_seconds": 0.002}],
}  # fmt: skip


def test_doctor_exits_with_1_where_a_run_would_fail(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    called = stand_in(monkeypatch, "doctor", CLEAN)
    assert main(["doctor"]) == 0
    assert capsys.readouterr().out == "nothing found: 2 ranks on 1 host, 0.5 s\n"
    assert called.only == ((None,), {"nproc": None, "out": None, "cluster": None})
    stand_in(monkeypatch, "doctor", CLEAN | {"healthy": False, "findings": [WARNING]})
    assert main(["doctor"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "warning: clocks: a clock is late (rank 1 on b); set it",
        "1 finding, 0 of which a run would fail: 2 ranks on 1 host, 0.5 s",
    ]
    worse = {"findings": [WARNING | {"fails": True, "where": ""}], "healthy": False, "fails": True}
    stand_in(monkeypatch, "doctor", CLEAN | worse)
    assert main(["doctor"]) == 1
    assert capsys.readouterr().out.startswith("FAILS: clocks: a clock is late; set it\n")
    assert main(["doctor", "--json"]) == 1
    assert last_json(capsys)["fails"] is True


def test_doctor_prints_what_it_has_measured(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stand_in(monkeypatch, "doctor", CLEAN | {"measured": MEASURED})
    assert main(["doctor"]) == 0
    shown = capsys.readouterr().out
    assert "disk: /runs takes 1 GB/s of all ranks together, a checkpoint of 5 GB in 5 s" in shown
    assert "rank 1 to 0" in shown and "2 ms" in shown and "1 GB/s" in shown


def test_doctor_examines_the_run_that_is_given(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    called = stand_in(monkeypatch, "doctor", CLEAN)
    main(["doctor", "--layout.dp", "2", "--out", str(tmp_path), "--nproc", "2"])
    (spec,), named = called.only
    assert spec.layout.dp == 2 and named == {"nproc": 2, "out": tmp_path, "cluster": None}


def test_ranks_other_than_the_first_print_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    be_rank(monkeypatch, 1)
    stand_in(monkeypatch, "doctor", {})
    assert main(["doctor"]) == 0 and capsys.readouterr().out == ""


def test_a_runs_folder_is_where_it_goes_on_and_a_file_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"--out: .*file is a file, not a folder; give another --out"):
        main(["doctor", "--model.preset", "tiny", "--nproc", "1", "--out", str(tmp_path / "file")])
    (tmp_path / "run.json").write_text(json.dumps({"spec": load(None, []).to_json()}))
    called = stand_in(monkeypatch, "doctor", CLEAN)
    assert main(["doctor", str(tmp_path)]) == 0
    assert called.only[1]["out"] == tmp_path
