"""`meshwright simulate`: figures, files and the lines that people read."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from stand_ins import last_json

from meshwright.cli.main import main
from meshwright.spec import load

PIPELINE = ["simulate", "--layout.pp", "4", "--layout.micro_batch", "1"]


def test_simulate_prints_figures_by_rank_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*PIPELINE, "--layout.schedule", "zb-h1", "--json"]) == 0
    found = last_json(capsys)
    assert (found["schedule"], found["ranks"], found["virtual"], found["microbatches"]) == ("zb-h1", 4, 1, 16)
    assert found["step_seconds"] > 0 and min(found["bubbles"]) < found["bubble"] < max(found["bubbles"])
    assert found["peak_activations"] == [4, 4, 4, 4] and len(found["peak_activation_bytes"]) == 4


def test_simulate_takes_its_own_units(capsys: pytest.CaptureFixture[str]) -> None:
    """1F1B with one microbatch on two ranks: two forwards, two backwards, two messages."""
    words = ["--layout.pp", "2", "--layout.schedule", "1f1b", "--train.batch_tokens", "512"]
    words += ["--forward", "10", "--input", "20", "--weight", "5"]
    words += ["--latency", "1000", "--bandwidth", "0.5", "--json"]
    main(["simulate", *words])
    found = last_json(capsys)
    message = 1e-3 + found["message_bytes"] / 0.5e9
    assert found["step_seconds"] == pytest.approx(2 * 0.010 + 2 * 0.025 + 2 * message)
    assert found["flops"] is None


def test_a_faster_device_takes_less_time(capsys: pytest.CaptureFixture[str]) -> None:
    seconds = []
    for rate in ("100", "200"):
        main([*PIPELINE, "--tflops", rate, "--latency", "0", "--bandwidth", "1e12", "--json"])
        seconds.append(last_json(capsys)["step_seconds"])
    assert seconds[0] == pytest.approx(2 * seconds[1], rel=1e-3)


def test_simulate_writes_what_can_be_looked_at(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page, trace = tmp_path / "step.html", tmp_path / "step.json"
    assert main([*PIPELINE, "--out", str(page), "--trace", str(trace)]) == 0
    assert "<canvas" in page.read_text(encoding="utf-8")
    assert len(json.loads(trace.read_text(encoding="utf-8"))["traceEvents"]) > 4 * 2 * 16
    assert f"wrote {page}\nwrote {trace}\n" in capsys.readouterr().out


@pytest.mark.parametrize(
    "words",
    [
        ["--model.preset", "gpt3-175b", "--data.seq_len", "2048", "--layout.pp", "16", "--layout.schedule",
         "interleaved", "--layout.virtual", "6", "--train.batch_tokens", "1572864"],
        ["--model.layers", "64", "--layout.pp", "64"],
        ["--layout.pp", "2", "--forward", "1234567.891", "--latency", "123456.789"],
        [],
    ],
    ids=" ".join,
)  # fmt: skip
def test_what_simulate_prints_is_readable(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", *words]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 100
    shown = [line.split()[0] for line in lines[lines.index("") :] if line] if "" in lines else []
    ranks = load(
        None, [(w[2:], v) for w, v in zip(words[::2], words[1::2], strict=True) if "." in w]
    ).layout.pp
    assert shown == (["rank", *map(str, range(ranks))] if ranks <= 16 else [])


@pytest.mark.parametrize("schedule", ["zb-v", "1f1b"])
def test_a_bubble_is_explained(schedule: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Stages that are made equal add nothing to it, nor do links without cost."""

    def causes(*words: str) -> dict[str, float]:
        assert (
            main([*PIPELINE, "--layout.schedule", schedule, "--model.preset", "small", *words, "--json"]) == 0
        )
        result = last_json(capsys)
        found = result["bubble_by_cause"]
        assert sum(found.values()) == pytest.approx(result["bubble"], abs=1e-12)
        return dict(found)

    both = causes()
    assert min(both.values()) > 0.01
    assert causes("--latency", "0", "--bandwidth", "1e30")["links"] == pytest.approx(0, abs=1e-9)
    assert causes("--forward", "3")["stages"] == pytest.approx(0, abs=1e-9)
    assert main([*PIPELINE, "--layout.schedule", schedule, "--model.preset", "small"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert f"bubble is {100 * both['schedule']:.2f}% the schedule itself, " in text
