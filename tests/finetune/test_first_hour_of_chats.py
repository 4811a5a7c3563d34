"""A newcomer's first hour with chats, by the commands that are printed: from a file to transformers."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import transformers
from chat_models import chats, model_in, written


# `make test` has `init` and training in test_chat_run_files.py, answers in tests/api/test_chats.py, exports
# of adapters in tests/exchange, and one first hour by its commands in tests/test_first_hour.py.
@pytest.mark.full
def test_chats_become_an_assistant_that_transformers_opens(tmp_path: Path) -> None:
    model_in(tmp_path / "model")
    written(chats(3, 200), tmp_path / "chats.jsonl")

    def shell(command: str) -> str:
        words = shlex.split(command)
        assert words[0] == "meshwright"
        done = subprocess.run(
            [sys.executable, "-m", *words], cwd=tmp_path, capture_output=True, text=True, check=False,
            timeout=300, env={**os.environ, "OMP_NUM_THREADS": "1"},
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        return done.stdout

    keys = "--layout.dp 2 --lora.rank 8 --train.lr 0.01 --data.cache cache"  # a newcomer gives none
    init = f"meshwright init --have chats.jsonl --have model --json {keys}"
    check, show, train, generate, export = (
        command for command, _ in json.loads(shell(init).splitlines()[-1])["commands"]
    )
    assert "OK" in shell(check)
    assert "<|im_start|>assistant⟦\n" in shell(show)
    shell(train)
    result = json.loads((tmp_path / "runs" / "run" / "result.json").read_text())
    metrics = (tmp_path / "runs" / "run" / "metrics.jsonl").read_text().splitlines()
    losses = [row["loss"] for row in map(json.loads, metrics) if "loss" in row]
    assert result["final_loss"] < 0.8 * losses[0]
    text = shell(f"{generate} --max-new-tokens 12").removesuffix("\n")
    shell(export)
    folder = tmp_path / shlex.split(export)[3]
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    asked = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hello"}], add_generation_prompt=True, return_tensors="pt"
    )
    answer = model.generate(**asked, max_new_tokens=12, do_sample=False)[0, asked["input_ids"].shape[1] :]
    assert tokenizer.decode(answer, skip_special_tokens=True) == text
