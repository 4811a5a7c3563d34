"""Figures of presets on one device: those of a plan, and what is said of where they come from."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from meshwright import api
from meshwright.cli.main import main
from meshwright.hardware.cluster import ProfiledTimes
from meshwright.hardware.find import cluster
from meshwright.hardware.hardware_file import write
from meshwright.planner.preset_figures import SEQ_LEN, preset_figures
from meshwright.rank import auto_layout
from meshwright.spec import UserError
from meshwright.spec.presets import PRESETS

H100 = cluster("h100-sxm")


def test_figures_are_those_of_the_plan_of_the_same_step() -> None:
    found = {row.preset: row for row in preset_figures(H100)}
    assert [*found] == [*PRESETS]
    for name in ("tiny", "gpt2", "smollm2-1.7b", "llama3.2-3b", "moe-small"):
        ours = found[name].plan
        best = api.plan(name, H100, gpus=1, seq_len=SEQ_LEN, batch_tokens="16K", top=1).best
        assert ours is not None and ours.spec == best.spec
        assert ours.tokens_per_second == best.tokens_per_second
        assert ours.memory.device < H100.device.memory
        low, high = found[name].to_json()["tokens_per_second_interval"]
        assert low < best.tokens_per_second < high
    for name in ("qwen3-4b", "llama3-8b"):
        assert found[name].plan is None
        with pytest.raises(UserError, match="nothing fits"):
            api.plan(name, H100, gpus=1, seq_len=SEQ_LEN, batch_tokens="16K", top=1)


def test_states_are_18_bytes_a_parameter() -> None:
    """2 for the weight in bf16, 4 each for the exact weight, the sum of gradients and two moments; beside
    them Adam's counts of steps, routers' biases and counts of their experts' load."""
    for row in preset_figures(None):
        assert row.plan is None
        assert 0 <= row.state_bytes - 18 * row.model.parameters < 1e-3 * row.state_bytes


def shown(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[list[str], str]:
    """Return the lines of the table, and what follows it as one line."""
    assert main(["spec", "presets", *words]) == 0
    printed = capsys.readouterr().out
    assert max(map(len, printed.splitlines())) <= 100
    table, _, after = printed.partition("\n\n")
    return table.splitlines(), " ".join(after.split())


def test_what_spec_presets_prints_says_that_it_is_predicted(capsys: pytest.CaptureFixture[str]) -> None:
    table, after = shown(capsys, "--cluster", "h100-sxm")
    named = "preset parameters active layers hidden max seq len states GB step GB tok/s"
    assert " ".join(table[0].split()) == named
    assert [line.split()[0] for line in table[1:]] == [*PRESETS]
    speeds = {line.split()[0]: line.split()[-1] for line in table[1:]}
    assert speeds["llama3.2-1b"] != "-" and speeds["deepseek-v3"] == "-"
    assert "Predicted for H100 SXM 80 GB in bf16, and not measured: " in after
    assert "meshwright profile --out here.json" in after


def test_a_hardware_file_that_was_measured_is_said_to_be(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(replace(cluster("cpu", 2), measured=ProfiledTimes()), tmp_path / "here.json")
    _, after = shown(capsys, "--cluster", str(tmp_path / "here.json"))
    assert "Predicted for 2 cores in fp32, from measurements of meshwright profile." in after


def test_a_gpu_that_is_not_known_has_no_predictions(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(auto_layout, "this_machine", lambda: ("Unheard of 9", None))
    table, after = shown(capsys)
    assert {line.split()[-1] for line in table[1:]} == {"-"}
    assert "Nothing is predicted, as the GPU Unheard of 9 is not in the catalogue; measure it:" in after
    assert main(["spec", "presets", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["cluster"] is None and found["presets"][0]["tokens_per_second"] is None


def test_by_default_this_machine_is_predicted(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["spec", "presets", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    name, known = auto_layout.this_machine()
    assert found["device"] == name and found["measured"] is False
    assert found["cluster"] == (known and known.name)
