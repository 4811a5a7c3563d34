"""Fixtures of the data tests: a small corpus of text, and specs that read it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from sample_texts import texts

from meshwright.spec import RunSpec
from meshwright.spec.load import from_tree


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with 40 text files."""
    root = tmp_path / "text"
    root.mkdir()
    for number, text in enumerate(texts(40)):
        (root / f"{number:03d}.txt").write_bytes(text.encode())
    return root


@pytest.fixture
def make_spec(folder: Path, tmp_path: Path) -> Callable[..., RunSpec]:
    """A spec over `folder` with a byte tokenizer and short samples; what is given lies over it."""

    def make(data: dict[str, Any] | None = None, **parts: dict[str, Any]) -> RunSpec:
        corpus = {} if data and "mixture" in data else {"corpus": str(folder)}
        tree: dict[str, Any] = {
            "data": {
                **corpus,
                "cache": str(tmp_path / "cache"),
                "tokenizer": "byte",
                "seq_len": 32,
                "val_fraction": 0.1,
                **(data or {}),
            },
            "train": {"batch_tokens": 256, "seed": 5, **parts.pop("train", {})},
            **parts,
        }
        return from_tree(tree)

    return make
