"""meshwright plan on several clusters: its table, its JSON, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from meshwright.cli.main import main
from meshwright.spec import UserError, load

WISH = ["plan", "meta-llama/Llama-3.2-1B-Instruct", "--batch-tokens", "256k", "--seq-len", "4096", "--no-why"]
THREE = [*WISH, "--cluster", "h100:4,a100:4,b300", "--objective", "cost"]


def test_a_table_of_the_best_plan_of_each_cluster(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "run.toml"
    assert main([*THREE, "--tokens", "1T", "--write", str(file)]) == 0
    shown = capsys.readouterr()
    lines = shown.out.splitlines()
    assert max(map(len, lines)) <= 100
    head = ["#", "cluster", "GPUs", "step", "s", "tok/s", "GB", "days", "USD", "low", "high", "layout"]
    assert lines[0].split() == head
    assert {line.split()[1] for line in lines[1:3]} == {"h100", "a100"}
    words = " ".join(shown.out.split())
    assert "Low and high are of USD for 1T tokens, in 9 of 10 cases." in words
    assert "Not on b300: no price is known of b300; give --price b300=USD for a device and hour." in words
    first = lines[1].split()[1]
    device = {"h100": "H100 SXM 80 GB", "a100": "A100 SXM 80 GB"}[first]
    assert f"llama3.2-1b (1.236B parameters) on 4 x {device}, in bf16 by meshwright" in lines
    assert [line.partition(":")[0] for line in shown.err.splitlines()] == ["h100", "a100", "b300"]
    assert load(file).layout.world_size == 4


def test_json_has_all_clusters_beside_the_best_plans(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*THREE, "--price", "b300=9,a100=0.5", "--top", "2", "--json"]) == 0
    told = json.loads(capsys.readouterr().out.splitlines()[-1])
    rows = told["clusters"]
    assert {row["cluster"]: row["price"] for row in rows} == {"a100": 0.5, "h100": 3.0, "b300": 9.0}
    assert rows[0]["cluster"] == "a100" and told["refused"] == []
    assert told["best"]["step_seconds"] == rows[0]["step_seconds"] and len(told["plans"]) == 2
    assert [row["gpus"] for row in sorted(rows, key=lambda row: row["cluster"])] == [4, 8, 4]


def test_devices_and_a_price_by_name_are_those_of_one_cluster(
    capsys: pytest.CaptureFixture[str],
) -> None:
    def told(*flags: str) -> dict[str, object]:
        assert main([*WISH, "--json", "--top", "1", *flags]) == 0
        found: dict[str, object] = json.loads(capsys.readouterr().out)["best"]
        return found

    plain = told("--cluster", "b300", "--gpus", "2", "--price", "7")
    assert told("--cluster", "b300:2", "--price", "b300=7") == plain and plain["usd_per_billion_tokens"]


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--cluster", "h100,h10"], "cluster: 'h10' is neither .*; did you mean 'h100'"),
        (["--cluster", "h100,h100"], "--cluster: 'h100' is given twice; give each once"),
        (["--cluster", "h100,a100", "--price", "3"], "3 is given for 2 clusters; .*: h100=3,a100=3"),
        (["--cluster", "h100,a100", "--price", "h10=3"], "--price: 'h10' is none of the clusters"),
        (["--cluster", "h100", "--price", "h100=3,h100=4"], "h100 has two prices; give one"),
        (["--cluster", "h100", "--price", "h100="], "'h100=' is not NAME=USD"),
        (["--cluster", "h100", "--price", "cheap"], "'cheap' is not valid: a number from 1e-06 to 1e"),
    ],
)
def test_a_mistake_is_one_sentence(flags: list[str], says: str) -> None:
    with pytest.raises(UserError, match=says):
        main([*WISH, *flags])


def test_why_no_cluster_has_a_plan_is_told_once(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(UserError) as refusal:
        main([*WISH, "--cluster", "h100,a100", "--layout.tp", "3"])
    assert str(refusal.value).count("layout.tp: 3 does not divide") == 1
    assert capsys.readouterr().err.splitlines()[-2:] == ["h100: no plan", "a100: no plan"]
