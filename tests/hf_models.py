"""Small models of transformers with random weights, of every family that is read and written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from meshwright.checkpoint.save_plan import narrow
from meshwright.checkpoint.weights import Weights, whole
from meshwright.exchange.hf import import_hf
from meshwright.exchange.stored_weights import tensor_shapes
from meshwright.spec import ModelSpec

transformers = pytest.importorskip("transformers", reason="transformers is not installed")

LLAMA: dict[str, Any] = {
    "vocab_size": 101, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128,
    "tie_word_embeddings": False, "initializer_range": 0.1,
}  # fmt: skip
LLAMA3_ROPE = {"rope_type": "llama3", "rope_theta": 500.0, "factor": 8.0, "low_freq_factor": 1.0,
               "high_freq_factor": 4.0, "original_max_position_embeddings": 32}  # fmt: skip
GPT2 = {
    "vocab_size": 101,
    "n_embd": 64,
    "n_layer": 3,
    "n_head": 4,
    "n_positions": 96,
    "initializer_range": 0.1,
}
MIXTRAL = LLAMA | {"num_local_experts": 4}
QWEN3_MOE = LLAMA | {
    "head_dim": 16, "num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 32,
    "norm_topk_prob": True,
}  # fmt: skip
DEEPSEEK = LLAMA | {
    "num_key_value_heads": 4, "n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 32,
    "n_shared_experts": 2, "n_group": 4, "topk_group": 2, "first_k_dense_replace": 1, "kv_lora_rank": 20,
    "q_lora_rank": 24, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 12,
}  # fmt: skip
DEEPSEEK_V2 = {key: value for key, value in DEEPSEEK.items() if key not in ("n_group", "topk_group")}
GROUPS = {"topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2}
OLMOE = LLAMA | {"num_experts": 6, "num_experts_per_tok": 3, "norm_topk_prob": True}
QWEN2_MOE = QWEN3_MOE | {"shared_expert_intermediate_size": 48, "norm_topk_prob": False}
GLM4_MOE = LLAMA | {
    "n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 32, "head_dim": 16,
}  # fmt: skip
GPT_OSS = LLAMA | {
    "num_local_experts": 6, "num_experts_per_tok": 3, "head_dim": 16, "sliding_window": 7,
}  # fmt: skip
GRANITE = {
    "embedding_multiplier": 6.0, "residual_multiplier": 0.3, "attention_multiplier": 0.1,
    "logits_scaling": 4.0,
}  # fmt: skip
SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
"""Tokens whose defaults are beyond the small vocabulary."""
GEMMA3 = LLAMA | {
    "head_dim": 16, "query_pre_attn_scalar": 20, "sliding_window": 7, "tie_word_embeddings": True,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
}  # fmt: skip
GEMMA2 = LLAMA | {
    "head_dim": 16, "query_pre_attn_scalar": 4, "sliding_window": 7, "tie_word_embeddings": True,
    "attn_logit_softcapping": 2.0, "final_logit_softcapping": 1.5,
}  # fmt: skip
QWEN_WINDOW = {"use_sliding_window": True, "sliding_window": 7}
TYPES = ["sliding_attention", "full_attention", "sliding_attention"]
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 32}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", LLAMA),
    "llama tied": ("Llama", LLAMA | {"tie_word_embeddings": True}),
    "llama biases, wide heads": ("Llama", LLAMA | {"attention_bias": True, "mlp_bias": True, "head_dim": 32}),
    "llama linear rope": (
        "Llama", LLAMA | {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4}}),
    "llama llama3 rope": ("Llama", LLAMA | {"rope_parameters": LLAMA3_ROPE}),
    "qwen3": ("Qwen3", LLAMA | {"head_dim": 16}),
    "qwen3 tied, biases": (
        "Qwen3", LLAMA | {"head_dim": 16, "tie_word_embeddings": True, "attention_bias": True}),
    "qwen3 windows from a layer on": (
        "Qwen3", LLAMA | QWEN_WINDOW | {"head_dim": 16, "max_window_layers": 2}),
    "qwen3 windows in some layers": (
        "Qwen3", LLAMA | QWEN_WINDOW | {"head_dim": 16, "layer_types": TYPES}),
    "qwen3_moe window": ("Qwen3Moe", QWEN3_MOE | QWEN_WINDOW),
    "mistral window": ("Mistral", LLAMA | {"sliding_window": 7}),
    "mistral": ("Mistral", LLAMA | {"sliding_window": None}),
    "llama yarn": ("Llama", LLAMA | {"rope_parameters": YARN}),
    "llama yarn, not truncated": (
        "Llama", LLAMA | {"rope_parameters": YARN | {"truncate": False, "attention_factor": 1.5,
                                                     "beta_fast": 4, "beta_slow": 0.5, "rope_theta": 1e3}}),
    "mixtral": ("Mixtral", MIXTRAL),
    "mixtral window, tied": ("Mixtral", MIXTRAL | {"sliding_window": 7, "tie_word_embeddings": True}),
    "qwen3_moe": ("Qwen3Moe", QWEN3_MOE),
    "qwen3_moe biases, dense first": (
        "Qwen3Moe", QWEN3_MOE | {"attention_bias": True, "mlp_only_layers": [0], "norm_topk_prob": False}),
    "qwen3_moe every second": ("Qwen3Moe", QWEN3_MOE | {"decoder_sparse_step": 2}),
    "deepseek_v3": ("DeepseekV3", DEEPSEEK),
    "deepseek_v3 yarn": (
        "DeepseekV3", DEEPSEEK | {"rope_parameters": YARN | {"mscale": 0.7, "mscale_all_dim": 1.0}}),
    "deepseek_v3 without a latent of queries": (
        "DeepseekV3", DEEPSEEK | {"q_lora_rank": None, "norm_topk_prob": False, "rms_norm_eps": 1e-3}),
    "olmoe": ("Olmoe", OLMOE | {"pad_token_id": 0, "eos_token_id": 2}),
    "olmoe biases, tied": (
        "Olmoe", OLMOE | {"pad_token_id": 0, "eos_token_id": 2, "attention_bias": True,
                          "tie_word_embeddings": True, "norm_topk_prob": False}),
    "qwen2_moe": ("Qwen2Moe", QWEN2_MOE),
    "qwen2_moe no biases, dense first": (
        "Qwen2Moe", QWEN2_MOE | {"qkv_bias": False, "mlp_only_layers": [0], "norm_topk_prob": True}),
    "glm4_moe": ("Glm4Moe", GLM4_MOE),
    "glm4_moe norms, biases, groups": (
        "Glm4Moe", GLM4_MOE | {
            "use_qk_norm": True, "attention_bias": True, "n_group": 4, "topk_group": 2, "n_shared_experts": 2,
            "norm_topk_prob": False, "routed_scaling_factor": 2.5, "first_k_dense_replace": 2,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e3, "partial_rotary_factor": 0.25}}),
    "deepseek_v2": ("DeepseekV2", DEEPSEEK_V2),
    "deepseek_v2 groups, yarn, no latent of queries": (
        "DeepseekV2", DEEPSEEK_V2 | GROUPS | {
            "q_lora_rank": None, "routed_scaling_factor": 16.0,
            "rope_parameters": YARN | {"mscale": 0.7, "mscale_all_dim": 1.0}}),
    "granitemoe": ("GraniteMoe", LLAMA | GRANITE | {"num_local_experts": 6, "num_experts_per_tok": 3}),
    "granitemoe tied, biases": (
        "GraniteMoe", LLAMA | {"attention_bias": True, "tie_word_embeddings": True}),
    "gpt_oss": ("GptOss", GPT_OSS),
    "gpt_oss no biases, tied, full layers": (
        "GptOss", GPT_OSS | {"attention_bias": False, "tie_word_embeddings": True,
                             "layer_types": ["full_attention"] * 3,
                             "rope_parameters": {"rope_type": "default", "rope_theta": 500.0}}),
    "qwen2": ("Qwen2", LLAMA),
    "qwen2 tied, windows from a layer on": (
        "Qwen2", LLAMA | QWEN_WINDOW | {"tie_word_embeddings": True, "max_window_layers": 1}),
    "smollm3": ("SmolLM3", LLAMA | SPECIAL | {"no_rope_layer_interval": 2}),
    "smollm3 listed": ("SmolLM3", LLAMA | SPECIAL | {"no_rope_layers": [1, 1, 0], "attention_bias": True}),
    "granite": ("Granite", LLAMA | GRANITE),
    "granite biases, tied": (
        "Granite", LLAMA | GRANITE | {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
    "phi3": ("Phi3", LLAMA | SPECIAL),
    "phi3 window, partial rotation": (
        "Phi3", LLAMA | SPECIAL | {"sliding_window": 7, "rope_parameters": {
            "rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.75}}),
    "phi3 longrope": (
        "Phi3", LLAMA | SPECIAL | {"original_max_position_embeddings": 32, "rope_scaling": {
            "type": "longrope", "short_factor": [1.0 + 0.1 * i for i in range(8)],
            "long_factor": [1.0 + 2.0 * i for i in range(8)]}}),
    "phi3 longrope, partial rotation": (
        "Phi3", LLAMA | SPECIAL | {"original_max_position_embeddings": 64, "rope_parameters": {
            "rope_type": "longrope", "short_factor": [1.5, 1.0, 2.0, 3.0, 1.0, 4.0],
            "long_factor": [1.0] * 6, "attention_factor": 1.3, "rope_theta": 1e3,
            "partial_rotary_factor": 0.75}}),
    "starcoder2": ("Starcoder2", LLAMA | SPECIAL),
    "starcoder2 window, tied, no biases": (
        "Starcoder2",
        LLAMA | SPECIAL | {"use_bias": False, "sliding_window": 7, "tie_word_embeddings": True}),
    "gemma3": ("Gemma3", GEMMA3),
    "gemma3 scaled": (
        "Gemma3", GEMMA3 | {"num_hidden_layers": 7, "layer_types": None, "rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e5},
            "sliding_attention": {"rope_type": "default", "rope_theta": 500.0}}}),
    "glm4": ("Glm4", LLAMA | SPECIAL | {"head_dim": 16}),
    "glm4 without biases": (
        "Glm4", LLAMA | SPECIAL | {"head_dim": 16, "attention_bias": False, "rope_parameters": {
            "rope_type": "default", "rope_theta": 1e3, "partial_rotary_factor": 0.25}}),
    "cohere2": ("Cohere2", LLAMA | SPECIAL | {"sliding_window": 7, "num_hidden_layers": 5}),
    "cohere2 untied, biases": (
        "Cohere2", LLAMA | SPECIAL | {"sliding_window": 7, "layer_types": TYPES, "attention_bias": True,
                                      "logit_scale": 0.25}),
    "olmo2": ("Olmo2", LLAMA | SPECIAL),
    "olmo2 tied, biases": ("Olmo2", LLAMA | SPECIAL | {"attention_bias": True, "tie_word_embeddings": True}),
    "gemma2": ("Gemma2", GEMMA2),
    "gemma2 without caps": (
        "Gemma2", GEMMA2 | {"attn_logit_softcapping": None, "final_logit_softcapping": None,
                            "layer_types": TYPES, "attention_bias": True}),
    "olmo3": ("Olmo3", LLAMA | SPECIAL | {"sliding_window": 7, "num_hidden_layers": 5}),
    "olmo3 yarn on full layers": (
        "Olmo3", LLAMA | SPECIAL | {"sliding_window": 7, "layer_types": TYPES, "rope_scaling": YARN}),
    "gpt2": ("GPT2", GPT2),
    "gpt2 erf, narrow": ("GPT2", GPT2 | {"activation_function": "gelu", "n_inner": 80}),
    "gpt2 untied": ("GPT2", GPT2 | {"tie_word_embeddings": False}),
}  # fmt: skip
TOKENS = torch.randint(0, 101, (2, 48), generator=torch.Generator().manual_seed(0))


def config_class(family: str) -> Any:
    """The class of a family's config in transformers."""
    return getattr(transformers, f"{family}TextConfig" if family == "Gemma3" else f"{family}Config")


