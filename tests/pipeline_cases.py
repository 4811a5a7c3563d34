"""Pipelines together with every other axis, for a small dense model."""

from __future__ import annotations

BASE = {
    "model.layers": 7, "model.vocab_size": 61, "model.kv_heads": 2, "data.seq_len": 16, "train.steps": 3,
    "train.warmup_steps": 1, "layout.micro_batch": 1,
}  # fmt: skip


AXES: list[dict[str, object]] = [
    *({"layout__dp": 2, "layout__zero": zero} for zero in range(4)),
    {"layout__tp": 2},
    {"layout__cp": 2},
    {"layout__tp": 2, "layout__cp": 2},
    {"layout__dp": 2, "layout__tp": 2, "layout__zero": 2},
    {"layout__dp": 2, "layout__cp": 2, "layout__zero": 3},
    {"layout__replicate": 2, "layout__dp": 2, "layout__zero": 1},
    {"layout__pp": 4, "layout__dp": 2, "layout__zero": 3},
    {"layout__pp": 4, "layout__tp": 2},
    {"layout__pp": 4, "layout__cp": 2},
]
