"""Named models: the shapes that their papers and model cards give.

`model_names` has the repositories on the hub whose config.json each of the published ones equals.
"""

from __future__ import annotations

from typing import Any

Fields = dict[str, Any]

_LLAMA = {"family": "llama", "norm_eps": 1e-5}
_GLM4_MOE = {"family": "glm4_moe", "norm_eps": 1e-5}
_LLAMA2 = {**_LLAMA, "vocab_size": 32000, "max_seq_len": 4096}
_LLAMA3 = {**_LLAMA, "vocab_size": 128256, "rope_theta": 500000.0, "max_seq_len": 8192, "head_dim": 128}
_QWEN3 = {
    "family": "qwen3", "vocab_size": 151936, "head_dim": 128, "norm_eps": 1e-6, "rope_theta": 1e6,
    "max_seq_len": 40960, "qk_norm": True,
}  # fmt: skip
_LLAMA32 = {
    **_LLAMA3, "max_seq_len": 131072, "tied": True,
    "rope_scaling": {"kind": "llama3", "factor": 32.0, "original_max_seq_len": 8192},
}  # fmt: skip
_LLAMA31 = {
    **_LLAMA3, "max_seq_len": 131072,
    "rope_scaling": {"kind": "llama3", "factor": 8.0, "original_max_seq_len": 8192},
}  # fmt: skip
_SMOLLM2 = {**_LLAMA, "vocab_size": 49152, "max_seq_len": 8192, "rope_theta": 1e5, "tied": True}
_QWEN25 = {
    "family": "qwen2", "vocab_size": 151936, "norm_eps": 1e-6, "rope_theta": 1e6, "max_seq_len": 32768,
    "qkv_bias": True, "tied": True,
}  # fmt: skip
_QWEN25_LARGE = {**_QWEN25, "vocab_size": 152064, "norm_eps": 1e-5, "max_seq_len": 131072, "tied": False}
_MISTRAL = {"family": "mistral", "norm_eps": 1e-5, "head_dim": 128, "vocab_size": 32768, "max_seq_len": 32768}
_PHI3 = {
    "family": "phi3", "norm_eps": 1e-5, "vocab_size": 32064, "max_seq_len": 4096, "sliding_window": 2047,
}  # fmt: skip
_OLMO2 = {
    "family": "olmo2", "vocab_size": 100352, "norm_eps": 1e-6, "rope_theta": 5e5, "max_seq_len": 4096,
    "norm_placement": "post", "qk_norm": True, "qk_norm_over": "all",
}  # fmt: skip
_OLMO3 = {
    **_OLMO2, "family": "olmo3", "vocab_size": 100278, "max_seq_len": 65536, "sliding_window": 4096,
    "layer_types": (*3 * ("sliding_attention",), "full_attention"), "rope_local_base_freq": 5e5,
    "rope_scaling": {
        "kind": "yarn", "factor": 8.0, "original_max_seq_len": 8192, "attention_factor": 1.2079441541679836,
    },
}  # fmt: skip
_GEMMA = {
    "head_dim": 256, "norm_eps": 1e-6, "norm_unit_offset": True, "norm_placement": "both",
    "activation": "geglu_tanh", "attention_scale": 256**-0.5, "tied": True,
}  # fmt: skip
_GEMMA2 = {
    **_GEMMA, "family": "gemma2", "vocab_size": 256000, "max_seq_len": 8192, "sliding_window": 4096,
    "layer_types": ("sliding_attention", "full_attention"), "attention_softcap": 50.0, "logit_softcap": 30.0,
}  # fmt: skip
_GEMMA3 = {
    **_GEMMA, "family": "gemma3_text", "vocab_size": 262144, "max_seq_len": 32768, "sliding_window": 512,
    "layer_types": (*5 * ("sliding_attention",), "full_attention"), "rope_theta": 1e6,
    "rope_local_base_freq": 1e4, "qk_norm": True,
}  # fmt: skip
_GEMMA3_LARGE = {  # the text model, without the part that reads images
    **_GEMMA3, "vocab_size": 262208, "max_seq_len": 131072, "sliding_window": 1024,
    "rope_scaling": {"kind": "linear", "factor": 8.0},
}  # fmt: skip
_GPT = {
    "family": "gpt2", "norm": "layernorm", "activation": "gelu_tanh", "position": "learned",
    "qkv_bias": True, "out_bias": True, "mlp_bias": True, "tied": True, "vocab_size": 50257,
}  # fmt: skip
_GPT2 = {**_GPT, "max_seq_len": 1024}
_MIXTRAL = {"family": "mixtral", "norm_eps": 1e-5, "rope_theta": 1e6, "head_dim": 128, "vocab_size": 32000}
_QWEN3_MOE = {**_QWEN3, "family": "qwen3_moe"}
_QWEN3_CODER = {**_QWEN3_MOE, "rope_theta": 1e7, "max_seq_len": 262144}
_GPT_OSS = {
    "family": "gpt_oss", "head_dim": 64, "vocab_size": 201088, "max_seq_len": 131072, "norm_eps": 1e-5,
    "qkv_bias": True, "out_bias": True, "attention_sinks": True, "rope_theta": 1.5e5, "sliding_window": 128,
    "layer_types": ("sliding_attention", "full_attention"),
    "rope_scaling": {"kind": "yarn", "factor": 32.0, "original_max_seq_len": 4096, "truncate": False},
}  # fmt: skip
_GLM45 = {
    **_GLM4_MOE, "head_dim": 128, "vocab_size": 151552, "max_seq_len": 131072, "rope_theta": 1e6,
    "rope_dim": 64, "qkv_bias": True,
}  # fmt: skip
_DEEPSEEK = {
    "family": "deepseek_v3", "head_dim": 192, "vocab_size": 129280, "norm_eps": 1e-6, "max_seq_len": 163840,
    "init_std": 0.006, "mla": {"q_rank": 1536, "kv_rank": 512, "rope_dim": 64, "v_dim": 128},
}  # fmt: skip
_DEEPSEEK_V2 = {
    "family": "deepseek_v2", "head_dim": 192, "vocab_size": 102400, "norm_eps": 1e-6, "max_seq_len": 163840,
}  # fmt: skip
_MLA = {"q_rank": None, "kv_rank": 512, "rope_dim": 64, "v_dim": 128}
_MOONLIGHT = {
    "family": "deepseek_v3", "head_dim": 192, "vocab_size": 163840, "rope_theta": 5e4,
}  # fmt: skip
_KIMI_K2 = {
    **_MOONLIGHT, "norm_eps": 1e-6, "max_seq_len": 131072, "mla": {**_MLA, "q_rank": 1536},
    "rope_scaling": {
        "kind": "yarn", "factor": 32.0, "original_max_seq_len": 4096, "beta_fast": 1.0, "beta_slow": 1.0,
        "mscale": 1.0, "mscale_all_dim": 1.0,
    },
}  # fmt: skip


