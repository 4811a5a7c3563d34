"""Several runs in one page: their curves, their figures, and the keys in which they differ."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from meshwright import api
from meshwright.cli.main import main
from meshwright.spec import UserError
from recorded_runs import RESULT, record_run


def test_runs_are_compared_in_one_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first = record_run(tmp_path / "a<b>")
    second = record_run(
        tmp_path / "second",
        steps=60,
        flags={"train.lr": "0.0125"},
        scale=7,
        result={**RESULT, "final_loss": 1.2},
    )
    assert main(["report", str(first), str(second), "--json"]) == 0
    told = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert [run["final_loss"] for run in told["runs"]] == [1.5, 1.2]
    assert told["keys"].keys() == {"train.lr"} and told["keys"]["train.lr"][1] == 0.0125
    page = (first / "comparison.html").read_text("utf-8")
    assert told["page"] == str(first / "comparison.html")
    assert "a&lt;b&gt;" in page and "<b>second" not in page and "-20.0%" in page and "train.lr" in page
    charts = [
        json.loads(text) for text in re.findall(r'<script type="application/json">(.*?)</script>', page, re.S)
    ]
    loss = charts[0]["series"]
    assert [(curve["name"], curve["run"], curve["x"][-1]) for curve in loss] == [
        ("a<b>", 0, 40),
        ("second", 1, 60),
    ]
    assert loss[1]["y"][3] == pytest.approx(7 / 4**0.5)
    assert "dash" in page and not re.search(r"""(?:src|href|action)\s*=|url\(|@import|https?://""", page)


def test_people_are_told_figures_and_keys(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = [
        record_run(tmp_path / name, flags={"train.seed": seed}) for name, seed in (("x", "1"), ("y", "2"))
    ]
    assert main(["report", *map(str, runs), "--out", str(tmp_path / "both.html")]) == 0
    told = capsys.readouterr().out
    assert re.search(r"Training loss +1\.5000 +1\.5000", told) and re.search(r"train\.seed +1 +2", told)
    assert f"wrote {tmp_path / 'both.html'}" in told


def test_runs_that_are_the_same_say_so(tmp_path: Path) -> None:
    runs = [record_run(tmp_path / parent / "run") for parent in ("one", "two")]
    page = Path(api.report(runs)["page"]).read_text("utf-8")
    assert "The specs of these runs are the same." in page
    assert "one/run" in page and "two/run" in page  # folders of one name are told apart


def test_what_cannot_be_compared_is_a_sentence(tmp_path: Path) -> None:
    run = record_run(tmp_path / "run")
    with pytest.raises(UserError, match="is given twice"):
        api.report([run, tmp_path / "." / "run"])
    with pytest.raises(UserError, match=r"holds no run\.json"):
        api.report([run, tmp_path])
    with pytest.raises(UserError, match="at most 8"):
        api.report([tmp_path / str(number) for number in range(9)])
    with pytest.raises(UserError, match="--out"):
        api.report([run], out=tmp_path / "no" / "page.html")
