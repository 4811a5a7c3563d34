"""Named models: the shapes that their papers and model cards give."""

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
_SMOLLM2 = {**_LLAMA, "vocab_size": 49152, "max_seq_len": 8192, "rope_theta": 1e5, "tied": True}
_QWEN25 = {
    "family": "qwen2", "vocab_size": 151936, "norm_eps": 1e-6, "rope_theta": 1e6, "max_seq_len": 32768,
    "qkv_bias": True, "tied": True,
}  # fmt: skip
_OLMO2 = {
    "family": "olmo2", "vocab_size": 100352, "norm_eps": 1e-6, "rope_theta": 5e5, "max_seq_len": 4096,
    "norm_placement": "post", "qk_norm": True, "qk_norm_over": "all",
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
_GPT = {
    "family": "gpt2", "norm": "layernorm", "activation": "gelu_tanh", "position": "learned",
    "qkv_bias": True, "out_bias": True, "mlp_bias": True, "tied": True, "vocab_size": 50257,
}  # fmt: skip
_GPT2 = {**_GPT, "max_seq_len": 1024}
_MIXTRAL = {"family": "mixtral", "norm_eps": 1e-5, "rope_theta": 1e6, "head_dim": 128, "vocab_size": 32000}
_QWEN3_MOE = {**_QWEN3, "family": "qwen3_moe"}
_DEEPSEEK = {
    "family": "deepseek_v3", "head_dim": 192, "vocab_size": 129280, "norm_eps": 1e-6, "max_seq_len": 4096,
    "init_std": 0.006, "mla": {"q_rank": 1536, "kv_rank": 512, "rope_dim": 64, "v_dim": 128},
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
    # Meta 2024 (Llama 3.2), model cards.
    "llama3.2-1b": _model(_LLAMA32, 16, 2048, 8192, 32, 8, head_dim=64),
    "llama3.2-3b": _model(_LLAMA32, 28, 3072, 8192, 24, 8),
    # Walsh et al. 2025 (2 OLMo 2 Furious), Table 3, and configs of the models.
    "olmo2-1b": _model(_OLMO2, 16, 2048, 8192, 16, 16),
    "olmo2-7b": _model(_OLMO2, 32, 4096, 11008, 32, 32),
    # Gemma Team 2024 (Gemma 2) and 2025 (Gemma 3), configs of the models.
    "gemma2-2b": _model(_GEMMA2, 26, 2304, 9216, 8, 4, embedding_scale=2304**0.5),
    "gemma3-270m": _model(_GEMMA3, 18, 640, 2048, 4, 1, embedding_scale=640**0.5),
    "gemma3-1b": _model(_GEMMA3, 26, 1152, 6912, 4, 1, embedding_scale=1152**0.5),
    # Qwen Team 2024 (Qwen2.5 technical report), Table 1, and configs of the models.
    "qwen2.5-0.5b": _model(_QWEN25, 24, 896, 4864, 14, 2),
    "qwen2.5-1.5b": _model(_QWEN25, 28, 1536, 8960, 12, 2, max_seq_len=131072),
    "qwen2.5-3b": _model(_QWEN25, 36, 2048, 11008, 16, 2),
    "qwen2.5-7b": _model(_QWEN25, 28, 3584, 18944, 28, 4, max_seq_len=131072, vocab_size=152064, tied=False),
    # Yang et al. 2025 (Qwen3 technical report), Table 1 and model cards.
    "qwen3-0.6b": _model(_QWEN3, 28, 1024, 3072, 16, 8, tied=True),
    "qwen3-1.7b": _model(_QWEN3, 28, 2048, 6144, 16, 8, tied=True),
    "qwen3-4b": _model(_QWEN3, 36, 2560, 9728, 32, 8, tied=True),
    "qwen3-8b": _model(_QWEN3, 36, 4096, 12288, 32, 8),
    "qwen3-32b": _model(_QWEN3, 64, 5120, 25600, 64, 8),
    "qwen3-30b-a3b": _model(_QWEN3_MOE, 48, 2048, 6144, 32, 4, moe=_moe(128, 8, 768, aux_loss=0.001)),
    "qwen3-235b-a22b": _model(_QWEN3_MOE, 94, 4096, 12288, 64, 4, moe=_moe(128, 8, 1536, aux_loss=0.001)),
    # Jiang et al. 2024 (Mixtral of Experts), Table 1; the 8x22B's model card.
    "mixtral-8x7b": _model(
        _MIXTRAL, 32, 4096, 14336, 32, 8, max_seq_len=32768, moe=_moe(8, 2, 14336, aux_loss=0.02)
    ),
    "mixtral-8x22b": _model(
        _MIXTRAL, 56, 6144, 16384, 48, 8, max_seq_len=65536, moe=_moe(8, 2, 16384, aux_loss=0.001)
    ),
    # DeepSeek-AI 2024 (DeepSeek-V3), §4.2.
    "deepseek-v3": _model(_DEEPSEEK, 61, 7168, 18432, 128, 128, moe=_MOE_DEEPSEEK),
}
