"""`meshwright fit`: what it prints, and that its page shows it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from stand_ins import last_json

from meshwright.cli.main import main
from meshwright.spec import UserError

PAGE = Path(__file__).resolve().parents[2] / "docs" / "fit.md"
ASKED = ["fit", "llama3-8b", "--gpu", "rtx-3090"]


def test_advice_comes_first_and_tables_are_short(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(ASKED) == 0
    advice, training, serving, notes, commands = capsys.readouterr().out.strip().split("\n\n")
    assert " ".join(advice.split()).startswith(
        "llama3-8b (8.03B parameters) on 1 x RTX 3090 24 GB: full fine-"
    )
    lines = [*advice.splitlines(), *training.splitlines(), *serving.splitlines(), *notes.splitlines()]
    assert max(map(len, lines)) <= 100 and len(training.splitlines() + serving.splitlines()) <= 20
    assert "takes 64.2 GB of the host's memory, of 61.8 GB: too little" in " ".join(notes.split())
    told = dict(line.split(": ", 1) for line in commands.splitlines())
    assert [*told] == ["lora", "qlora", "serve bf16", "serve int8", "serve int4"]
    assert told["qlora"].startswith(
        "meshwright train --model.preset llama3-8b --lora.rank 16 --lora.quantise nf4"
    )
    assert "vllm serve RUN-int4 --max-model-len 4096 --max-num-seqs 1 " in told["serve int4"]
    for sentence in (
        "RUN: put the folder of the trained run",
        "give --from meta-llama/Meta-Llama-3-8B in its place",
        "by vLLM, which may fill 92% of a GPU",
    ):
        assert sentence in " ".join(notes.split())


def test_the_page_shows_what_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    """But for figures, which follow the planner's."""

    def form(text: str) -> list[str]:
        rows = [re.sub(r"[\d.,]+", "0", line) for line in text.splitlines() if line and line[0] != " "]
        return [re.sub(r" {2,}", "  ", row).replace("0%", "no").replace(" mb0 full", " mb0") for row in rows]

    assert main(ASKED) == 0
    printed = form(capsys.readouterr().out)
    (block,) = re.findall(r"```text\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    shown = form(block)
    assert len(shown) == 12 and shown[1:] == printed[1:12]


def test_json_has_each_way_with_its_bytes(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*ASKED, "--seq-len", "2k", "--batch", "4", "--json"]) == 0
    told = last_json(capsys)
    assert told["seq_len"] == 2048 and told["count"] == 1 and told["best"] == "lora"
    for each in (*told["training"], *told["serving"]):
        bytes_ = each["bytes"]
        assert bytes_["low"] < bytes_["expected"] < bytes_["high"]
        assert each["fits"] == (each["fits_probability"] >= 0.5)
    ways = {each["way"]: each for each in told["training"]}
    assert ways["full"]["command"] is None and ways["qlora"]["command"] is not None
    assert ways["qlora"]["longest_seq_len"] == 8192 and ways["qlora"]["largest_micro_batch"] > 8
    served = {each["format"]: each for each in told["serving"]}
    assert served["int4"]["weights"] < served["int8"]["weights"] < served["bf16"]["weights"]
    assert served["bf16"]["cache"] == (4 * 2048 + 32) * 32 * 2 * 8 * 128 * 2


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["fit", "llama3-8b"], "--gpu: is missing; give --gpu NAME"),
        ([*ASKED[:3], "rtx-390"], "--gpu: 'rtx-390' .* did you mean 'rtx-3090'"),
        ([*ASKED, "--count", "0"], "--count: '0' is not valid"),
        ([*ASKED, "--host-memory", "0"], "--host-memory: '0' is not valid"),
        ([*ASKED, "--seq-len", "x"], "--seq-len: 'x' is not valid"),
        ([*ASKED, "--lora.rnk", "8"], "--lora.rnk: .*lora.rank"),
    ],
)
def test_a_mistake_gets_a_sentence(words: list[str], said: str) -> None:
    with pytest.raises(UserError, match=said):
        main(words)
