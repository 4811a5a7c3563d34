"""meshwright plan: what it prints, writes and refuses."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from meshwright import api
from meshwright.cli.main import main
from meshwright.planner.cost.software import PROGRAM_NAMES, STACKS, stack_named
from meshwright.spec import UserError, load

WISH = ["plan", "llama3-8b", "--cluster", "h100", "--gpus", "16", "--batch-tokens", "1M", "--seq-len", "4096"]


def test_a_table_of_plans_within_100_columns(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*WISH, "--tokens", "2T", "--progress"]) == 0
    shown = capsys.readouterr()
    lines = shown.out.splitlines()
    assert max(map(len, lines)) <= 100
    assert "batch 1M is taken as 256 sequences of 4,096 tokens = 1,048,576" in shown.out
    assert [line[0] for line in lines if line[:1].isdigit() and line[1:2] == " "] == list("12345")
    assert "Where its time goes" in shown.out and "Where its memory goes" in shown.out
    why, change = "Why not its neighbours, all else as it is:", "What would change the choice:"
    assert lines.index(change) - lines.index(why) > 7 and " slower: " in shown.out.partition(why)[2]
    for figure in ("rate of matrix products", "bandwidth of the network", "memory capacity"):
        assert figure in shown.out.partition(change)[2]
    words = " ".join(shown.out.split())
    assert "2T tokens take the first " in words and " USD. Failures are included" in words
    assert re.search(r"in 9 of 10 cases; its MFU is \d+\.\d% with half of attention's FLOPs", words)
    assert "one each 50,000 hours of a device is assumed" in words and "of the time effective." in words
    assert "Never measured: this program has never been timed on GPUs." in lines
    assert "slowed by messages" in shown.out
    assert "s a step, " in shown.err


def test_json_has_the_best_plan_and_what_was_searched(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*WISH, "--json", "--top", "2", "--layout.tp", "2"]) == 0
    told = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert len(told["plans"]) == 2 and told["best"]["layout"]["tp"] == 2
    assert told["never_measured"] == ["this program has never been timed on GPUs"]
    assert 0.8 * told["best"]["mfu"] < told["best"]["causal_mfu"] < told["best"]["mfu"]
    named = {"layout", "recompute", "step_seconds", "interval", "fits_probability", "mfu", "memory", "parts"}
    assert named | {"tokens_per_second_per_gpu"} <= told["best"].keys()
    assert {"allocated", "reserved", "device", "activations"} <= told["best"]["memory"].keys()
    assert told["searched"]["simulated"] >= 0 and told["searched"]["seconds"] > 0
    assert told["pareto"]
    assert len(told["best"]["neighbours"]) == 6 and told["best"]["assumptions"]
    assert {"change", "verdict", "why", "most", "by"} <= told["best"]["neighbours"][0].keys()
    assert {"name", "value", "turns"} == told["best"]["assumptions"][0].keys()
    assert main([*WISH, "--json", "--top", "2", "--layout.tp", "2", "--no-why"]) == 0
    assert "neighbours" not in json.loads(capsys.readouterr().out.splitlines()[-1])["best"]


@pytest.mark.parametrize(
    ("device", "gpus", "reason"),
    [("h100", "8", r"A simpler plan is first \((?:no|\w+ \d)[^)]*\)"),
     ("a100", "16", r"A surer plan is first \(fits with 9\d% instead of [0-8]\d%; [^)]+\)")],
)  # fmt: skip
def test_the_faster_plan_is_named_where_another_is_first(
    device: str, gpus: str, reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    size = ["--gpus", gpus, "--seq-len", "8k", "--batch-tokens", "1M"]
    assert main(["plan", "llama3-8b", "--cluster", device, *size, "--no-why"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    said = re.search(
        rf"{reason}: the fastest by this model, ([^,]+), would gain "
        r"[0-4]\.\d%, within what the interval can tell apart\.",
        shown,
    )
    assert said is not None and f" {said[1]} 3 " in shown


def test_keys_are_fixed_as_practitioners_write_them(capsys: pytest.CaptureFixture[str]) -> None:
    def best(*flags: str) -> dict[str, Any]:
        assert main([*WISH, "--json", "--no-why", "--top", "1", *flags]) == 0
        found: dict[str, Any] = json.loads(capsys.readouterr().out)["best"]
        return found

    wanted = best("--layout.tp", "4", "--layout.pp", "2", "--recompute.policy", "full")
    assert best("--fix", "tp=4,pp=2", "--fix", "recompute=full") == wanted
    assert best("--fix", "stages=[16,16],pp=2")["layout"]["stages"] == [16, 16]
    assert best("--fix", "pp=4", "--max-stages", "4")["layout"]["virtual"] in (None, 1)
    for flags, says in (
        (["tp"], r"--fix: 'tp' is not valid: 'tp' is not NAME=VALUE; give such as tp=8,pp=4"),
        (["tpp=3"], r"'tpp' is not a key of the layout; did you mean 'tp'\?"),
        (["tp=x"], r'--fix: tp: "x" is not valid: it should be an integer'),
        (["recompute=ful"], r"--fix: recompute: .* did you mean 'full'"),
        (["tp=2", "--fix", "tp=4"], r"--fix: tp is given twice, as 2 and as 4; give it once"),
        (["tp=2", "--layout.tp", "4"], r"--fix: tp is given twice, as 4 and as 2; give it once"),
    ):
        with pytest.raises(UserError, match=says):
            main([*WISH, "--fix", *flags])


@pytest.mark.parametrize("verb", ["plan", "explain"])
def test_the_stacks_are_listed(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([verb, "--help", "stack"]) == 0
    listed = [line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines()]
    assert all([name, stack.describes] in listed for name, stack in STACKS.items())
    with pytest.raises(
        UserError, match=r"one of meshwright \(this program\), .*did you mean 'megatron-core'"
    ) as no:
        main([verb, "x.toml", "--cluster", "h100", "--stack", "megatron-cor"])
    assert all(f"{name} ({stack.describes})" in str(no.value) for name, stack in STACKS.items())


def test_a_program_is_found_by_the_name_that_people_know(capsys: pytest.CaptureFixture[str]) -> None:
    words = [
        "plan",
        "llama3-8b",
        "--cluster",
        "h100",
        "--gpus",
        "8",
        "--batch-tokens",
        "1M",
        "--top",
        "1",
        "--json",
    ]
    found = {}
    for name in ("torchtitan", "fsdp-compiled-loss"):
        assert main([*words, "--stack", name]) == 0
        found[name] = json.loads(capsys.readouterr().out.splitlines()[-1])
        del found[name]["searched"]
    assert found["torchtitan"] == found["fsdp-compiled-loss"]
    assert found["torchtitan"]["stack"] == "fsdp-compiled-loss"
    for name, stack in PROGRAM_NAMES.items():
        assert stack_named(name) is STACKS[stack]


def test_the_cheapest_within_a_time(capsys: pytest.CaptureFixture[str]) -> None:
    wish = ["plan", "llama3-8b", "--cluster", "h100", "--gpus", "8..32", "--batch-tokens", "1M", "--no-why"]
    wish += ["--seq-len", "4096", "--objective", "cost", "--tokens", "1T"]
    assert main([*wish, "--within", "60d", "--json"]) == 0
    best = json.loads(capsys.readouterr().out)["best"]
    assert best["days"] <= 60 and best["gpus"] > 8
    with pytest.raises(UserError, match=r"--within: '3y' is not valid: a time above 0 is needed"):
        main([*wish, "--within", "3y"])


def test_the_best_plan_is_written_as_a_run_file(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    assert main([*WISH, "--write", str(file), "--train.lr", "1e-4"]) == 0
    spec = load(file)
    assert spec.layout.world_size == 16 and spec.train.lr == 1e-4
    assert spec.train.batch_tokens == 1_048_576 and spec.precision.compute == "bf16"


def test_the_page_tells_the_plans(tmp_path: Path) -> None:
    page = tmp_path / "plan.html"
    assert main([*WISH, "--tokens", "2T", "--out", str(page)]) == 0
    text = page.read_text(encoding="utf-8")
    assert "<p>2T tokens take the first " in text and "with causal attention" in text
    assert "Never measured: this program has never been timed on GPUs" in text
    assert "<svg" in text and "https://" not in text.replace("https://www.w3.org", "")


def test_what_is_trained_on_is_written(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    assert main([*WISH, "--no-why", "--write", str(file), "--tokens", "2G"]) == 0
    train = load(file).train
    assert train.tokens == 2_000_000_000 and train.steps is None


def test_a_run_file_that_is_there_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "run.toml"
    file.write_text("# mine")
    with monkeypatch.context() as patch:
        patch.setattr(api, "plan", lambda *_, **__: pytest.fail("it was searched before that was seen"))
        with pytest.raises(UserError, match=r"--write: .*run.toml exists already; remove it, or"):
            main([*WISH, "--write", str(file)])
    assert file.read_text() == "# mine"
    page = tmp_path / "plan.html"
    page.write_text("of before")
    assert main([*WISH, "--no-why", "--out", str(page)]) == 0
    assert page.read_text() != "of before"


def test_a_range_tells_each_number_of_devices(capsys: pytest.CaptureFixture[str]) -> None:
    wish = ["plan", "llama3-70b", "--cluster", "h100", "--batch-tokens", "1M", "--seq-len", "4k", "--no-why"]
    wish += ["--layout.tp", "8"]
    assert main([*wish, "--fix", "cp=1,schedule=1f1b", "--json", "--gpus", "8..32"]) == 0
    shown = capsys.readouterr()
    told = shown.err.splitlines()
    assert [line.partition(":")[0] for line in told] == ["8 devices", "16 devices", "32 devices"]
    assert told[0] == "8 devices: nothing fits" and "s a step, " in told[2]
    found = json.loads(shown.out)["best"]
    assert found["gpus"] == 32 and f"{found['step_seconds']:.4g} s a step" in told[2]
    assert main([*wish, "--fix", "pp=4,cp=1,schedule=1f1b", "--gpus", "32..32"]) == 0
    assert capsys.readouterr().err == ""


def test_tokens_and_lengths_as_people_write_them(capsys: pytest.CaptureFixture[str]) -> None:
    wish = ["plan", "llama3-8b", "--cluster", "h100", "--gpus", "8", "--batch-tokens", "1M", "--no-why"]
    assert main([*wish, "--seq-len", "8K", "--tokens", "1.5e13", "--top", "1"]) == 0
    shown = capsys.readouterr().out
    assert "llama3-8b (8.03B parameters)" in shown and "sequences of 8,192\n" in shown
    assert "\n15T tokens take the first " in shown and "e+" not in shown
    for tokens in ("0", "-1", "many"):
        with pytest.raises(UserError, match=rf"--tokens: '{tokens}' is not valid: a number of at least 1"):
            main([*wish, "--tokens", tokens])
    for length in ("0", "8x", "1.3k"):
        with pytest.raises(UserError, match=rf"--seq-len: '{length}' is not valid"):
            main([*wish, "--seq-len", length])


def test_a_device_that_runs_nothing_here_is_told_first(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    only = "tpu-v5e is known for planning only: this program runs on CUDA, ROCm and CPU"
    wish = ["plan", "llama3-8b", "--cluster", "tpu-v5e", "--gpus", "256", "--batch-tokens", "4M", "--no-why"]
    assert main([*wish, "--top", "1", "--write", str(tmp_path / "run.toml")]) == 0
    assert capsys.readouterr().out.startswith(f"{only}.\nllama3-8b")
    assert main(["explain", str(tmp_path / "run.toml"), "--cluster", "tpu-v5e"]) == 0
    assert capsys.readouterr().out.startswith(f"{only}.\nrun")
    assert main([*wish, "--top", "1", "--json"]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["best"]["planning_only"] == only
    assert main([*WISH, "--no-why"]) == 0
    assert "planning only" not in capsys.readouterr().out


def test_a_limit_that_limits_nothing_is_remarked_on(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*WISH, "--no-why", "--max-memory", "200"]) == 0
    remark = "--max-memory of 200 GB limits nothing: of 85.5 GB a plan may fill 77.7 GB"
    assert remark in capsys.readouterr().out.splitlines()
    assert main([*WISH, "--no-why", "--max-memory", "60"]) == 0
    assert "--max-memory" not in capsys.readouterr().out


def test_a_file_that_cannot_be_written_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(api, "plan", lambda *_, **__: pytest.fail("it was searched before that was seen"))
    with pytest.raises(UserError, match=r"--write: .* cannot be written"):
        main([*WISH, "--write", str(tmp_path / "none" / "run.toml")])
    with pytest.raises(UserError, match=r"--out: .* cannot be written"):
        main([*WISH, "--out", str(tmp_path / "none" / "plan.html")])
    with pytest.raises(UserError, match="--cluster: is missing"):
        main(["plan", "llama3-8b"])


def test_the_longest_context_says_when_the_batch_is_the_limit(capsys: pytest.CaptureFixture[str]) -> None:
    wish = ["plan", "tiny", "--cluster", "h100", "--gpus", "1", "--batch-tokens", "4096", "--no-why"]
    assert main([*wish, "--objective", "longest-context"]) == 0
    assert "the batch is one sequence: with a larger --batch-tokens" in capsys.readouterr().out
    assert main([*wish, "--seq-len", "512"]) == 0
    assert "the batch is one sequence" not in capsys.readouterr().out


def test_a_price_beyond_any_is_refused() -> None:
    with pytest.raises(UserError, match=r"--price: '1e300' is not valid"):
        main([*WISH, "--price", "1e300"])


def test_the_money_of_a_token_is_not_rounded_to_none(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "tiny", *WISH[2:], "--tokens", "1", "--no-why", "--top", "1"]) == 0
    shown = capsys.readouterr().out
    (money,) = re.findall(r"1 token takes the first \S+ days, (\S+) USD", " ".join(shown.split()))
    assert 0 < float(money) < 1 and f" {money} " in shown.partition("layout\n")[2].splitlines()[0]


def test_plan_and_explain_say_the_same_of_a_layout(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    where = ["--cluster", "a100", "--json"]
    wish = ["plan", "mixtral-8x7b", *where, "--gpus", "64", "--seq-len", "4096", "--batch-tokens", "4M"]
    assert main([*wish, "--fix", "pp=2,tp=1,cp=1", "--write", str(tmp_path / "run.toml")]) == 0
    planned = json.loads(capsys.readouterr().out.splitlines()[-1])["best"]
    assert main(["explain", str(tmp_path / "run.toml"), *where]) == 0
    explained = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert planned["assumptions"] == explained["assumptions"]
    assert planned["neighbours"] == explained["neighbours"][:6]
    assert planned["step_seconds"] == explained["step_seconds"]


def test_a_file_of_another_programs_plan_says_how_it_is_explained(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    size = ["llama3-8b", "--cluster", "h100", "--gpus", "8", "--batch-tokens", "1M", "--top", "1", "--no-why"]
    told = {}
    for stack in ("meshwright", "megatron-core"):
        assert main(["plan", *size, "--stack", stack, "--write", str(tmp_path / f"{stack}.toml")]) == 0
        told[stack] = "as planned with --stack megatron-core" in " ".join(capsys.readouterr().out.split())
    assert told == {"meshwright": False, "megatron-core": True}
