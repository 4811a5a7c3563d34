"""A folder of weights for the tests of runs that start from one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from runs_from_weights import WORDS, tokenizer_of

from hf_models import CASES, save_theirs


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama of transformers with random weights and its tokenizer, and corpora beside it."""
    folder = tmp_path_factory.mktemp("theirs") / "hf"
    save_theirs(folder, "Llama", CASES["llama"][1] | {"vocab_size": 300})
    tokenizer_of(folder)
    rows = [json.dumps({"text": f"{WORDS} {number}"}) for number in range(60)]
    (folder.parent / "corpus.jsonl").write_text("\n".join(rows), encoding="utf-8")
    return folder
