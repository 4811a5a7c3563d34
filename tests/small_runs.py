"""Runs of small models, which searches of layouts begin with."""

from __future__ import annotations

from typing import Any

from meshwright.spec import RunSpec


def run(model: dict[str, Any], seq_len: int = 64, sequences: int = 8) -> RunSpec:
    """A run of a model in bf16 with a batch of so many sequences."""
    return RunSpec.model_validate(
        {
            "model": {"vocab_size": 512, **model},
            "data": {"seq_len": seq_len},
            "train": {"batch_tokens": sequences * seq_len},
            "precision": {"compute": "bf16"},
        }
    )
