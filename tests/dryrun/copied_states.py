"""Runs whose states lie in memory of every kind, of which checkpoints and snapshots take copies."""

from __future__ import annotations

import pytest

states_that_are_copied = pytest.mark.parametrize(
    "flags",
    [
        {},
        pytest.param({"layout__zero": 1, "train__ema": 0.99}, marks=pytest.mark.full),
        pytest.param(
            {"train__optimiser": "muon", "layout__tp": 2, "layout__dp": 1, "layout__zero": 0},
            marks=pytest.mark.full,
        ),
        pytest.param(
            {"model__moe__experts": 4, "model__moe__top_k": 2, "model__moe__ffn": 64, "layout__ep": 2},
            marks=pytest.mark.full,
        ),
    ],
    ids=lambda flags: ", ".join(f"{key}={value}" for key, value in flags.items()) or "zero-3",
)
