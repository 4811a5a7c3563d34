"""Places of norms, factors, parallel blocks and partial rotations: every axis equals one device."""

from __future__ import annotations

import pytest

from equality import equal_to_one_device
from ranks import Ranks
from small import spec_of

BASE = {
    "model.hidden": 32, "model.heads": 4, "model.kv_heads": 2, "model.head_dim": 8, "model.ffn": 48,
    "model.vocab_size": 61, "model.layers": 4, "data.seq_len": 32, "train.steps": 2, "train.warmup_steps": 1,
    "layout.micro_batch": 1,
}  # fmt: skip
BLOCKS: dict[str, dict[str, object]] = {
    "olmo2": {"model__norm_placement": "post", "model__qk_norm": "true", "model__qk_norm_over": "all"},
    "gemma": {
        "model__norm_placement": "both", "model__norm_unit_offset": "true", "model__qk_norm": "true",
        "model__activation": "geglu_tanh", "model__embedding_scale": 6, "model__attention_scale": 0.2,
        "model__tied": "true", "model__rope_layers": "true,false",
    },
    "gemma2": {
        "model__norm_placement": "both", "model__norm_unit_offset": "true", "model__tied": "true",
        "model__attention_softcap": 1.5, "model__logit_softcap": 2, "model__attention_scale": 0.7,
        "model__init_std": 0.2, "model__sliding_window": 9,
        "model__layer_types": "sliding_attention,full_attention",
    },
    "sinks": {
        "model__attention_sinks": "true", "model__attention_softcap": 2, "model__init_std": 0.2,
        "model__sliding_window": 9, "model__layer_types": "sliding_attention,full_attention",
    },
    "cohere": {
        "model__parallel_block": "true", "model__norm": "layernorm", "model__norm_bias": "false",
        "model__logit_scale": 0.25, "model__residual_scale": 0.5, "model__rope_dim": 4,
        "model__rope_scaling__kind": "longrope", "model__rope_scaling__factor": 4,
        "model__rope_scaling__original_max_seq_len": 16, "model__rope_scaling__short_factors": "1,1.5",
        "model__rope_scaling__long_factors": "3,40",
    },
}  # fmt: skip
LAYOUTS: dict[str, dict[str, object]] = {
    "zero3": {"layout__dp": 2, "layout__zero": 3, "recompute__policy": "selective"},
    "tp4": {"layout__tp": 4, "recompute__policy": "full"},
    "tp2, whole tokens": {"layout__tp": 2, "layout__sequence_parallel": "false"},
    "compiled": {"layout__tp": 2, "train__compile": "true", "recompute__policy": "selective"},
    "zb-v": {"layout__pp": 2, "layout__schedule": "zb-v"},
    "gather": {"layout__cp": 2, "layout__context_mode": "gather"},
    "ulysses": {"layout__cp": 2, "layout__context_mode": "ulysses", "recompute__policy": "selective"},
    "compiled ring": {"layout__cp": 2, "train__compile": "true"},
    "all": {"layout__dp": 2, "layout__tp": 2, "layout__cp": 2, "layout__zero": 2},
}
QUICK = {
    ("olmo2", "compiled"), ("gemma", "zb-v"), ("cohere", "tp2, whole tokens"), ("gemma2", "ulysses"),
    ("sinks", "gather"),
}  # fmt: skip


@pytest.mark.parametrize(
    ("block", "layout"),
    [
        pytest.param(block, layout, marks=() if (block, layout) in QUICK else pytest.mark.full)
        for block in BLOCKS
        for layout in LAYOUTS
    ],
)
def test_every_block_equals_one_device(ranks: Ranks, block: str, layout: str) -> None:
    flags = BLOCKS[block] | LAYOUTS[layout]
    sequences = (4 if "layout__pp" in flags else 2) * int(str(flags.get("layout__dp", 1)))
    equal_to_one_device(ranks, spec_of(BASE, **flags, train__batch_tokens=32 * sequences), 1e-10)
