"""The families of models whose Hugging Face files are read and written: one row for each.

A family differs from the others in names and defaults; the decoder that computes it is the same. Names and
defaults are those of transformers, of which a file may leave out every key with a default. Names of tensors
that no field here gives are in `exchange/hf_state_dict.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from meshwright.spec.hf.config_keys import Keys
from meshwright.spec.hf.json_object import COUNT, FACTOR, FLAG, LAYERS, NUMBER, PAIR, SIZE, JsonKey

FamilyName = Literal["llama", "qwen3", "mistral", "gpt2", "mixtral", "qwen3_moe", "deepseek_v3"]


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
    gguf: str
    """The architecture in llama.cpp."""
    keys: Keys
    """The keys of a `ModelSpec` that correspond to one field."""
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
    conv1d: bool = False
    """True for GPT-2's files: learned positions, and weights that are stored transposed (Conv1D)."""
    qk_norm: bool = False
    attention_bias: bool = True
    """True if the config may ask for biases of attention."""
    kv_heads: int | None = None
    """Default; None for as many as heads."""
    head_dim: int | None = None
    """Default; None for the hidden size over the heads."""
    even_heads: bool = False
    """True if the heads must divide the hidden size where no `head_dim` is given."""
    rope_theta: float = 1e4
    """Default."""
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

    @property
    def prefix(self) -> str:
        """Prefix of the names of tensors, but the head's."""
        return "transformer." if self.conv1d else "model."

    @property
    def embedding(self) -> str:
        """Name of the embedding's weight."""
        return self.prefix + ("wte.weight" if self.conv1d else "embed_tokens.weight")


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

FAMILIES: dict[str, Family] = {
    "llama": Family(
        "LlamaForCausalLM", "llama", {**_llama(2048), "mlp_bias": JsonKey("mlp_bias", FLAG, False)},
        even_heads=True,
    ),
    "qwen3": Family(
        "Qwen3ForCausalLM", "qwen3", _llama(32768),
        qk_norm=True, kv_heads=32, head_dim=128,
        windows=True, window=4096, window_switch=True, layer_types=True, full_layers_first=28,
    ),
    "mistral": Family(
        "MistralForCausalLM", "llama", _llama(131072),
        attention_bias=False, kv_heads=8, windows=True, window=4096, layer_types=True,
    ),
    "gpt2": Family("GPT2LMHeadModel", "gpt2", _GPT2, conv1d=True),
    "mixtral": Family(
        "MixtralForCausalLM", "llama", _llama(131072, 1e-5), _MIXTRAL_EXPERTS,
        ExpertNames("block_sparse_moe", ("w1", "w3", "w2")), dense_ffn=False,
        attention_bias=False, kv_heads=8, rope_theta=1e6, windows=True,
    ),
    "qwen3_moe": Family(
        "Qwen3MoeForCausalLM", "qwen3moe", _llama(32768), _QWEN3_EXPERTS,
        lists_sparse_layers=True, qk_norm=True, kv_heads=4, windows=True, window=4096, window_switch=True,
    ),
    "deepseek_v3": Family(
        "DeepseekV3ForCausalLM", "deepseek2", _llama(4096), _DEEPSEEK_EXPERTS,
        deepseek_router=True, latents=True,
    ),
}  # fmt: skip
"""`model_type` of a config, and `model.family` -> its row."""
assert tuple(FAMILIES) == get_args(FamilyName)
