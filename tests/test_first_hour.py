"""A newcomer's first hour, by the commands that the program prints: from text to a model in transformers."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

KEYS = {
    "model.layers": "2", "model.hidden": "32", "model.ffn": "64", "model.heads": "2", "model.kv_heads": "1",
    "model.vocab_size": "320", "data.seq_len": "64", "train.batch_tokens": "512", "train.tokens": "10240",
    "data.cache": "cache", "layout.dp": "2",
}  # fmt: skip
"""Keys that make the model small; a newcomer gives none."""


@pytest.fixture
def shell(tmp_path: Path) -> Any:
    """Runs a command in an empty folder with a folder of text, and returns what it prints."""
    (tmp_path / "my-text").mkdir()
    for number in range(4):
        (tmp_path / "my-text" / f"{number}.txt").write_text("The model reads this, again and again. " * 200)

    def run(command: str) -> str:
        words = shlex.split(command)
        assert words[0] == "meshwright"
        done = subprocess.run(
            [sys.executable, "-m", *words], cwd=tmp_path, capture_output=True, text=True, check=False,
            timeout=300, env={**os.environ, "OMP_NUM_THREADS": "1"},
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        return done.stdout

    run.folder = tmp_path  # type: ignore[attr-defined]
    return run


def test_text_becomes_a_model_that_transformers_opens(shell: Any) -> None:
    folder: Path = shell.folder
    flags = shlex.join(word for key, text in KEYS.items() for word in (f"--{key}", text))
    made = json.loads(shell(f"meshwright init --have my-text --json {flags}").splitlines()[-1])
    check, train, generate = (command for command, _ in made["commands"])
    assert "OK" in shell(check)
    shell(train)
    assert "<svg" in (folder / "runs" / "run" / "report.html").read_text()
    text = shell(f"{generate} --max-new-tokens 12").removesuffix("\n")
    serving = json.loads(shell("meshwright init --have runs/run --json").splitlines()[-1])
    export = next(command for command, words in serving["commands"] if "transformers" in words)
    shell(export)
    from transformers import pipeline

    opened = pipeline("text-generation", str(folder / shlex.split(export)[3]), device="cpu")
    written = opened("Once", max_new_tokens=12, do_sample=False, return_full_text=False)[0]["generated_text"]
    assert text.endswith(written) and written
