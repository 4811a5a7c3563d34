"""The families of models whose Hugging Face files are read and written: one row for each.

A family differs from the others in names and defaults; the decoder that computes it is the same. Names and
defaults are those of transformers, of which a file may leave out every key with a default. Names of tensors
that no field here gives are in `exchange/hf_state_dict.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, Literal, get_args

from meshwright.spec.hf.config_keys import Keys
from meshwright.spec.hf.json_object import COUNT, FACTOR, FLAG, LAYERS, NUMBER, PAIR, SIZE, JsonKey
from meshwright.spec.hf.tensor_names import (
    GEMMA,
    GLM4,
    GPT2,
    LLAMA,
    OLMO2,
    PARALLEL,
    PHI3,
    STARCODER2,
    TensorNames,
)
from meshwright.spec.layers import Activation

FamilyName = Literal[
    "llama", "qwen2", "qwen3", "mistral", "smollm3", "granite", "phi3", "starcoder2", "gemma3_text", "glm4",
    "cohere2", "olmo2", "gpt2", "mixtral", "qwen3_moe", "deepseek_v3",
]  # fmt: skip


@dataclass(frozen=True)
class ExpertNames:
    """Names of a layer's experts in files: the module that holds them, and gate, up and down of each."""

    module: str = "mlp"
    linears: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True)
class Family:
    """A row of the table: how files of a family describe and store a model."""

    causal_lm: str
    """The class in transformers."""
    gguf: str | None
    """The architecture in llama.cpp; None where its files are not written."""
    keys: Keys
    """The keys of a `ModelSpec` that correspond to one field."""
    _: KW_ONLY
    models: str
    """Published models of the family, for the page of models."""
    names: TensorNames = LLAMA
    fixed: Mapping[str, Any] = field(default_factory=dict)
    """Fields of a `ModelSpec` that all its models have."""
    activations: tuple[str, Mapping[str, Activation]] = ("hidden_act", {"silu": "swiglu", "swish": "swiglu"})
    """The key of the activation, and its values; the first is the default."""
    experts: Keys | None = None
    """The keys of a `MoeSpec` that correspond to one field; None for a family without experts."""
    expert_names: ExpertNames = ExpertNames()
    dense_ffn: bool = True
    """False if `keys.ffn` is the width of an expert, and no layer is dense."""
    lists_sparse_layers: bool = False
    """True if `decoder_sparse_step` and `mlp_only_layers` say which layers have experts."""
    deepseek_router: bool = False
    """True for a router of sigmoids and groups with shared experts, and layers that predict more tokens."""
    latents: bool = False
    """True for latent attention (`MLA_KEYS`), False for grouped queries."""
    learned_positions: bool = False
    """True for GPT-2's configs."""
    attention_bias: bool | None = False
    """Default of `attention_bias`, the biases of attention; None for a family without the key."""
    bias_of_output: bool = True
    """True if these are also of the output."""
    kv_heads: int | None = None
    """Default; None for as many as heads."""
    head_dim: int | None = None
    """Default; None for the hidden size over the heads."""
    even_heads: bool = False
    """True if the heads must divide the hidden size where no `head_dim` is given."""
    rope_theta: float = 1e4
    """Default."""
    rope_share: float | None = None
    """Default of `partial_rotary_factor`, the share of channels that turn by position; None for all."""
    rope_pairs: bool = False
    """True if files have the channels that turn together in pairs, and not in halves."""
    rope_local: float | None = None
    """Default of the base of layers with a window, where it may differ from that of the others."""
    skips_rope: Literal["no_rope_layers", "full_attention"] | None = None
    """Which layers have no rotary positions: those of a list, or those without a window."""
    scaled_embedding: bool = False
    """True if embeddings are multiplied by the root of the hidden size."""
    query_scalar: int | None = None
    """Default of `query_pre_attn_scalar`, 1 over whose root scores are multiplied by."""
    windows: bool = False
    """True if `sliding_window` is the window of attention."""
    window: int | None = None
    """Default."""
    window_switch: bool = False
    """True if layers have the window only where `use_sliding_window` says so."""
    layer_types: bool = False
    """True if `layer_types` may say which layers have the window; a Mistral with them is read by transformers
    as a Ministral."""
    full_layers_first: int | None = None
    """Default of `max_window_layers`, the first layers that have no window; None without the key."""
    window_pattern: int | None = None
    """Default of `sliding_window_pattern`: each n-th layer has no window; None without the key."""


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
        "GraniteForCausalLM", "granite",
        {
            **_llama(2048),
            "mlp_bias": JsonKey("mlp_bias", FLAG, False),
            "embedding_scale": JsonKey("embedding_multiplier", NUMBER, 1.0),
            "residual_scale": JsonKey("residual_multiplier", NUMBER, 1.0),
            "attention_scale": JsonKey("attention_multiplier", NUMBER, 1.0),
            "logit_scale": JsonKey("logits_scaling", NUMBER, 1.0, inverse=True),
        },
        models="Granite 3",
    ),
    "phi3": Family(
        "Phi3ForCausalLM", "phi3", _llama(4096, 1e-5), names=PHI3,
        attention_bias=None, rope_share=1.0, windows=True,
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
    "gemma3_text": Family(
        "Gemma3ForCausalLM", "gemma3", _llama(131072, tied=True), names=GEMMA,
        fixed={"norm_placement": "both", "norm_unit_offset": True, "qk_norm": True},
        activations=("hidden_activation", _TANH),
        kv_heads=4, head_dim=256, rope_theta=1e6, rope_local=1e4, scaled_embedding=True, query_scalar=256,
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
        deepseek_router=True, latents=True,
        models="DeepSeek-V3, DeepSeek-R1, Moonlight",
    ),
}  # fmt: skip
"""`model_type` of a config, and `model.family` -> its row."""
assert tuple(FAMILIES) == get_args(FamilyName)
