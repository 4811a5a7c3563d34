"""`meshwright goodput`: what it prints, and the units that it takes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from stand_ins import last_json

from meshwright.cli.main import main
from meshwright.spec import UserError

SYSTEM = ["--save-seconds", "5", "--restart-seconds", "600", "--device-mtbf-hours", "50000"]
LOST = ["goodput", "--step-seconds", "5", *SYSTEM]


def test_goodput_prints_what_is_left_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    run = ["--devices", "10000", "--batch-tokens", "1000000", "--tokens", "1e12", "--price", "2"]
    assert main([*LOST, *run, "--background-seconds", "60", "--runs", "20", "--json"]) == 0
    found = last_json(capsys)
    assert found["mtbf_seconds"] == 5 * 3600 and found["steps"] == 10**6
    assert found["effective"] + found["saving"] + found["lost_work"] + found["restarting"] == pytest.approx(1)
    assert found["cost"] == pytest.approx(2 * 10000 * 24 * found["days"])
    played = found["simulated"]
    assert abs(played["effective"] - found["effective"]) < 4 * played["standard_error"]
    assert played["low"] < played["effective"] < played["high"]


def test_goodput_takes_what_a_run_under_faults_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report = tmp_path / "chaos.json"
    report.write_text(json.dumps({"save_seconds": 0.25, "restart_seconds": 40.0}))
    asked = ["goodput", "--step-seconds", "5", "--mtbf-hours", "3", "--json"]
    found = [
        json.loads(capsys.readouterr().out)
        for words in (
            ["--save-seconds", "0.25", "--restart-seconds", "40"],
            ["--chaos", str(report)],
            ["--chaos", str(report), "--restart-seconds", "600"],
        )
        if main([*asked, *words]) == 0
    ]
    assert found[0] == found[1]
    assert found[2]["effective"] < found[1]["effective"]
    report.write_text(json.dumps({"save_seconds": None, "restart_seconds": 40.0}))
    with pytest.raises(UserError, match=r"--save-seconds: the run of .* did not measure it"):
        main([*asked, "--chaos", str(report)])


def test_goodput_takes_tokens_as_people_write_them(capsys: pytest.CaptureFixture[str]) -> None:
    found = []
    for batch, tokens in (("1000000", "1.5T"), ("1M", "1.5e12"), ("1000k", "1,500B")):
        run = ["--devices", "10000", "--batch-tokens", batch, "--tokens", tokens]
        assert main([*LOST, *run, "--json"]) == 0
        found.append(last_json(capsys))
    assert found[0] == found[1] == found[2] and found[0]["steps"] == 1_500_000


def test_goodput_tells_people_only_what_can_be_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*LOST, "--devices", "1", "--every", "100"]) == 0
    lines = capsys.readouterr().out.splitlines()
    names = ["failures", "save every", "effective", "saving", "lost work", "restarting"]
    assert [line[:10].strip() for line in lines] == names
    assert "100 steps, 8:20 of training" in lines[1]
