"""Windows and rotary bases by layer: every axis equals one device, wherever it puts the layers."""

from __future__ import annotations

import pytest

from equality import equal_to_one_device
from ranks import Ranks
from small import spec_of

BASE = {
    "model.hidden": 32, "model.heads": 4, "model.kv_heads": 2, "model.ffn": 48, "model.vocab_size": 61,
    "model.layers": 4, "model.sliding_window": 5, "model.rope_local_base_freq": 100,
    "model.layer_types": "sliding_attention,sliding_attention,full_attention",
    "data.seq_len": 32, "train.batch_tokens": 4 * 32, "train.steps": 2, "train.warmup_steps": 1,
    "layout.micro_batch": 1,
}  # fmt: skip
EXPERTS = {"model__moe__experts": 4, "model__moe__top_k": 2, "model__moe__ffn": 16}
LAYOUTS: dict[str, dict[str, object]] = {
    "zero3": {"layout__dp": 2, "layout__zero": 3, "recompute__policy": "selective"},
    "tp2": {"layout__tp": 2, "recompute__policy": "full"},
    "interleaved": {"layout__pp": 2, "layout__virtual": 2, "layout__schedule": "interleaved"},
    "uneven": {"layout__pp": 2, "layout__stages": "3,1", "layout__schedule": "1f1b"},
    "zb-v": {"layout__pp": 2, "layout__schedule": "zb-v", "recompute__policy": "full"},
    "ring": {"layout__cp": 2, "recompute__policy": "selective"},
    "ulysses": {"layout__cp": 2, "layout__context_mode": "ulysses"},
    "gather of a compiled block": {
        "layout__cp": 2, "layout__context_mode": "gather", "train__compile": "true"},
    "experts": {"layout__dp": 2, "layout__ep": 2, **EXPERTS},
    "all": {"layout__dp": 2, "layout__tp": 2, "layout__pp": 2, "layout__ep": 2, **EXPERTS},
}  # fmt: skip
FULL = ("zero3", "uneven", "zb-v", "ulysses", "experts")


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.full if name in FULL else ()) for name in LAYOUTS],
)
def test_every_layout_equals_one_device(ranks: Ranks, name: str) -> None:
    flags = LAYOUTS[name]
    sequences = (4 if "layout__pp" in flags else 2) * int(str(flags.get("layout__dp", 1)))
    equal_to_one_device(ranks, spec_of(BASE, **flags, train__batch_tokens=32 * sequences), 1e-10)