def _yarn40(scale: float) -> Fields:
    """Positions of DeepSeek-V2 and V3: 40 times as many as 4,096."""
    return {
        "kind": "yarn", "factor": 40.0, "original_max_seq_len": 4096, "mscale": scale,
        "mscale_all_dim": scale,
    }  # fmt: skip


def _model(
    base: Fields, layers: int, hidden: int, ffn: int, heads: int, kv_heads: int, **rest: Any
) -> Fields:
    sizes = {"layers": layers, "hidden": hidden, "ffn": ffn, "heads": heads, "kv_heads": kv_heads}
    return {**base, **sizes, **rest}


def _moe(experts: int, top_k: int, ffn: int, **rest: Any) -> Fields:
    return {"experts": experts, "top_k": top_k, "ffn": ffn, **rest}


_MOE_TINY = _moe(8, 2, 128, shared_ffn=128, router="sigmoid", bias=True, aux_loss=0.01, dense_first=1)
_MOE_SMALL = _moe(16, 2, 512, shared_ffn=384, router="sigmoid", bias=True, bias_rate=0.01, aux_loss=0.001)
_MOE_DEEPSEEK = _moe(
    256, 8, 2048, shared_ffn=2048, router="sigmoid", scale=2.5, groups=8, top_groups=4, bias=True,
    aux_loss=0.0001, dense_first=3,
)  # fmt: skip
_SIGMOID = {"router": "sigmoid", "bias": True}


def _gpt_oss(experts: int) -> Fields:
    return _moe(
        experts, 4, 2880, aux_loss=0.9, activation="clamped_swiglu", expert_bias=True, router_bias=True
    )