def causal_lm(family: str) -> str:
    """The name of a family's model in transformers."""
    return "GPT2LMHeadModel" if family == "GPT2" else f"{family}ForCausalLM"


def save_theirs(folder: Path, family: str, fields: dict[str, Any], **how: Any) -> Any:
    """A model of transformers with random weights (biases and norms too), saved in `folder`."""
    torch.manual_seed(0)
    model = getattr(transformers, causal_lm(family))(config_class(family)(**fields)).float().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(0.1 * torch.randn_like(parameter))
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.uniform_(-0.2, 0.2)
    model.save_pretrained(folder, **how)
    return model


def read_whole(folder: Path) -> tuple[ModelSpec, dict[str, torch.Tensor]]:
    """The spec of a folder, and all of its weights under the decoder's names."""
    spec, weights = import_hf(folder)
    return spec, read_all(weights, spec)


def read_all(weights: Weights, spec: ModelSpec) -> dict[str, torch.Tensor]:
    """All weights of a model by name."""
    shapes = tensor_shapes(spec)
    found: dict[str, torch.Tensor] = {}
    for name, rectangle, value in weights.parts({name: [whole(shape)] for name, shape in shapes.items()}):
        narrow(found.setdefault(name, value.new_empty(shapes[name])), rectangle).copy_(value)
    return found


def their_logits(folder: Path) -> torch.Tensor:
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        return model(TOKENS).logits


def same_files(a: Path, b: Path) -> None:
    ours, theirs = (
        {k: v for f in sorted(p.glob("*.safetensors")) for k, v in load_file(f).items()} for p in (a, b)
    )
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
