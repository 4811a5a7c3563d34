"""A small model and the layouts on which optimisers and what goes with them are compared with one device."""

from __future__ import annotations

BASE = {
    "model.heads": 8, "model.head_dim": 4, "model.vocab_size": 61, "data.seq_len": 32, "train.steps": 3,
    "train.warmup_steps": 1, "train.batch_tokens": 4 * 32, "layout.micro_batch": 1,
}  # fmt: skip
EXPERTS = {"model__moe__experts": 8, "model__moe__top_k": 2, "model__moe__ffn": 12, "layout__ep": 2}
LAYOUTS: list[dict[str, object]] = [
    *({"layout__dp": 4, "layout__zero": zero} for zero in range(4)),
    *({"layout__dp": 2, "layout__replicate": 2, "layout__tp": 2, "layout__zero": zero} for zero in (1, 3)),
    {"layout__tp": 4, "layout__cp": 2, "model__kv_heads": 4},
    {"layout__cp": 2, "layout__dp": 2, "layout__zero": 2, "recompute__policy": "selective"},
    {"layout__pp": 2, "layout__dp": 2, "layout__tp": 2, "layout__zero": 1, "layout__schedule": "zb-h1"},
    {"layout__pp": 2, "layout__dp": 2, "layout__zero": 3, "layout__schedule": "interleaved",
     "layout__virtual": 2, "model__layers": 4},
    *({"layout__dp": 4, "layout__zero": zero, **EXPERTS} for zero in (0, 2, 3)),
    {"layout__dp": 2, "layout__tp": 2, "layout__zero": 1, "layout__etp": 2, **EXPERTS, "layout__pp": 2},
]  # fmt: skip
