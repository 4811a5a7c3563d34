"""Small decoders of every family in float64, whose logits are far apart."""

from __future__ import annotations

from meshwright.model.decoder import Decoder
from meshwright.model.init import init_whole_
from meshwright.spec import ModelSpec

SMALL = {
    "preset": None, "layers": 2, "hidden": 48, "ffn": 64, "heads": 4, "kv_heads": 2, "head_dim": 16,
    "vocab_size": 97, "max_seq_len": 40, "init_std": 0.3,
}  # fmt: skip
BLOCKS: dict[str, dict[str, object]] = {
    "norms after": {"norm_placement": "post"},
    "norms before and after": {"norm_placement": "both", "norm_unit_offset": True, "qk_norm": True},
    "norms of all heads": {"norm_placement": "post", "qk_norm": True, "qk_norm_over": "all"},
    "parallel": {"parallel_block": True, "norm": "layernorm", "norm_bias": False},
    "geglu": {"activation": "geglu_tanh", "mlp_bias": True},
    "scales": {"embedding_scale": 6.0, "residual_scale": 0.3, "logit_scale": 0.25, "attention_scale": 0.1},
    "capped": {"attention_softcap": 2.0, "logit_softcap": 3.0, "attention_scale": 0.5},
    "sinks": {"attention_sinks": True, "sliding_window": 5},
    "partial rope": {"rope_dim": 4},
    "longrope": {
        "head_dim": 16,
        "rope_scaling": {
            "kind": "longrope",
            "factor": 4.0,
            "original_max_seq_len": 64,
            "short_factors": [1.0 + i for i in range(8)],
            "long_factors": [2.0] * 8,
        },
    },
    "biased experts": {
        "moe": {
            "experts": 6,
            "top_k": 2,
            "ffn": 24,
            "shared_ffn": 32,
            "shared_gate": True,
            "router_bias": True,
            "expert_bias": True,
            "activation": "clamped_swiglu",
            "groups": 3,
            "top_groups": 2,
            "group_score": "max",
        }
    },
    "rope in some layers": {"rope_layers": [False, True]},
}
"""Blocks that differ from Llama's in places of norms, factors, activations, rotary positions or experts."""

SHAPES: dict[str, dict[str, object]] = {
    "llama": {},
    **BLOCKS,
    "qwen": {"qk_norm": True, "tied": True},
    "window": {"sliding_window": 5},
    "windows": {
        "sliding_window": 5,
        "layer_types": ["sliding_attention", "full_attention"],
        "rope_local_base_freq": 100.0,
    },
    "latents": {"kv_heads": 4, "mla": {"q_rank": 12, "kv_rank": 8, "rope_dim": 6, "v_dim": 10}},
    "gpt": {"norm": "layernorm", "activation": "gelu", "position": "learned", "qkv_bias": True},
}


def make_decoder(shape: str = "llama") -> Decoder:
    spec = ModelSpec.model_validate(SMALL | SHAPES[shape])
    return init_whole_(Decoder(spec).double(), seed=1).eval()
