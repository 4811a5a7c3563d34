"""A family of models whose Hugging Face files are read and written: what a row of the table says."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, Literal

from meshwright.spec.hf.config_keys import Keys
from meshwright.spec.hf.tensor_names import LLAMA, TensorNames
from meshwright.spec.layers import Activation


@dataclass(frozen=True)
class ExpertNames:
    """Names of a layer's experts in files: the module that holds them, and in it gate, up and down of each
    expert, or the `joint` tensors of gate and up, and of down, of all experts; the router; and the shared
    experts. Joint ones may have matrices transposed, with the outputs of gate and up in turns (`turns`)."""

    module: str = "mlp"
    linears: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    joint: tuple[str, str] | None = None
    turns: bool = False
    router: str = "gate"
    shared: str = "shared_experts"


STACKED = ExpertNames(joint=("experts.gate_up_proj", "experts.down_proj"))
"""The names in transformers 5, which stacks the experts of a layer."""


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
    stacked_names: ExpertNames = STACKED
    """Those of files with the experts stacked."""
    expert_switches: Mapping[str, Any] = field(default_factory=dict)
    """Fields of a `MoeSpec` that all its mixtures have."""
    computed: Mapping[str, Any] = field(default_factory=dict)
    """Keys that change outputs, with the one value that is computed."""
    dense_ffn: bool = True
    """False if `keys.ffn` is the width of an expert, and no layer is dense."""
    lists_sparse_layers: bool = False
    """True if `decoder_sparse_step` and `mlp_only_layers` say which layers have experts."""
    deepseek_router: Literal["v2", "v3"] | None = None
    """A router of groups with shared experts: v3's of sigmoids with a bias, beside layers that predict more
    tokens; or v2's of softmax."""
    shared_experts: int = 1
    """Default of `n_shared_experts`."""
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
    rope_scaling: Mapping[str, Any] = field(default_factory=dict)
    """Default of the rotary keys, where a config has none of them."""
    rope_share: float | None = None
    """Default of `partial_rotary_factor`, the share of channels that turn by position; None for all."""
    original_max_seq_len: int | None = None
    """Default of `original_max_position_embeddings`, for a family that has it beside the other keys."""
    rope_pairs: bool = False
    """True if files have the channels that turn together in pairs, and not in halves."""
    rope_by_type: bool = False
    """True if layers with a window have rotary positions of their own, which are not scaled."""
    rope_local: float | None = None
    """Default of the base of these; None for that of the others."""
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
