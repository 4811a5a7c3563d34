"""Facts of a run's record: where it ran, what differs, its ranks and memory, and what to do with it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from meshwright.cli.main import main
from meshwright.report import run_facts as facts
from meshwright.report.curves import MOST_PLACES, axes
from meshwright.report.run_page import write_report
from meshwright.runs.record import read_run
from recorded_runs import MIB, RESULT, record_run


def test_the_page_tells_machine_ranks_and_what_differs(tmp_path: Path) -> None:
    page = write_report(record_run(tmp_path / "run", flags={"train.lr": "0.0125"})).read_text("utf-8")
    assert (
        "A &lt;Processor&gt;, 8 cores" in page and "2 hosts: node0 and others" in page and "2 ranks" in page
    )
    rows = page[page.index("<h2>What differs from the defaults</h2>") :]
    assert "train.lr" in rows and "0.0125" in rows
    ranks = page[page.index("<h2>Ranks</h2>") :]
    for words in ("node1", "dp = 1", "250 ms", "60.0%", "600.0 MiB"):
        assert words in ranks, words


def test_keys_that_differ_are_those_of_the_preset_and_the_flags(tmp_path: Path) -> None:
    run = read_run(record_run(tmp_path, flags={"model.preset": "tiny", "train.lr": "0.0125"}))
    changed = {key: (own, default) for key, own, default in facts.changed_keys(run)}
    assert changed.keys() == {"layout.dp", "train.lr"}
    assert changed["layout.dp"] == (2, 1) and changed["train.lr"][0] == 0.0125


def test_keys_that_an_older_program_did_not_know_are_not_told(tmp_path: Path) -> None:
    record_run(tmp_path)
    info = json.loads((tmp_path / "run.json").read_text())
    del info["spec"]["train"]["lr"], info["spec"]["recovery"]
    info["spec"]["model"]["preset"] = "of a version to come"
    (tmp_path / "run.json").write_text(json.dumps(info))
    told = {key for key, _, _ in facts.changed_keys(read_run(tmp_path))}
    assert (
        "layout.dp" in told and "train.lr" not in told and not any(key.startswith("recovery") for key in told)
    )


def test_memory_of_python_is_named_so(tmp_path: Path) -> None:
    parts = facts.memory(RESULT, 600 * MIB, "cpu")
    assert parts["before the model: Python, libraries, corpus"] == 300 * MIB
    assert parts["activations and other"] == 180 * MIB
    assert sum(parts.values()) == 600 * MIB
    before = {**RESULT, "ranks": None}  # a record of an earlier version
    assert facts.memory(before, 600 * MIB, "cpu")["activations and other"] == 480 * MIB


def test_the_commands_are_those_that_the_folder_allows(tmp_path: Path) -> None:
    ended = dict(facts.next_commands(read_run(record_run(tmp_path / "my run"))))
    assert ended["train longer"].endswith("my run' --resume auto --train.steps 80")
    assert ended["write text"].endswith("--prompt 'def main():'")
    assert all("my run'" in command for command in ended.values())
    (tmp_path / "my run" / "chat_template.jinja").write_text("{{ messages }}")
    ended = dict(facts.next_commands(read_run(tmp_path / "my run")))
    assert (
        ended["talk to it"] == f"meshwright generate '{tmp_path}/my run' --chat" and "write text" not in ended
    )
    going = dict(facts.next_commands(read_run(record_run(tmp_path / "going", result=None))))
    assert "go on" in going and "write text" in going and "train longer" not in going
    (tmp_path / "going" / "events.jsonl").write_text("")
    unsaved = dict(facts.next_commands(read_run(tmp_path / "going")))
    assert unsaved.keys() == {"go on", "compare with another run"}


def test_the_time_is_that_of_training_without_pauses(tmp_path: Path) -> None:
    """A second start goes on from step 30 of 40, which costs the time of steps 31 to 40, and a pause."""
    record_run(tmp_path)
    info = json.loads((tmp_path / "run.json").read_text())
    info["starts"].append({"step": 30})
    (tmp_path / "run.json").write_text(json.dumps(info))
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    rows = [row for row in rows if row["step"] <= 30] + [
        {"step": step, "loss": 1.0, "tokens": 1024 * step, "elapsed_seconds": 20 + 0.25 * (step - 30)}
        for step in range(31, 36)
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = axes(read_run(tmp_path))
    time = dict(zip(found["step"], found["time"], strict=True))
    assert time[0] == 0 and time[30] == pytest.approx(2 + 7.5) and time[35] == pytest.approx(9.5 + 21.25)
    assert dict(zip(found["step"], found["tokens"], strict=True))[35] == 35 * 1024
    figures = facts.figures(read_run(tmp_path))  # whose result has the 10 s of the last start
    assert figures["seconds"] == pytest.approx(9.5 + 21.25)


def test_axes_of_a_long_run_stay_short(tmp_path: Path) -> None:
    found = axes(read_run(record_run(tmp_path, steps=1000)))
    assert {len(values) for values in found.values()} <= {*range(MOST_PLACES + 3)}
    assert found["step"][-1] == 1000 and found["tokens"][-1] == 1024_000


def test_a_record_without_times_has_steps_alone(tmp_path: Path) -> None:
    record_run(tmp_path)
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "loss": 1.0}\n')
    assert axes(read_run(tmp_path)) == {"step": [0, 1]}


def test_report_writes_the_page_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = record_run(tmp_path / "run", result=None)
    assert main(["report", str(out)]) == 0
    told = capsys.readouterr().out
    assert (out / "report.html").is_file() and f"wrote {out / 'report.html'}" in told
    assert main(["report", str(out), "--out", str(tmp_path / "other.html"), "--json"]) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert found["page"] == str(tmp_path / "other.html") and (tmp_path / "other.html").is_file()
    assert found["runs"][0]["steps"] == 40 and found["keys"] == {}