PRESETS: dict[str, Fields] = {
    # Ours: `tiny` for tests (3M parameters), `small` (32M) and `base` (125M) for a laptop.
    "tiny": _model(_LLAMA, 4, 256, 384, 8, 4, vocab_size=2048),
    "small": _model(_LLAMA, 8, 512, 1408, 8, 4, vocab_size=8192),
    # `moe-tiny` has as many active channels as tiny, `moe-small` as small.
    "moe-tiny": _model(_GLM4_MOE, 4, 256, 384, 8, 4, vocab_size=2048, moe=_MOE_TINY),
    "moe-small": _model(_GLM4_MOE, 8, 512, 1408, 8, 4, vocab_size=8192, moe=_MOE_SMALL),
    "base": _model(_LLAMA, 12, 768, 2048, 12, 4, vocab_size=32000),
    # Radford et al. 2019 (GPT-2), Table 2.
    "gpt2": _model(_GPT2, 12, 768, 3072, 12, 12),
    "gpt2-medium": _model(_GPT2, 24, 1024, 4096, 16, 16),
    "gpt2-large": _model(_GPT2, 36, 1280, 5120, 20, 20),
    "gpt2-xl": _model(_GPT2, 48, 1600, 6400, 25, 25),
    # Brown et al. 2020, Table 2.1.
    "gpt3-175b": _model(_GPT, 96, 12288, 49152, 96, 96, max_seq_len=2048),
    # Ben Allal et al. 2025 (SmolLM2), configs of the models.
    "smollm2-135m": _model(_SMOLLM2, 30, 576, 1536, 9, 3, init_std=1 / 24),
    "smollm2-360m": _model(_SMOLLM2, 32, 960, 2560, 15, 5),
    "smollm2-1.7b": _model(_SMOLLM2, 24, 2048, 8192, 32, 32, rope_theta=1.3e5),
    # Touvron et al. 2023 (Llama 2), model cards.
    "llama2-7b": _model(_LLAMA2, 32, 4096, 11008, 32, 32),
    "llama2-13b": _model(_LLAMA2, 40, 5120, 13824, 40, 40),
    "llama2-70b": _model(_LLAMA2, 80, 8192, 28672, 64, 8),
    # Grattafiori et al. 2024 (The Llama 3 Herd of Models), Table 3.
    "llama3-8b": _model(_LLAMA3, 32, 4096, 14336, 32, 8),
    "llama3-70b": _model(_LLAMA3, 80, 8192, 28672, 64, 8),
    "llama3-405b": _model(_LLAMA3, 126, 16384, 53248, 128, 8),
    # Meta 2024 (Llama 3.1), model cards; Llama 3.3 70B has the sizes of 3.1.
    "llama3.1-8b": _model(_LLAMA31, 32, 4096, 14336, 32, 8),
    "llama3.1-70b": _model(_LLAMA31, 80, 8192, 28672, 64, 8),
    "llama3.1-405b": _model(_LLAMA31, 126, 16384, 53248, 128, 8),
    # Meta 2024 (Llama 3.2), model cards.
    "llama3.2-1b": _model(_LLAMA32, 16, 2048, 8192, 32, 8, head_dim=64),
    "llama3.2-3b": _model(_LLAMA32, 28, 3072, 8192, 24, 8),
    # Zhang et al. 2024 (TinyLlama), config of the model.
    "tinyllama-1.1b": _model(_LLAMA, 22, 2048, 5632, 32, 4, vocab_size=32000),
    # Bakouch et al. 2025 (SmolLM3), config of the model.
    "smollm3-3b": _model(
        {**_LLAMA32, "family": "smollm3", "norm_eps": 1e-6, "rope_scaling": None},
        36,
        2048,
        11008,
        16,
        4,
        max_seq_len=65536,
        rope_theta=5e6,
        rope_layers=(True, True, True, False),
    ),
    # Jiang et al. 2023 (Mistral 7B), Table 1; Mistral AI 2024 and 2025, configs of the models.
    "mistral-7b-v0.1": _model(_MISTRAL, 32, 4096, 14336, 32, 8, vocab_size=32000, sliding_window=4096),
    "mistral-7b-v0.2": _model(_MISTRAL, 32, 4096, 14336, 32, 8, vocab_size=32000, rope_theta=1e6),
    "mistral-7b": _model(_MISTRAL, 32, 4096, 14336, 32, 8, rope_theta=1e6),
    "mistral-nemo-12b": _model(
        _MISTRAL, 40, 5120, 14336, 32, 8, vocab_size=131072, max_seq_len=128000, rope_theta=1e6
    ),
    "mistral-small-24b": _model(_MISTRAL, 40, 5120, 32768, 32, 8, vocab_size=131072, rope_theta=1e8),
    "mistral-large-123b": _model(_MISTRAL, 88, 12288, 28672, 96, 8, rope_theta=1e6, max_seq_len=131072),
    # Abdin et al. 2024 (Phi-3 and Phi-4 technical reports), configs of the models.
    "phi3-mini": _model(_PHI3, 32, 3072, 8192, 32, 32),
    "phi3-medium": _model(_PHI3, 40, 5120, 17920, 40, 10),
    "phi4": _model(
        _PHI3,
        40,
        5120,
        17920,
        40,
        10,
        vocab_size=100352,
        max_seq_len=16384,
        sliding_window=None,
        rope_theta=2.5e5,
    ),
    # Walsh et al. 2025 (2 OLMo 2 Furious), Table 3, and configs of the models.
    "olmo2-1b": _model(_OLMO2, 16, 2048, 8192, 16, 16),
    "olmo2-7b": _model(_OLMO2, 32, 4096, 11008, 32, 32),
    "olmo2-13b": _model(_OLMO2, 40, 5120, 13824, 40, 40),
    "olmo2-32b": _model(_OLMO2, 64, 5120, 27648, 40, 8),
    # Olmo Team 2025 (Olmo 3), configs of the models.
    "olmo3-7b": _model(_OLMO3, 32, 4096, 11008, 32, 32),
    "olmo3-32b": _model(_OLMO3, 64, 5120, 27648, 40, 8),
    # Gemma Team 2024 (Gemma 2) and 2025 (Gemma 3), configs of the models.
    "gemma2-2b": _model(_GEMMA2, 26, 2304, 9216, 8, 4, embedding_scale=2304**0.5),
    "gemma2-9b": _model(_GEMMA2, 42, 3584, 14336, 16, 8, embedding_scale=3584**0.5),
    "gemma2-27b": _model(
        _GEMMA2, 46, 4608, 36864, 32, 16, head_dim=128, attention_scale=144**-0.5, embedding_scale=4608**0.5
    ),
    "gemma3-270m": _model(_GEMMA3, 18, 640, 2048, 4, 1, embedding_scale=640**0.5),
    "gemma3-1b": _model(_GEMMA3, 26, 1152, 6912, 4, 1, embedding_scale=1152**0.5),
    "gemma3-4b": _model(_GEMMA3_LARGE, 34, 2560, 10240, 8, 4, embedding_scale=2560**0.5),
    "gemma3-12b": _model(_GEMMA3_LARGE, 48, 3840, 15360, 16, 8, embedding_scale=3840**0.5),
    "gemma3-27b": _model(
        _GEMMA3_LARGE,
        62,
        5376,
        21504,
        32,
        16,
        head_dim=128,
        attention_scale=168**-0.5,
        embedding_scale=5376**0.5,
    ),
    # Qwen Team 2024 (Qwen2.5 technical report), Table 1, and configs of the models.
    "qwen2.5-0.5b": _model(_QWEN25, 24, 896, 4864, 14, 2),
    "qwen2.5-1.5b": _model(_QWEN25, 28, 1536, 8960, 12, 2, max_seq_len=131072),
    "qwen2.5-3b": _model(_QWEN25, 36, 2048, 11008, 16, 2),
    "qwen2.5-7b": _model(_QWEN25, 28, 3584, 18944, 28, 4, max_seq_len=131072, vocab_size=152064, tied=False),
    "qwen2.5-14b": _model(_QWEN25_LARGE, 48, 5120, 13824, 40, 8),
    "qwen2.5-32b": _model(_QWEN25_LARGE, 64, 5120, 27648, 40, 8),
    "qwen2.5-72b": _model(_QWEN25_LARGE, 80, 8192, 29568, 64, 8),
    # Yang et al. 2025 (Qwen3 technical report), Table 1 and model cards.
    "qwen3-0.6b": _model(_QWEN3, 28, 1024, 3072, 16, 8, tied=True),
    "qwen3-1.7b": _model(_QWEN3, 28, 2048, 6144, 16, 8, tied=True),
    "qwen3-4b": _model(_QWEN3, 36, 2560, 9728, 32, 8, tied=True),
    "qwen3-8b": _model(_QWEN3, 36, 4096, 12288, 32, 8),
    "qwen3-14b": _model(_QWEN3, 40, 5120, 17408, 40, 8),
    "qwen3-32b": _model(_QWEN3, 64, 5120, 25600, 64, 8),
    "qwen3-30b-a3b": _model(_QWEN3_MOE, 48, 2048, 6144, 32, 4, moe=_moe(128, 8, 768, aux_loss=0.001)),
    "qwen3-235b-a22b": _model(_QWEN3_MOE, 94, 4096, 12288, 64, 4, moe=_moe(128, 8, 1536, aux_loss=0.001)),
    # Qwen Team 2025 (Qwen3-Coder), config of the model.
    "qwen3-coder-480b-a35b": _model(_QWEN3_CODER, 62, 6144, 8192, 96, 8, moe=_moe(160, 8, 2560)),
    # Muennighoff et al. 2024 (OLMoE), config of the model.
    "olmoe-1b-7b": _model(
        _OLMO2,
        16,
        2048,
        1024,
        16,
        16,
        family="olmoe",
        vocab_size=50304,
        norm_eps=1e-5,
        rope_theta=1e4,
        norm_placement="pre",
        moe=_moe(64, 8, 1024, renormalise=False, aux_loss=0.01),
    ),
    # OpenAI 2025 (gpt-oss-120b and gpt-oss-20b model card), Table 1, and configs of the models.
    "gpt-oss-20b": _model(_GPT_OSS, 24, 2880, 2880, 64, 8, moe=_gpt_oss(32)),
    "gpt-oss-120b": _model(_GPT_OSS, 36, 2880, 2880, 64, 8, moe=_gpt_oss(128)),
    # GLM-4.5 Team 2025 (GLM-4.5), Table 1, and configs of the models, without the layer for further tokens.
    "glm4.5": _model(
        _GLM45,
        92,
        5120,
        12288,
        96,
        8,
        qk_norm=True,
        moe=_moe(160, 8, 1536, shared_ffn=1536, scale=2.5, dense_first=3, **_SIGMOID),
    ),
    "glm4.5-air": _model(
        _GLM45, 46, 4096, 10944, 96, 8, moe=_moe(128, 8, 1408, shared_ffn=1408, dense_first=1, **_SIGMOID)
    ),
    # Jiang et al. 2024 (Mixtral of Experts), Table 1; the 8x22B's model card.
    "mixtral-8x7b": _model(
        _MIXTRAL, 32, 4096, 14336, 32, 8, max_seq_len=32768, moe=_moe(8, 2, 14336, aux_loss=0.02)
    ),
    "mixtral-8x22b": _model(
        _MIXTRAL, 56, 6144, 16384, 48, 8, max_seq_len=65536, moe=_moe(8, 2, 16384, aux_loss=0.001)
    ),
    # DeepSeek-AI 2024 (DeepSeek-V2), configs of the models.
    "deepseek-v2-lite": _model(
        _DEEPSEEK_V2,
        27,
        2048,
        10944,
        16,
        16,
        mla=_MLA,
        rope_scaling=_yarn40(0.707),
        moe=_moe(64, 6, 1408, shared_ffn=2816, renormalise=False, aux_loss=0.001, dense_first=1),
    ),
    "deepseek-v2": _model(
        _DEEPSEEK_V2,
        60,
        5120,
        12288,
        128,
        128,
        mla={**_MLA, "q_rank": 1536},
        rope_scaling=_yarn40(1.0),
        moe=_moe(
            160,
            6,
            1536,
            shared_ffn=3072,
            renormalise=False,
            scale=16.0,
            groups=8,
            top_groups=3,
            group_score="max",
            aux_loss=0.001,
            dense_first=1,
        ),
    ),
    # DeepSeek-AI 2024 (DeepSeek-V3), §4.2, and positions of the published models' config.json (§4.3).
    "deepseek-v3": _model(_DEEPSEEK, 61, 7168, 18432, 128, 128, moe=_MOE_DEEPSEEK, rope_scaling=_yarn40(1.0)),
    # Liu et al. 2025 (Muon is Scalable for LLM Training: Moonlight), config of the model.
    "moonlight-16b-a3b": _model(
        _MOONLIGHT,
        27,
        2048,
        11264,
        16,
        16,
        norm_eps=1e-5,
        max_seq_len=8192,
        mla=_MLA,
        moe=_moe(64, 6, 1408, shared_ffn=2816, scale=2.446, aux_loss=0.001, dense_first=1, **_SIGMOID),
    ),
    # Kimi Team 2025 (Kimi K2), Table 2, and config of the model.
    "kimi-k2": _model(
        _KIMI_K2,
        61,
        7168,
        18432,
        64,
        64,
        moe=_moe(384, 8, 2048, shared_ffn=2048, scale=2.827, aux_loss=0.001, dense_first=1, **_SIGMOID),
    ),
}
