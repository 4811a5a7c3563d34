"""Keys of an HF `config.json` by family, as tables that `hf` reads and `hf_write` writes."""

from __future__ import annotations

from typing import Any

from meshwright.spec.hf.json_object import COUNT, FACTOR, FLAG, LAYERS, NUMBER, PAIR, SIZE, JsonKey

Keys = dict[str, JsonKey]
"""Field of a part of the spec -> its key. Keys with defaults may be absent: those are of transformers."""


def _llama(max_seq_len: int, norm_eps: float = 1e-6) -> Keys:
    return {
        "layers": JsonKey("num_hidden_layers", LAYERS),
        "hidden": JsonKey("hidden_size", SIZE),
        "ffn": JsonKey("intermediate_size", SIZE),
        "heads": JsonKey("num_attention_heads", SIZE),
        "vocab_size": JsonKey("vocab_size", PAIR),
        "max_seq_len": JsonKey("max_position_embeddings", SIZE, max_seq_len),
        "norm_eps": JsonKey("rms_norm_eps", NUMBER, norm_eps),
        "tied": JsonKey("tie_word_embeddings", FLAG, False),
        "init_std": JsonKey("initializer_range", NUMBER, 0.02),
    }


MODEL_KEYS: dict[str, Keys] = {
    "llama": {**_llama(2048), "mlp_bias": JsonKey("mlp_bias", FLAG, False)},
    "qwen3": _llama(32768),
    "mistral": _llama(131072),
    "gpt2": {
        "layers": JsonKey("n_layer", LAYERS),
        "hidden": JsonKey("n_embd", SIZE),
        "heads": JsonKey("n_head", SIZE),
        "vocab_size": JsonKey("vocab_size", PAIR),
        "max_seq_len": JsonKey("n_positions", SIZE),
        "norm_eps": JsonKey("layer_norm_epsilon", NUMBER, 1e-5),
        "tied": JsonKey("tie_word_embeddings", FLAG, True),
        "init_std": JsonKey("initializer_range", NUMBER, 0.02),
    },
    "mixtral": _llama(131072, 1e-5),
    "qwen3_moe": _llama(32768),
    "deepseek_v3": _llama(4096),
}
"""Family -> the keys of a `ModelSpec` that correspond to one field."""

_TOP_K = "num_experts_per_tok"
_MOE_FFN = "moe_intermediate_size"
MOE_KEYS: dict[str, Keys] = {
    "mixtral": {
        "experts": JsonKey("num_local_experts", SIZE, 8),
        "top_k": JsonKey(_TOP_K, SIZE, 2),
        "ffn": JsonKey("intermediate_size", SIZE),
        "aux_loss": JsonKey("router_aux_loss_coef", FACTOR, 0.001),
    },
    "qwen3_moe": {
        "experts": JsonKey("num_experts", SIZE, 128, other="num_local_experts"),
        "top_k": JsonKey(_TOP_K, SIZE, 8),
        "ffn": JsonKey(_MOE_FFN, SIZE, 768),
        "renormalise": JsonKey("norm_topk_prob", FLAG, False),
        "aux_loss": JsonKey("router_aux_loss_coef", FACTOR, 0.001),
    },
    "deepseek_v3": {
        "experts": JsonKey("n_routed_experts", SIZE, 256, other="num_local_experts"),
        "top_k": JsonKey(_TOP_K, SIZE, 8),
        "ffn": JsonKey(_MOE_FFN, SIZE, 2048),
        "renormalise": JsonKey("norm_topk_prob", FLAG, True),
        "scale": JsonKey("routed_scaling_factor", NUMBER, 2.5),
        "groups": JsonKey("n_group", SIZE, 8),
        "top_groups": JsonKey("topk_group", SIZE, 4),
        "aux_loss": JsonKey("aux_loss_alpha", FACTOR, 0.0),
        "dense_first": JsonKey("first_k_dense_replace", COUNT, 3),
    },
}
"""Family -> the keys of a `MoeSpec` that correspond to one field."""

MLA_KEYS: Keys = {
    "kv_rank": JsonKey("kv_lora_rank", SIZE, 512),
    "q_rank": JsonKey("q_lora_rank", SIZE, 1536, nullable=True),
    "rope_dim": JsonKey("qk_rope_head_dim", PAIR, 64),
    "v_dim": JsonKey("v_head_dim", SIZE, 128),
}

_FACTOR = {"factor": JsonKey("factor", NUMBER)}
_ORIGINAL = {"original_max_seq_len": JsonKey("original_max_position_embeddings", SIZE)}
ROPE_KEYS: dict[str, Keys] = {
    "linear": _FACTOR,
    "llama3": {
        **_FACTOR,
        **_ORIGINAL,
        "low_freq_factor": JsonKey("low_freq_factor", NUMBER),
        "high_freq_factor": JsonKey("high_freq_factor", NUMBER),
    },
    "yarn": {
        **_FACTOR,
        **_ORIGINAL,
        "attention_factor": JsonKey("attention_factor", NUMBER, nullable=True),
        "truncate": JsonKey("truncate", FLAG, True),
        "beta_fast": JsonKey("beta_fast", NUMBER, 32.0),
        "beta_slow": JsonKey("beta_slow", NUMBER, 1.0),
        "mscale": JsonKey("mscale", FACTOR, 0.0),
        "mscale_all_dim": JsonKey("mscale_all_dim", FACTOR, 0.0),
    },
}
"""`rope_type` -> the keys of its scaling."""


def written(part: Any, keys: Keys) -> dict[str, Any]:
    """Return the keys of `config.json` for the fields of a part of the spec."""
    return {key.name: getattr(part, field) for field, key in keys.items()}
