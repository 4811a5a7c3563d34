"""Routers of every kind, over every number of expert ranks."""

from __future__ import annotations

from itertools import product

BASE = {
    "model.layers": 3, "model.vocab_size": 61, "model.kv_heads": 2, "data.seq_len": 16, "train.steps": 3,
    "train.warmup_steps": 1, "train.batch_tokens": 16 * 4, "layout.micro_batch": 1,
    "model.moe.experts": 8, "model.moe.top_k": 2, "model.moe.ffn": 12, "model.moe.aux_loss": 0.1,
}  # fmt: skip
ROUTERS: dict[str, dict[str, object]] = {
    "mixtral": {"model__moe__z_loss": 0.01},
    "qwen3": {"model__moe__renormalise": "false", "model__moe__top_k": 3, "model__moe__every": 2},
    # A step of the bias so large that in the next step some experts get all tokens and others none.
    "deepseek": {
        "model__moe__router": "sigmoid", "model__moe__groups": 4, "model__moe__top_groups": 2,
        "model__moe__scale": 2.5, "model__moe__bias": "true", "model__moe__bias_rate": 2,
        "model__moe__shared_ffn": 8, "model__moe__dense_first": 1,
    },
    "qwen2, deepseek-v2": {
        "model__moe__shared_ffn": 8, "model__moe__shared_gate": "true", "model__moe__renormalise": "false",
        "model__moe__groups": 4, "model__moe__top_groups": 2, "model__moe__group_score": "max",
    },
    "gpt-oss": {
        "model__moe__router_bias": "true", "model__moe__expert_bias": "true",
        "model__moe__activation": "clamped_swiglu", "model__init_std": 0.5,
    },
    "capacity": {"model__moe__capacity_factor": 1.25, "model__moe__shared_ffn": 8},
    "switch": {"model__moe__top_k": 1, "model__moe__renormalise": "false", "model__moe__aux_loss": 0},
}  # fmt: skip
ROUTED: list[dict[str, object]] = [
    {"router": router, "layout__ep": ep, "layout__dp": max(ep, 2), "layout__zero": ep % 3}
    for router, ep in product(ROUTERS, (1, 2, 4, 8))
]
