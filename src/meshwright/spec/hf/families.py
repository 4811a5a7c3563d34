"""The families of models whose Hugging Face files are read and written: one row for each.

A family differs from the others in names and defaults; the decoder that computes it is the same. Names and
defaults are those of transformers, of which a file may leave out every key with a default. Names of tensors
that no field here gives are in `exchange/hf_state_dict.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Literal, get_args

from meshwright.spec.hf.config_keys import Keys
from meshwright.spec.hf.family import STACKED, ExpertNames, Family
from meshwright.spec.hf.json_object import COUNT, FACTOR, FLAG, LAYERS, NUMBER, PAIR, SIZE, JsonKey
from meshwright.spec.hf.tensor_names import (
    GEMMA,
    GLM4,
    GPT2,
    OLMO2,
    PARALLEL,
    PHI3,
    STARCODER2,
)
from meshwright.spec.layers import Activation
from meshwright.spec.moe_mla import CLAMPED_ALPHA, CLAMPED_LIMIT, MoeSpec

FamilyName = Literal[
    "llama", "qwen2", "qwen3", "mistral", "smollm3", "granite", "phi3", "starcoder2", "gemma2", "gemma3_text",
    "glm4", "cohere2", "olmo2", "olmo3", "gpt2", "mixtral", "qwen3_moe", "deepseek_v3", "olmoe", "qwen2_moe",
    "glm4_moe", "deepseek_v2", "granitemoe", "gpt_oss",
]  # fmt: skip


def _llama(max_seq_len: int, norm_eps: float = 1e-6, tied: bool = False) -> Keys:
    return {
        "layers": JsonKey("num_hidden_layers", LAYERS),
        "hidden": JsonKey("hidden_size", SIZE),
        "ffn": JsonKey("intermediate_size", SIZE),
        "heads": JsonKey("num_attention_heads", SIZE),
        "vocab_size": JsonKey("vocab_size", PAIR),
        "max_seq_len": JsonKey("max_position_embeddings", SIZE, max_seq_len),
        "norm_eps": JsonKey("rms_norm_eps", NUMBER, norm_eps),
        "tied": JsonKey("tie_word_embeddings", FLAG, tied),
        "init_std": JsonKey("initializer_range", NUMBER, 0.02),
    }


_GPT2: Keys = {
    "layers": JsonKey("n_layer", LAYERS),
    "hidden": JsonKey("n_embd", SIZE),
    "heads": JsonKey("n_head", SIZE),
    "vocab_size": JsonKey("vocab_size", PAIR),
    "max_seq_len": JsonKey("n_positions", SIZE),
    "norm_eps": JsonKey("layer_norm_epsilon", NUMBER, 1e-5),
    "tied": JsonKey("tie_word_embeddings", FLAG, True),
    "init_std": JsonKey("initializer_range", NUMBER, 0.02),
}
_TOP_K = "num_experts_per_tok"
_MOE_FFN = "moe_intermediate_size"
_MIXTRAL_EXPERTS: Keys = {
    "experts": JsonKey("num_local_experts", SIZE, 8),
    "top_k": JsonKey(_TOP_K, SIZE, 2),
    "ffn": JsonKey("intermediate_size", SIZE),
    "aux_loss": JsonKey("router_aux_loss_coef", FACTOR, 0.001),
}
_OLMOE_EXPERTS: Keys = {
    "experts": JsonKey("num_experts", SIZE, 64, other="num_local_experts"),
    "top_k": JsonKey(_TOP_K, SIZE, 8),
    "ffn": JsonKey("intermediate_size", SIZE),
    "renormalise": JsonKey("norm_topk_prob", FLAG, False),
    "aux_loss": JsonKey("router_aux_loss_coef", FACTOR, 0.01),
}
_QWEN2_EXPERTS: Keys = {
    "experts": JsonKey("num_experts", SIZE, 60),
    "top_k": JsonKey(_TOP_K, SIZE, 4),
    "ffn": JsonKey(_MOE_FFN, SIZE, 1408),
    "shared_ffn": JsonKey("shared_expert_intermediate_size", SIZE, 5632),
    "renormalise": JsonKey("norm_topk_prob", FLAG, False),
    "aux_loss": JsonKey("router_aux_loss_coef", FACTOR, 0.001),
}
_QWEN3_EXPERTS: Keys = {
    "experts": JsonKey("num_experts", SIZE, 128, other="num_local_experts"),
    "top_k": JsonKey(_TOP_K, SIZE, 8),
    "ffn": JsonKey(_MOE_FFN, SIZE, 768),
    "renormalise": JsonKey("norm_topk_prob", FLAG, False),
    "aux_loss": JsonKey("router_aux_loss_coef", FACTOR, 0.001),
}
_DEEPSEEK_EXPERTS: Keys = {
    "experts": JsonKey("n_routed_experts", SIZE, 256, other="num_local_experts"),
    "top_k": JsonKey(_TOP_K, SIZE, 8),
    "ffn": JsonKey(_MOE_FFN, SIZE, 2048),
    "renormalise": JsonKey("norm_topk_prob", FLAG, True),
    "scale": JsonKey("routed_scaling_factor", NUMBER, 2.5),
    "groups": JsonKey("n_group", SIZE, 8),
    "top_groups": JsonKey("topk_group", SIZE, 4),
    "aux_loss": JsonKey("aux_loss_alpha", FACTOR, 0.0),
    "dense_first": JsonKey("first_k_dense_replace", COUNT, 3),
}
_GLM4_EXPERTS: Keys = {
    **_DEEPSEEK_EXPERTS,
    "experts": JsonKey("n_routed_experts", SIZE, 128, other="num_local_experts"),
    "ffn": JsonKey(_MOE_FFN, SIZE, 1408),
    "scale": JsonKey("routed_scaling_factor", NUMBER, 1.0),
    "groups": JsonKey("n_group", SIZE, 1),
    "top_groups": JsonKey("topk_group", SIZE, 1),
    "dense_first": JsonKey("first_k_dense_replace", COUNT, 1),
}
_DEEPSEEK_V2_EXPERTS: Keys = {
    "experts": JsonKey("n_routed_experts", SIZE, 64, other="num_experts"),
    "top_k": JsonKey(_TOP_K, SIZE),
    "ffn": JsonKey(_MOE_FFN, SIZE, 1407),
    "scale": JsonKey("routed_scaling_factor", NUMBER, 1.0),
    "aux_loss": JsonKey("aux_loss_alpha", FACTOR, 0.0),
    "dense_first": JsonKey("first_k_dense_replace", COUNT, 0),
}
_GPT_OSS_EXPERTS: Keys = {
    "experts": JsonKey("num_local_experts", SIZE, 128, other="num_experts"),
    "top_k": JsonKey(_TOP_K, SIZE, 4),
    "ffn": JsonKey("intermediate_size", SIZE),
    "aux_loss": JsonKey("router_aux_loss_coef", FACTOR, 0.001),
}
_GPT_OSS_NAMES = replace(STACKED, turns=True, router="router")
_GRANITE: Keys = {
    **_llama(2048),
    "embedding_scale": JsonKey("embedding_multiplier", NUMBER, 1.0),
    "residual_scale": JsonKey("residual_multiplier", NUMBER, 1.0),
    "attention_scale": JsonKey("attention_multiplier", NUMBER, 1.0),
    "logit_scale": JsonKey("logits_scaling", NUMBER, 1.0, inverse=True),
}
_SIGMOIDS = {"router": "sigmoid", "bias": True}

_TANH: Mapping[str, Activation] = {"gelu_pytorch_tanh": "geglu_tanh"}

FAMILIES: dict[str, Family] = {
    "llama": Family(
        "LlamaForCausalLM", "llama", {**_llama(2048), "mlp_bias": JsonKey("mlp_bias", FLAG, False)},
        even_heads=True,
        models="Llama 1 to 3, SmolLM 1 and 2, Yi, DeepSeek LLM",
    ),
    "qwen2": Family(
        "Qwen2ForCausalLM", "qwen2", _llama(32768), fixed={"qkv_bias": True},
        attention_bias=None, kv_heads=32,
        windows=True, window=4096, window_switch=True, layer_types=True, full_layers_first=28,
        models="Qwen2, Qwen2.5, QwQ",
    ),
    "qwen3": Family(
        "Qwen3ForCausalLM", "qwen3", _llama(32768), fixed={"qk_norm": True}, kv_heads=32, head_dim=128,
        windows=True, window=4096, window_switch=True, layer_types=True, full_layers_first=28,
        models="Qwen3 dense",
    ),
    "mistral": Family(
        "MistralForCausalLM", "llama", _llama(131072),
        attention_bias=None, kv_heads=8, windows=True, window=4096, layer_types=True,
        models="Mistral 7B, Nemo, Small; Ministral",
    ),
    "smollm3": Family(
        "SmolLM3ForCausalLM", "smollm3",
        {**_llama(32768, tied=True), "mlp_bias": JsonKey("mlp_bias", FLAG, False)},
        kv_heads=4, rope_theta=2e6, skips_rope="no_rope_layers",
        models="SmolLM3",
    ),
    "granite": Family(
        "GraniteForCausalLM", "granite", {**_GRANITE, "mlp_bias": JsonKey("mlp_bias", FLAG, False)},
        models="Granite 3",
    ),
    "phi3": Family(
        "Phi3ForCausalLM", "phi3", _llama(4096, 1e-5), names=PHI3,
        attention_bias=None, rope_share=1.0, original_max_seq_len=4096, windows=True,
        models="Phi-3, Phi-3.5, Phi-4 dense",
    ),
    "starcoder2": Family(
        "Starcoder2ForCausalLM", "starcoder2",
        {
            **_llama(4096, tied=True),
            "norm_eps": JsonKey("norm_epsilon", NUMBER, 1e-5),
            "init_std": JsonKey("initializer_range", NUMBER, 0.018042),
            "qkv_bias": JsonKey("use_bias", FLAG, True),
            "out_bias": JsonKey("use_bias", FLAG, True),
            "mlp_bias": JsonKey("use_bias", FLAG, True),
        },
        names=STARCODER2, fixed={"norm": "layernorm"},
        activations=("hidden_act", {"gelu_pytorch_tanh": "gelu_tanh"}),
        attention_bias=None, kv_heads=2, windows=True,
        models="StarCoder2",
    ),
    "gemma2": Family(
        "Gemma2ForCausalLM", "gemma2",
        {
            **_llama(8192, tied=True),
            "attention_softcap": JsonKey("attn_logit_softcapping", NUMBER, 50.0, nullable=True),
            "logit_softcap": JsonKey("final_logit_softcapping", NUMBER, 30.0, nullable=True),
        },
        names=GEMMA, fixed={"norm_placement": "both", "norm_unit_offset": True},
        activations=("hidden_activation", _TANH),
        kv_heads=4, head_dim=256, scaled_embedding=True, query_scalar=256,
        windows=True, window=4096, layer_types=True, window_pattern=2,
        models="Gemma 2",
    ),
    "gemma3_text": Family(
        "Gemma3ForCausalLM", "gemma3", _llama(131072, tied=True), names=GEMMA,
        fixed={"norm_placement": "both", "norm_unit_offset": True, "qk_norm": True},
        activations=("hidden_activation", _TANH),
        kv_heads=4, head_dim=256, rope_theta=1e6, rope_by_type=True, rope_local=1e4,
        scaled_embedding=True, query_scalar=256,
        windows=True, window=4096, layer_types=True, window_pattern=6,
        models="Gemma 3 text",
    ),
    "glm4": Family(
        "Glm4ForCausalLM", "glm4", _llama(131072, 0.00000015625),
        names=GLM4, fixed={"norm_placement": "both"},
        attention_bias=True, bias_of_output=False, kv_heads=2, head_dim=128, rope_share=0.5, rope_pairs=True,
        models="GLM-4-0414",
    ),
    "cohere2": Family(
        "Cohere2ForCausalLM", "cohere2",
        {
            **_llama(8192, tied=True),
            "norm_eps": JsonKey("layer_norm_eps", NUMBER, 1e-5),
            "logit_scale": JsonKey("logit_scale", NUMBER, 0.0625),
        },
        names=PARALLEL, fixed={"parallel_block": True, "norm": "layernorm", "norm_bias": False},
        even_heads=True, rope_pairs=True, skips_rope="full_attention",
        windows=True, window=4096, layer_types=True, window_pattern=4,
        models="Command R7B, Command A",
    ),
    "olmo2": Family(
        "Olmo2ForCausalLM", "olmo2", _llama(2048, 1e-5), names=OLMO2,
        fixed={"norm_placement": "post", "qk_norm": True, "qk_norm_over": "all"}, even_heads=True,
        models="OLMo 2",
    ),
    "olmo3": Family(
        "Olmo3ForCausalLM", "olmo2", _llama(2048, 1e-5), names=OLMO2,
        fixed={"norm_placement": "post", "qk_norm": True, "qk_norm_over": "all"}, even_heads=True,
        rope_theta=5e5, rope_by_type=True, windows=True, window=4096, layer_types=True, window_pattern=4,
        models="OLMo 3",
    ),
    "gpt2": Family(
        "GPT2LMHeadModel", "gpt2", _GPT2, names=GPT2, learned_positions=True,
        models="GPT-2",
    ),
    "mixtral": Family(
        "MixtralForCausalLM", "llama", _llama(131072, 1e-5), experts=_MIXTRAL_EXPERTS,
        expert_names=ExpertNames("block_sparse_moe", ("w1", "w3", "w2")), dense_ffn=False,
        attention_bias=None, kv_heads=8, rope_theta=1e6, windows=True,
        models="Mixtral 8x7B, 8x22B",
    ),
    "qwen3_moe": Family(
        "Qwen3MoeForCausalLM", "qwen3moe", _llama(32768), fixed={"qk_norm": True}, experts=_QWEN3_EXPERTS,
        lists_sparse_layers=True, kv_heads=4, windows=True, window=4096, window_switch=True,
        models="Qwen3-MoE",
    ),
    "deepseek_v3": Family(
        "DeepseekV3ForCausalLM", "deepseek2", _llama(4096), experts=_DEEPSEEK_EXPERTS,
        expert_switches=_SIGMOIDS, deepseek_router="v3", latents=True, kv_heads=128,
        models="DeepSeek-V3, DeepSeek-R1, Moonlight, Kimi K2",
    ),
    "olmoe": Family(
        "OlmoeForCausalLM", "olmoe", _llama(4096, 1e-5), fixed={"qk_norm": True, "qk_norm_over": "all"},
        experts=_OLMOE_EXPERTS, dense_ffn=False, computed={"clip_qkv": None}, even_heads=True,
        models="OLMoE",
    ),
    "qwen2_moe": Family(
        "Qwen2MoeForCausalLM", "qwen2moe", {**_llama(32768), "qkv_bias": JsonKey("qkv_bias", FLAG, True)},
        experts=_QWEN2_EXPERTS, expert_names=ExpertNames(shared="shared_expert"),
        stacked_names=replace(STACKED, shared="shared_expert"), expert_switches={"shared_gate": True},
        computed={"use_sliding_window": False}, lists_sparse_layers=True, attention_bias=None, kv_heads=16,
        models="Qwen1.5-MoE, Qwen2-MoE",
    ),
    "glm4_moe": Family(
        "Glm4MoeForCausalLM", "glm4moe",
        {**_llama(131072, 1e-5), "qk_norm": JsonKey("use_qk_norm", FLAG, False)},
        experts=_GLM4_EXPERTS, expert_switches=_SIGMOIDS, deepseek_router="v3",
        bias_of_output=False, kv_heads=8, rope_share=0.5,
        models="GLM-4.5, GLM-4.5-Air, GLM-4.6",
    ),
    "deepseek_v2": Family(
        "DeepseekV2ForCausalLM", "deepseek2", _llama(2048), experts=_DEEPSEEK_V2_EXPERTS,
        expert_switches={"renormalise": False}, computed={"norm_topk_prob": False}, deepseek_router="v2",
        shared_experts=2, latents=True,
        models="DeepSeek-V2, DeepSeek-V2-Lite",
    ),
    "granitemoe": Family(
        "GraniteMoeForCausalLM", "granitemoe", _GRANITE, experts=_MIXTRAL_EXPERTS,
        expert_names=ExpertNames(
            "block_sparse_moe", joint=("input_linear.weight", "output_linear.weight"), router="router.layer"
        ),
        stacked_names=replace(STACKED, module="block_sparse_moe", router="router"), dense_ffn=False,
        models="Granite 3 with experts",
    ),
    "gpt_oss": Family(
        "GptOssForCausalLM", "gpt-oss", _llama(131072, 1e-5), fixed={"attention_sinks": True},
        experts=_GPT_OSS_EXPERTS, expert_names=_GPT_OSS_NAMES, stacked_names=_GPT_OSS_NAMES,
        expert_switches={"router_bias": True, "expert_bias": True, "activation": "clamped_swiglu"},
        computed={"swiglu_alpha": CLAMPED_ALPHA, "swiglu_limit": CLAMPED_LIMIT}, dense_ffn=False,
        attention_bias=True, kv_heads=8, head_dim=64, rope_theta=1.5e5,
        rope_scaling={
            "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
            "original_max_position_embeddings": 4096,
        },
        windows=True, window=128, layer_types=True, window_pattern=2,
        models="GPT-OSS",
    ),
}  # fmt: skip
"""`model_type` of a config, and `model.family` -> its row."""
assert tuple(FAMILIES) == get_args(FamilyName)

SAME_AS = {"kimi_k2": "deepseek_v3"}
"""`model_type` of configs whose models are those of another one: keys, layers and names of tensors."""


def stored_shared_ffn(moe: MoeSpec, family: Family) -> int:
    """Return the channels of the shared experts in files.

    A family that counts shared experts has a whole number of them, each as wide as a routed one: what the
    model has not is filled up by channels of zeros, which add nothing.
    """
    if family.deepseek_router is None:
        return moe.shared_ffn
    return -(-moe.shared_ffn // moe.ffn) * moe.ffn
