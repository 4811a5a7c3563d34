"""Configs of published models without experts: fields of their config.json, and their parameters."""

from __future__ import annotations

from typing import Any

Config = dict[str, Any]


def config_of(family: Config, *sizes: int, **rest: Any) -> Config:
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
LLAMA31 = LLAMA3 | {
    "max_position_embeddings": 131072, "mlp_bias": False,
    "rope_scaling": {
        "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
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
QWEN25_LARGE = QWEN25 | {
    "max_position_embeddings": 131072, "max_window_layers": 70, "rms_norm_eps": 1e-5,
    "sliding_window": 131072, "tie_word_embeddings": False, "vocab_size": 152064,
}  # fmt: skip
MISTRAL = {
    "model_type": "mistral", "attention_dropout": 0.0, "hidden_act": "silu", "initializer_range": 0.02,
    "max_position_embeddings": 32768, "rms_norm_eps": 1e-5, "rope_theta": 1000000.0, "sliding_window": None,
    "tie_word_embeddings": False, "vocab_size": 32768,
}  # fmt: skip
PHI3 = {
    "model_type": "phi3", "attention_bias": False, "attention_dropout": 0.0, "embd_pdrop": 0.0,
    "hidden_act": "silu", "initializer_range": 0.02, "max_position_embeddings": 4096,
    "original_max_position_embeddings": 4096, "pad_token_id": 32000, "resid_pdrop": 0.0, "rms_norm_eps": 1e-5,
    "rope_scaling": None, "rope_theta": 10000.0, "sliding_window": 2047, "tie_word_embeddings": False,
    "vocab_size": 32064,
}  # fmt: skip
OLMO3 = OLMO2 | {
    "model_type": "olmo3", "max_position_embeddings": 65536, "sliding_window": 4096, "vocab_size": 100278,
    "rope_scaling": {
        "attention_factor": 1.2079441541679836, "beta_fast": 32.0, "beta_slow": 1.0, "factor": 8.0,
        "original_max_position_embeddings": 8192, "rope_type": "yarn",
    },
}  # fmt: skip
FOUR_LAYERS = [*3 * ["sliding_attention"], "full_attention"]
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
# The text_config of models that also read images, whose file leaves out what is transformers' default.
GEMMA3_LARGE = GEMMA3 | {
    "max_position_embeddings": 131072, "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
    "sliding_window": 1024, "vocab_size": 262208,
}  # fmt: skip
SIX_LAYERS = [*5 * ["sliding_attention"], "full_attention"]
VISION = 416_866_032
"""Parameters of the part of Gemma 3 that reads images; a matrix and a norm lead from its 1,152 channels."""

PUBLISHED_DENSE: dict[str, tuple[str, int, Config]] = {
    "gpt2": ("openai-community/gpt2", 124_439_808, _gpt2(768, 12, 12)),
    "gpt2-medium": ("openai-community/gpt2-medium", 354_823_168, _gpt2(1024, 24, 16)),
    "gpt2-large": ("openai-community/gpt2-large", 774_030_080, _gpt2(1280, 36, 20)),
    "gpt2-xl": ("openai-community/gpt2-xl", 1_557_611_200, _gpt2(1600, 48, 25)),
    "smollm2-135m": (
        "HuggingFaceTB/SmolLM2-135M",
        134_515_008,
        config_of(SMOLLM2, 576, 1536, 30, 9, 3, initializer_range=0.041666666666666664),
    ),
    "smollm2-360m": ("HuggingFaceTB/SmolLM2-360M", 361_821_120, config_of(SMOLLM2, 960, 2560, 32, 15, 5)),
    "smollm2-1.7b": (
        "HuggingFaceTB/SmolLM2-1.7B",
        1_711_376_384,
        config_of(SMOLLM2, 2048, 8192, 24, 32, 32, rope_theta=130000),
    ),
    "llama2-7b": ("meta-llama/Llama-2-7b-hf", 6_738_415_616, config_of(LLAMA2, 4096, 11008, 32, 32, 32)),
    "llama2-13b": ("meta-llama/Llama-2-13b-hf", 13_015_864_320, config_of(LLAMA2, 5120, 13824, 40, 40, 40)),
    "llama2-70b": ("meta-llama/Llama-2-70b-hf", 68_976_648_192, config_of(LLAMA2, 8192, 28672, 80, 64, 8)),
    "llama3-8b": ("meta-llama/Meta-Llama-3-8B", 8_030_261_248, config_of(LLAMA3, 4096, 14336, 32, 32, 8)),
    "llama3-70b": ("meta-llama/Meta-Llama-3-70B", 70_553_706_496, config_of(LLAMA3, 8192, 28672, 80, 64, 8)),
    "llama3.1-8b": ("meta-llama/Llama-3.1-8B", 8_030_261_248, config_of(LLAMA31, 4096, 14336, 32, 32, 8)),
    "llama3.1-70b": ("meta-llama/Llama-3.1-70B", 70_553_706_496, config_of(LLAMA31, 8192, 28672, 80, 64, 8)),
    "llama3.1-405b": (
        "meta-llama/Llama-3.1-405B",
        405_853_388_800,
        config_of(LLAMA31, 16384, 53248, 126, 128, 8),
    ),
    "llama3.2-1b": (
        "meta-llama/Llama-3.2-1B",
        1_235_814_400,
        config_of(LLAMA32, 2048, 8192, 16, 32, 8, head_dim=64),
    ),
    "llama3.2-3b": (
        "meta-llama/Llama-3.2-3B",
        3_212_749_824,
        config_of(LLAMA32, 3072, 8192, 28, 24, 8, head_dim=128),
    ),
    "tinyllama-1.1b": (
        "TinyLlama/TinyLlama-1.1B-Chat-v1.0",
        1_100_048_384,
        config_of(LLAMA, 2048, 5632, 22, 32, 4, max_position_embeddings=2048, vocab_size=32000),
    ),
    "smollm3-3b": (
        "HuggingFaceTB/SmolLM3-3B",
        3_075_098_624,
        config_of(
            LLAMA,
            2048,
            11008,
            36,
            16,
            4,
            model_type="smollm3",
            max_position_embeddings=65536,
            no_rope_layers=9 * [1, 1, 1, 0],
            no_rope_layer_interval=4,
            rms_norm_eps=1e-6,
            rope_theta=5000000.0,
            sliding_window=None,
            tie_word_embeddings=True,
            use_sliding_window=False,
            vocab_size=128256,
            pad_token_id=128004,
        ),
    ),
    "mistral-7b-v0.1": (
        "mistralai/Mistral-7B-v0.1",
        7_241_732_096,
        config_of(MISTRAL, 4096, 14336, 32, 32, 8, rope_theta=10000.0, sliding_window=4096, vocab_size=32000),
    ),
    "mistral-7b-v0.2": (
        "mistralai/Mistral-7B-Instruct-v0.2",
        7_241_732_096,
        config_of(MISTRAL, 4096, 14336, 32, 32, 8, vocab_size=32000),
    ),
    "mistral-7b": ("mistralai/Mistral-7B-v0.3", 7_248_023_552, config_of(MISTRAL, 4096, 14336, 32, 32, 8)),
    "mistral-nemo-12b": (
        "mistralai/Mistral-Nemo-Base-2407",
        12_247_782_400,
        config_of(
            MISTRAL, 5120, 14336, 40, 32, 8, head_dim=128, max_position_embeddings=128000, vocab_size=131072
        ),
    ),
    "mistral-small-24b": (
        "mistralai/Mistral-Small-24B-Base-2501",
        23_572_403_200,
        config_of(MISTRAL, 5120, 32768, 40, 32, 8, head_dim=128, rope_theta=1e8, vocab_size=131072),
    ),
    "mistral-large-123b": (
        "mistralai/Mistral-Large-Instruct-2411",
        122_610_069_504,
        config_of(MISTRAL, 12288, 28672, 88, 96, 8, head_dim=128, max_position_embeddings=131072),
    ),
    "phi3-mini": ("microsoft/Phi-3-mini-4k-instruct", 3_821_079_552, config_of(PHI3, 3072, 8192, 32, 32, 32)),
    "phi3-medium": (
        "microsoft/Phi-3-medium-4k-instruct",
        13_960_238_080,
        config_of(PHI3, 5120, 17920, 40, 40, 10),
    ),
    "phi4": (
        "microsoft/phi-4",
        14_659_507_200,
        config_of(
            PHI3,
            5120,
            17920,
            40,
            40,
            10,
            max_position_embeddings=16384,
            original_max_position_embeddings=16384,
            pad_token_id=100257,
            rope_theta=250000,
            sliding_window=None,
            vocab_size=100352,
        ),
    ),
    "olmo2-1b": ("allenai/OLMo-2-0425-1B", 1_484_916_736, config_of(OLMO2, 2048, 8192, 16, 16, 16)),
    "olmo2-7b": ("allenai/OLMo-2-1124-7B", 7_298_617_344, config_of(OLMO2, 4096, 11008, 32, 32, 32)),
    "olmo2-13b": ("allenai/OLMo-2-1124-13B", 13_716_198_400, config_of(OLMO2, 5120, 13824, 40, 40, 40)),
    "olmo2-32b": ("allenai/OLMo-2-0325-32B", 32_234_279_936, config_of(OLMO2, 5120, 27648, 64, 40, 8)),
    "olmo3-7b": (
        "allenai/Olmo-3-1025-7B",
        7_298_011_136,
        config_of(OLMO3, 4096, 11008, 32, 32, 32, layer_types=8 * FOUR_LAYERS),
    ),
    "olmo3-32b": (
        "allenai/Olmo-3-1125-32B",
        32_233_522_176,
        config_of(OLMO3, 5120, 27648, 64, 40, 8, layer_types=16 * FOUR_LAYERS),
    ),
    "gemma2-2b": ("google/gemma-2-2b", 2_614_341_888, config_of(GEMMA2, 2304, 9216, 26, 8, 4)),
    "gemma2-9b": ("google/gemma-2-9b", 9_241_705_984, config_of(GEMMA2, 3584, 14336, 42, 16, 8)),
    "gemma2-27b": (
        "google/gemma-2-27b",
        27_227_128_320,
        config_of(GEMMA2, 4608, 36864, 46, 32, 16, head_dim=128, query_pre_attn_scalar=144),
    ),
    "gemma3-270m": (
        "google/gemma-3-270m",
        268_098_176,
        config_of(GEMMA3, 640, 2048, 18, 4, 1, layer_types=3 * SIX_LAYERS),
    ),
    "gemma3-1b": (
        "google/gemma-3-1b-pt",
        999_885_952,
        config_of(GEMMA3, 1152, 6912, 26, 4, 1, sliding_window_pattern=6),
    ),
    "gemma3-4b": (
        "google/gemma-3-4b-pt",
        4_300_079_472 - VISION - 1152 * (2560 + 1),
        config_of(GEMMA3_LARGE, 2560, 10240, 34, 8, 4),
    ),
    "gemma3-12b": (
        "google/gemma-3-12b-pt",
        12_187_325_040 - VISION - 1152 * (3840 + 1),
        config_of(GEMMA3_LARGE, 3840, 15360, 48, 16, 8),
    ),
    "gemma3-27b": (
        "google/gemma-3-27b-pt",
        27_432_406_640 - VISION - 1152 * (5376 + 1),
        config_of(GEMMA3_LARGE, 5376, 21504, 62, 32, 16, head_dim=128, query_pre_attn_scalar=168),
    ),
    "qwen2.5-0.5b": (
        "Qwen/Qwen2.5-0.5B",
        494_032_768,
        config_of(QWEN25, 896, 4864, 24, 14, 2, max_window_layers=24),
    ),
    "qwen2.5-1.5b": (
        "Qwen/Qwen2.5-1.5B",
        1_543_714_304,
        config_of(
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
        config_of(QWEN25, 2048, 11008, 36, 16, 2, max_window_layers=36),
    ),
    "qwen2.5-7b": (
        "Qwen/Qwen2.5-7B",
        7_615_616_512,
        config_of(
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
    "qwen2.5-14b": ("Qwen/Qwen2.5-14B", 14_770_033_664, config_of(QWEN25_LARGE, 5120, 13824, 48, 40, 8)),
    "qwen2.5-32b": ("Qwen/Qwen2.5-32B", 32_763_876_352, config_of(QWEN25_LARGE, 5120, 27648, 64, 40, 8)),
    "qwen2.5-72b": ("Qwen/Qwen2.5-72B", 72_706_203_648, config_of(QWEN25_LARGE, 8192, 29568, 80, 64, 8)),
    "qwen3-0.6b": ("Qwen/Qwen3-0.6B", 596_049_920, config_of(QWEN3, 1024, 3072, 28, 16, 8)),
    "qwen3-1.7b": ("Qwen/Qwen3-1.7B", 1_720_574_976, config_of(QWEN3, 2048, 6144, 28, 16, 8)),
    "qwen3-4b": ("Qwen/Qwen3-4B", 4_022_468_096, config_of(QWEN3, 2560, 9728, 36, 32, 8)),
    "qwen3-8b": (
        "Qwen/Qwen3-8B",
        8_190_735_360,
        config_of(QWEN3, 4096, 12288, 36, 32, 8, tie_word_embeddings=False),
    ),
    "qwen3-14b": (
        "Qwen/Qwen3-14B",
        14_768_307_200,
        config_of(QWEN3, 5120, 17408, 40, 40, 8, tie_word_embeddings=False),
    ),
    "qwen3-32b": (
        "Qwen/Qwen3-32B",
        32_762_123_264,
        config_of(QWEN3, 5120, 25600, 64, 64, 8, tie_word_embeddings=False),
    ),
}
"""Preset -> the model's id, its number of parameters, and fields of its config.json as published."""
