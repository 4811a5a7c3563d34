"""Named models: the shapes that their papers and model cards give."""

from __future__ import annotations

from typing import Any

_LLAMA: dict[str, Any] = {"family": "llama", "norm_eps": 1e-5}
_LLAMA3 = {**_LLAMA, "vocab_size": 128256, "rope_theta": 500000.0, "max_seq_len": 8192, "head_dim": 128}
_QWEN3 = {
    "family": "qwen3",
    "vocab_size": 151936,
    "head_dim": 128,
    "norm_eps": 1e-6,
    "rope_theta": 1e6,
    "max_seq_len": 40960,
    "qk_norm": True,
}
_GPT = {
    "family": "gpt2",
    "norm": "layernorm",
    "activation": "gelu_tanh",
    "position": "learned",
    "qkv_bias": True,
    "out_bias": True,
    "mlp_bias": True,
    "tied": True,
}
_MIXTRAL = {"family": "mixtral", "norm_eps": 1e-5, "rope_theta": 1e6, "head_dim": 128}
_QWEN3_MOE = {**_QWEN3, "family": "qwen3_moe"}


def _sizes(layers: int, hidden: int, ffn: int, heads: int, kv_heads: int) -> dict[str, Any]:
    return {"layers": layers, "hidden": hidden, "ffn": ffn, "heads": heads, "kv_heads": kv_heads}


PRESETS: dict[str, dict[str, Any]] = {
    # Ours: `tiny` for tests (3M parameters), `small` (32M) and `base` (125M) for a laptop.
    "tiny": {**_LLAMA, **_sizes(4, 256, 384, 8, 4), "vocab_size": 2048},
    "small": {**_LLAMA, **_sizes(8, 512, 1408, 8, 4), "vocab_size": 8192},
    # `moe-tiny` has as many active channels as tiny, `moe-small` as small.
    "moe-tiny": {
        **_LLAMA,
        **_sizes(4, 256, 384, 8, 4),
        "vocab_size": 2048,
        "moe": {"experts": 8, "top_k": 2, "ffn": 128, "shared_ffn": 128, "aux_loss": 0.01, "dense_first": 1},
    },
    "moe-small": {
        **_LLAMA,
        **_sizes(8, 512, 1408, 8, 4),
        "vocab_size": 8192,
        "moe": {
            "experts": 16,
            "top_k": 2,
            "ffn": 512,
            "shared_ffn": 384,
            "router": "sigmoid",
            "bias": True,
            "bias_rate": 0.01,
            "aux_loss": 0.001,
        },
    },
    "base": {**_LLAMA, **_sizes(12, 768, 2048, 12, 4), "vocab_size": 32000},
    # Brown et al. 2020, Table 2.1.
    "gpt3-175b": {**_GPT, **_sizes(96, 12288, 49152, 96, 96), "vocab_size": 50257, "max_seq_len": 2048},
    # Touvron et al. 2023 (Llama 2), model cards.
    "llama2-7b": {**_LLAMA, **_sizes(32, 4096, 11008, 32, 32), "vocab_size": 32000, "max_seq_len": 4096},
    "llama2-13b": {**_LLAMA, **_sizes(40, 5120, 13824, 40, 40), "vocab_size": 32000, "max_seq_len": 4096},
    "llama2-70b": {**_LLAMA, **_sizes(80, 8192, 28672, 64, 8), "vocab_size": 32000, "max_seq_len": 4096},
    # Grattafiori et al. 2024 (The Llama 3 Herd of Models), Table 3.
    "llama3-8b": {**_LLAMA3, **_sizes(32, 4096, 14336, 32, 8)},
    "llama3-70b": {**_LLAMA3, **_sizes(80, 8192, 28672, 64, 8)},
    "llama3-405b": {**_LLAMA3, **_sizes(126, 16384, 53248, 128, 8)},
    # Yang et al. 2025 (Qwen3 technical report), Table 1 and model cards.
    "qwen3-8b": {**_QWEN3, **_sizes(36, 4096, 12288, 32, 8)},
    "qwen3-32b": {**_QWEN3, **_sizes(64, 5120, 25600, 64, 8)},
    "qwen3-30b-a3b": {
        **_QWEN3_MOE,
        **_sizes(48, 2048, 6144, 32, 4),
        "moe": {"experts": 128, "top_k": 8, "ffn": 768, "aux_loss": 0.001},
    },
    "qwen3-235b-a22b": {
        **_QWEN3_MOE,
        **_sizes(94, 4096, 12288, 64, 4),
        "moe": {"experts": 128, "top_k": 8, "ffn": 1536, "aux_loss": 0.001},
    },
    # Jiang et al. 2024 (Mixtral of Experts), Table 1; the 8x22B's model card.
    "mixtral-8x7b": {
        **_MIXTRAL,
        **_sizes(32, 4096, 14336, 32, 8),
        "vocab_size": 32000,
        "max_seq_len": 32768,
        "moe": {"experts": 8, "top_k": 2, "ffn": 14336, "aux_loss": 0.02},
    },
    "mixtral-8x22b": {
        **_MIXTRAL,
        **_sizes(56, 6144, 16384, 48, 8),
        "vocab_size": 32000,
        "max_seq_len": 65536,
        "moe": {"experts": 8, "top_k": 2, "ffn": 16384, "aux_loss": 0.001},
    },
    # DeepSeek-AI 2024 (DeepSeek-V3), §4.2.
    "deepseek-v3": {
        "family": "deepseek_v3",
        **_sizes(61, 7168, 18432, 128, 128),
        "head_dim": 192,
        "vocab_size": 129280,
        "norm_eps": 1e-6,
        "max_seq_len": 4096,
        "init_std": 0.006,
        "mla": {"q_rank": 1536, "kv_rank": 512, "rope_dim": 64, "v_dim": 128},
        "moe": {
            "experts": 256,
            "top_k": 8,
            "ffn": 2048,
            "shared_ffn": 2048,
            "router": "sigmoid",
            "scale": 2.5,
            "groups": 8,
            "top_groups": 4,
            "bias": True,
            "aux_loss": 0.0001,
            "dense_first": 3,
        },
    },
}
