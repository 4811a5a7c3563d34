"""Presets are the published models: their config.json, as it is read, and their number of parameters."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from meshwright.spec import ModelSpec
from meshwright.spec.presets import PRESETS

Config = dict[str, Any]


def _config(family: Config, *sizes: int, **rest: Any) -> Config:
    """Return a config with hidden and intermediate size, layers, heads and key-value heads."""
    keys = (
        "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
    )  # fmt: skip
    return {**family, **dict(zip(keys, sizes, strict=True)), **rest}


def _gpt2(width: int, layers: int, heads: int) -> Config:
    return {
        "model_type": "gpt2", "activation_function": "gelu_new", "attn_pdrop": 0.1, "embd_pdrop": 0.1,
        "initializer_range": 0.02, "layer_norm_epsilon": 1e-5, "n_ctx": 1024, "n_embd": width,
        "n_head": heads, "n_layer": layers, "n_positions": 1024, "resid_pdrop": 0.1, "vocab_size": 50257,
    }  # fmt: skip


LLAMA = {
    "model_type": "llama", "attention_bias": False, "hidden_act": "silu", "initializer_range": 0.02,
    "pretraining_tp": 1, "rms_norm_eps": 1e-5, "rope_scaling": None,
}  # fmt: skip
LLAMA2 = LLAMA | {"max_position_embeddings": 4096, "tie_word_embeddings": False, "vocab_size": 32000}
LLAMA3 = LLAMA | {
    "max_position_embeddings": 8192, "rope_theta": 500000.0, "tie_word_embeddings": False,
    "vocab_size": 128256,
}  # fmt: skip
LLAMA32 = LLAMA | {
    "max_position_embeddings": 131072, "mlp_bias": False, "rope_theta": 500000.0, "tie_word_embeddings": True,
    "vocab_size": 128256,
    "rope_scaling": {
        "factor": 32.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192, "rope_type": "llama3",
    },
}  # fmt: skip
SMOLLM2 = LLAMA | {
    "is_llama_config": True, "max_position_embeddings": 8192, "rope_interleaved": False, "rope_theta": 100000,
    "tie_word_embeddings": True, "vocab_size": 49152,
}  # fmt: skip
QWEN25 = {
    "model_type": "qwen2", "attention_dropout": 0.0, "hidden_act": "silu", "initializer_range": 0.02,
    "max_position_embeddings": 32768, "rms_norm_eps": 1e-6, "rope_theta": 1000000.0, "sliding_window": 32768,
    "tie_word_embeddings": True, "use_sliding_window": False, "vocab_size": 151936,
}  # fmt: skip
QWEN3 = {
    "model_type": "qwen3", "attention_bias": False, "attention_dropout": 0.0, "head_dim": 128,
    "hidden_act": "silu", "initializer_range": 0.02, "max_position_embeddings": 40960, "rms_norm_eps": 1e-6,
    "rope_scaling": None, "rope_theta": 1000000, "sliding_window": None, "tie_word_embeddings": True,
    "use_sliding_window": False, "vocab_size": 151936,
}  # fmt: skip
OLMO2 = {
    "model_type": "olmo2", "attention_bias": False, "attention_dropout": 0.0, "hidden_act": "silu",
    "initializer_range": 0.02, "max_position_embeddings": 4096, "rms_norm_eps": 1e-6, "rope_scaling": None,
    "rope_theta": 500000, "tie_word_embeddings": False, "vocab_size": 100352,
}  # fmt: skip
GEMMA2 = {
    "model_type": "gemma2", "attention_bias": False, "attention_dropout": 0.0, "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0, "head_dim": 256, "hidden_act": "gelu_pytorch_tanh",
    "hidden_activation": "gelu_pytorch_tanh", "initializer_range": 0.02, "max_position_embeddings": 8192,
    "query_pre_attn_scalar": 256, "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "sliding_window": 4096,
    "vocab_size": 256000,
}  # fmt: skip
GEMMA3 = {
    "model_type": "gemma3_text", "attention_bias": False, "attention_dropout": 0.0,
    "attn_logit_softcapping": None, "final_logit_softcapping": None, "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh", "initializer_range": 0.02, "max_position_embeddings": 32768,
    "query_pre_attn_scalar": 256, "rms_norm_eps": 1e-6, "rope_local_base_freq": 10000, "rope_scaling": None,
    "rope_theta": 1000000, "sliding_window": 512, "vocab_size": 262144,
}  # fmt: skip
SIX_LAYERS = [*5 * ["sliding_attention"], "full_attention"]
MIXTRAL = {
    "model_type": "mixtral", "num_experts_per_tok": 2, "num_local_experts": 8, "rms_norm_eps": 1e-5,
    "rope_theta": 1e6, "sliding_window": None, "vocab_size": 32000,
}  # fmt: skip
QWEN3_MOE = QWEN3 | {
    "model_type": "qwen3_moe", "decoder_sparse_step": 1, "mlp_only_layers": [], "norm_topk_prob": True,
    "num_experts": 128, "num_experts_per_tok": 8, "router_aux_loss_coef": 0.001, "tie_word_embeddings": False,
}  # fmt: skip
# The published file has other positions, init and balance loss than the training of the paper's 4.2.
DEEPSEEK_V3 = {
    "model_type": "deepseek_v3", "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64, "v_head_dim": 128, "n_routed_experts": 256, "n_shared_experts": 1,
    "moe_intermediate_size": 2048, "num_experts_per_tok": 8, "n_group": 8, "topk_group": 4,
    "topk_method": "noaux_tc", "scoring_func": "sigmoid", "norm_topk_prob": True,
    "routed_scaling_factor": 2.5, "first_k_dense_replace": 3, "moe_layer_freq": 1, "vocab_size": 129280,
    "rms_norm_eps": 1e-6, "rope_theta": 10000, "max_position_embeddings": 4096, "initializer_range": 0.006,
    "aux_loss_alpha": 0.0001, "num_nextn_predict_layers": 1,
}  # fmt: skip

PUBLISHED: dict[str, tuple[str, int, Config]] = {
    "gpt2": ("openai-community/gpt2", 124_439_808, _gpt2(768, 12, 12)),
    "gpt2-medium": ("openai-community/gpt2-medium", 354_823_168, _gpt2(1024, 24, 16)),
    "gpt2-large": ("openai-community/gpt2-large", 774_030_080, _gpt2(1280, 36, 20)),
    "gpt2-xl": ("openai-community/gpt2-xl", 1_557_611_200, _gpt2(1600, 48, 25)),
    "smollm2-135m": (
        "HuggingFaceTB/SmolLM2-135M",
        134_515_008,
        _config(SMOLLM2, 576, 1536, 30, 9, 3, initializer_range=0.041666666666666664),
    ),
    "smollm2-360m": ("HuggingFaceTB/SmolLM2-360M", 361_821_120, _config(SMOLLM2, 960, 2560, 32, 15, 5)),
    "smollm2-1.7b": (
        "HuggingFaceTB/SmolLM2-1.7B",
        1_711_376_384,
        _config(SMOLLM2, 2048, 8192, 24, 32, 32, rope_theta=130000),
    ),
    "llama2-7b": ("meta-llama/Llama-2-7b-hf", 6_738_415_616, _config(LLAMA2, 4096, 11008, 32, 32, 32)),
    "llama2-13b": ("meta-llama/Llama-2-13b-hf", 13_015_864_320, _config(LLAMA2, 5120, 13824, 40, 40, 40)),
    "llama2-70b": ("meta-llama/Llama-2-70b-hf", 68_976_648_192, _config(LLAMA2, 8192, 28672, 80, 64, 8)),
    "llama3-8b": ("meta-llama/Meta-Llama-3-8B", 8_030_261_248, _config(LLAMA3, 4096, 14336, 32, 32, 8)),
    "llama3-70b": ("meta-llama/Meta-Llama-3-70B", 70_553_706_496, _config(LLAMA3, 8192, 28672, 80, 64, 8)),
    "llama3.2-1b": (
        "meta-llama/Llama-3.2-1B",
        1_235_814_400,
        _config(LLAMA32, 2048, 8192, 16, 32, 8, head_dim=64),
    ),
    "llama3.2-3b": (
        "meta-llama/Llama-3.2-3B",
        3_212_749_824,
        _config(LLAMA32, 3072, 8192, 28, 24, 8, head_dim=128),
    ),
    "olmo2-1b": ("allenai/OLMo-2-0425-1B", 1_484_916_736, _config(OLMO2, 2048, 8192, 16, 16, 16)),
    "olmo2-7b": ("allenai/OLMo-2-1124-7B", 7_298_617_344, _config(OLMO2, 4096, 11008, 32, 32, 32)),
    "gemma2-2b": ("google/gemma-2-2b", 2_614_341_888, _config(GEMMA2, 2304, 9216, 26, 8, 4)),
    "gemma3-270m": (
        "google/gemma-3-270m",
        268_098_176,
        _config(GEMMA3, 640, 2048, 18, 4, 1, layer_types=3 * SIX_LAYERS),
    ),
    "gemma3-1b": (
        "google/gemma-3-1b-pt",
        999_885_952,
        _config(GEMMA3, 1152, 6912, 26, 4, 1, sliding_window_pattern=6),
    ),
    "qwen2.5-0.5b": (
        "Qwen/Qwen2.5-0.5B",
        494_032_768,
        _config(QWEN25, 896, 4864, 24, 14, 2, max_window_layers=24),
    ),
    "qwen2.5-1.5b": (
        "Qwen/Qwen2.5-1.5B",
        1_543_714_304,
        _config(
            QWEN25,
            1536,
            8960,
            28,
            12,
            2,
            max_position_embeddings=131072,
            sliding_window=131072,
            max_window_layers=28,
        ),
    ),
    "qwen2.5-3b": (
        "Qwen/Qwen2.5-3B",
        3_085_938_688,
        _config(QWEN25, 2048, 11008, 36, 16, 2, max_window_layers=36),
    ),
    "qwen2.5-7b": (
        "Qwen/Qwen2.5-7B",
        7_615_616_512,
        _config(
            QWEN25,
            3584,
            18944,
            28,
            28,
            4,
            max_position_embeddings=131072,
            sliding_window=131072,
            max_window_layers=28,
            tie_word_embeddings=False,
            vocab_size=152064,
        ),
    ),
    "qwen3-0.6b": ("Qwen/Qwen3-0.6B", 596_049_920, _config(QWEN3, 1024, 3072, 28, 16, 8)),
    "qwen3-1.7b": ("Qwen/Qwen3-1.7B", 1_720_574_976, _config(QWEN3, 2048, 6144, 28, 16, 8)),
    "qwen3-4b": ("Qwen/Qwen3-4B", 4_022_468_096, _config(QWEN3, 2560, 9728, 36, 32, 8)),
    "qwen3-8b": (
        "Qwen/Qwen3-8B",
        8_190_735_360,
        _config(QWEN3, 4096, 12288, 36, 32, 8, tie_word_embeddings=False),
    ),
    "qwen3-32b": (
        "Qwen/Qwen3-32B",
        32_762_123_264,
        _config(QWEN3, 5120, 25600, 64, 64, 8, tie_word_embeddings=False),
    ),
    "qwen3-30b-a3b": (
        "Qwen/Qwen3-30B-A3B",
        30_532_122_624,
        _config(QWEN3_MOE, 2048, 6144, 48, 32, 4, moe_intermediate_size=768),
    ),
    "qwen3-235b-a22b": (
        "Qwen/Qwen3-235B-A22B",
        235_093_634_560,
        _config(QWEN3_MOE, 4096, 12288, 94, 64, 4, moe_intermediate_size=1536),
    ),
    "mixtral-8x7b": (
        "mistralai/Mixtral-8x7B-v0.1",
        46_702_792_704,
        _config(MIXTRAL, 4096, 14336, 32, 32, 8, max_position_embeddings=32768, router_aux_loss_coef=0.02),
    ),
    "mixtral-8x22b": (
        "mistralai/Mixtral-8x22B-v0.1",
        140_620_634_112,
        _config(
            MIXTRAL,
            6144,
            16384,
            56,
            48,
            8,
            max_position_embeddings=65536,
            router_aux_loss_coef=0.001,
            router_jitter_noise=0.0,
        ),
    ),
    # Biases of 58 routers are counted in the file; they have no gradient, and are buffers here.
    "deepseek-v3": (
        "deepseek-ai/DeepSeek-V3-Base",
        671_026_419_200 - 58 * 256,
        _config(DEEPSEEK_V3, 7168, 18432, 61, 128, 128),
    ),
}
"""Preset -> the model's id, its number of parameters, and fields of its config.json as published."""

UNPUBLISHED = {"tiny", "small", "moe-tiny", "moe-small", "base", "gpt3-175b", "llama3-405b"}
"""Our own sizes, GPT-3, and Llama 3 405B, whose file is that of 3.1, trained on longer sequences."""


def read(folder: Path, config: Config) -> ModelSpec:
    (folder / "config.json").write_text(json.dumps(config))
    return ModelSpec.model_validate({"hf": str(folder)})


@pytest.mark.parametrize("preset", PUBLISHED)
def test_presets_are_the_published_models(preset: str, tmp_path: Path) -> None:
    _, parameters, config = PUBLISHED[preset]
    ignored = {"hf", "preset"}
    model = ModelSpec.model_validate({"preset": preset})
    assert model.model_dump(exclude=ignored) == read(tmp_path, config).model_dump(exclude=ignored)
    assert model.parameters == parameters


def test_every_preset_is_compared_or_said_not_to_be() -> None:
    assert PUBLISHED.keys() | UNPUBLISHED == PRESETS.keys()
    assert not PUBLISHED.keys() & UNPUBLISHED
    assert len({model for model, _, _ in PUBLISHED.values()}) == len(PUBLISHED)
